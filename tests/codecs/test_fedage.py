"""FedAGE in the loop: rounding, agreement on a scale, the mean of codes, weights, drop-outs and what it refuses."""

import math
from dataclasses import replace

import msgspec
import pytest
import torch

import fedveil as fv
from codec_tools import digits, image_task, stack_of, trained
from fedveil.codecs.fedage import Codes, FedAgeCodec, Magnitude, Scaled, Send, quantise
from fedveil.core import message
from fedveil.core.clients import Clients, Letter
from fedveil.core.message import Envelope
from fedveil.links.down import Train
from fedveil.runs import recipe
from fedveil.runs.cost import cost
from toys import OtherProcess, Tamper, kept, linear_task

LOCAL = fv.LocalTraining(lr=0.5, batch=4)
DIGITS = fv.LocalTraining(lr=0.3, epochs=5, batch=20)
SHIPPED = FedAgeCodec(block=16, cohort=5, width=64)
LINEAR = replace(SHIPPED, code="linear")
LOSSLESS = FedAgeCodec(block=3, code_size=3, code="linear", levels=1 << 15)  # 8 weights are no multiple of 3


# ---------------------------------------------------------------------------------------------------- rounding


def test_rounding_is_unbiased():
    x = torch.tensor([0.0, 0.004, 0.3, 0.7311, 1.0])
    draws = torch.rand(20_000, 5, generator=torch.Generator().manual_seed(0))
    rounded = quantise(x.expand_as(draws), 1.0, 8, draws) / 8
    error = rounded.std(0) / math.sqrt(len(draws))
    assert bool(((rounded.mean(0) - x).abs() <= 4 * error + 1e-7).all())
    assert bool((rounded.std(0)[1:4] > 0.01).all())


def test_rounding_gives_whole_numbers_from_0_to_s_and_cuts_what_is_above_n():
    x = torch.tensor([0.0, 0.5, 2.0, 1e6])
    draws = torch.rand(500, 4, generator=torch.Generator().manual_seed(0))
    levels = quantise(x.expand_as(draws), 1.0, 64, draws)
    assert torch.equal(levels, levels.round())
    assert levels[:, 0].unique().tolist() == [0]
    assert levels[:, 2:].unique().tolist() == [64]
    assert quantise(torch.zeros(3), 0.0, 64, torch.zeros(3)).tolist() == [0, 0, 0]


# ---------------------------------------------------------------------------------------------------- codes


def at(codec: FedAgeCodec, task: fv.Task, updates: torch.Tensor, seed: int) -> Scaled:
    """The codec of a round whose scale is the largest number in the updates."""
    return codec.at(task, Send(float(updates.abs().max()), codec.digest), fv.Seed.root(seed))


@pytest.mark.parametrize("permute", [True, False])
def test_a_code_that_loses_nothing_gives_the_mean_back(permute):
    task = image_task()
    updates = torch.randn(4, task.layout.size, generator=torch.Generator().manual_seed(0))
    codec = at(replace(LOSSLESS, permute=permute), task, updates, 3)
    payloads = codec.encode(task, updates, updates, [fv.Seed.root(k) for k in range(4)], None)
    torch.testing.assert_close(codec.merge(task, payloads, len(payloads))[0], updates.mean(0), atol=1e-3, rtol=0)
    torch.testing.assert_close(codec.decode(task, updates, payloads), updates, atol=1e-3, rtol=0)


def test_the_decoded_mean_of_real_updates_is_near_their_mean():
    task = digits()
    updates = trained(stack_of(task, 0, 1, 2, 3, 4), DIGITS)
    for codec, least in ((LINEAR, 0.69), (SHIPPED, 0.66)):
        tuned = at(codec, task, updates, 3)
        payloads = tuned.encode(task, updates, updates, [fv.Seed.root(k) for k in range(5)], None)
        assert float(torch.cosine_similarity(tuned.merge(task, payloads, len(payloads))[0], updates.mean(0), 0)) > least


def test_over_shuffles_the_linear_code_is_unbiased_up_to_h_over_b():
    """Why a server step of b/h makes up for what one round loses."""
    task = image_task()
    update = torch.randn(1, task.layout.size, generator=torch.Generator().manual_seed(0))
    codec = FedAgeCodec(block=8, code="linear", levels=1 << 15)
    found = []
    for k in range(600):
        tuned = at(codec, task, update, k)
        found.append(tuned.merge(task, tuned.encode(task, update, update, [fv.Seed.root(k)], None), 1)[0])
    means = torch.stack(found)
    error = means.std(0) / math.sqrt(len(means))
    assert float(((2 * means.mean(0) - update[0]) / (2 * error)).square().mean()) < 1.5
    assert float((means.mean(0) - update[0]).norm() / update.norm()) > 0.4  # a step of 1 would be too short


def test_a_message_is_as_long_as_the_update_whatever_it_holds():
    task = image_task()
    sizes = FedAgeCodec(block=16, code="linear").sizes(task)
    assert (sizes["blocks"], sizes["code"]) == (-(-task.layout.size // 16), 8)


def test_layers_have_scales_of_their_own():
    """A layer that changes a hundred times less is rounded a hundred times finer."""
    task = image_task()
    draw = torch.Generator().manual_seed(0)
    sizes = torch.ones(task.layout.size)
    first, *rest = task.layout.layers
    sizes[first.start : first.stop] = 0.01
    updates = torch.randn(4, task.layout.size, generator=draw) * sizes
    codec = FedAgeCodec(block=4, code="packed", cohort=4, scales="layers")
    scales = codec.scales_of(codec.magnitudes(task, updates), 1)
    by_hand = [float(updates[:, layer.start : layer.stop].abs().max()) for layer in (first, *rest)]
    assert scales.tolist() == pytest.approx(by_hand)
    tuned = codec.at(task, codec.sending(scales), fv.Seed.root(0))
    payloads = tuned.encode(task, updates, updates, [fv.Seed.root(k) for k in range(4)], None)
    for found, expected in (
        (tuned.merge(task, payloads, 4)[0], updates.mean(0)),
        (tuned.decode(task, updates, payloads), updates),
    ):
        error = (found - expected).abs()
        for layer, n in zip((first, *rest), by_hand, strict=True):
            assert 0 < float(error[..., layer.start : layer.stop].max()) <= n / 64 * (1 + 1e-4)
    with pytest.raises(ValueError, match="fedage's scales is 'rows'; use whole or layers"):
        FedAgeCodec(scales="rows")


# ---------------------------------------------------------------------------------------------------- in the loop


def final(method: fv.Method, task: fv.Task, rounds: int = 3, **options: object) -> fv.Result:
    return fv.run(task, method, rounds=rounds, cohort=4, **options)


@pytest.mark.parametrize(
    "plain",
    [
        fv.FedAvg(LOCAL),
        fv.FedProx(LOCAL, mu=0.5),
        fv.FedSGD(server=fv.ServerOptimizer(lr=0.5)),
        fv.FedAvg(LOCAL, down=fv.Half()),
        fv.FedAvg(LOCAL, server=fv.ServerOptimizer(optimizer="adam", lr=0.1)),
        fv.QFedAvg(LOCAL, q=2.0),
    ],
    ids=lambda method: f"{method.name}{' down' if getattr(method, 'down', None) else ''}",
)
def test_with_a_code_that_loses_nothing_every_method_ends_where_it_ends_without(plain):
    """Clients have 1 to 4 times as many records, so their weights count; and q-FedAvg's losses."""
    task = linear_task(records=60, uneven=True)
    coded = final(replace(plain, up=LOSSLESS), task)
    expected = final(plain, task)
    assert float((expected.weights - task.initial).abs().max()) > 0.1
    torch.testing.assert_close(coded.weights, expected.weights, atol=2e-3, rtol=0)
    assert not any(row.missing for row in coded.ledger.rows)


PACKED = FedAgeCodec(block=3, code_size=2, code="packed", cohort=4, levels=1023, permute=False)


@pytest.mark.parametrize("scales", ["whole", "layers"])
@pytest.mark.parametrize("plain", [fv.FedAvg(LOCAL), fv.QFedAvg(LOCAL, q=2.0)], ids=lambda method: method.name)
def test_packed_codes_end_where_the_whole_numbers_themselves_end(plain, scales):
    """With one number a code nothing is packed. One client drops out in round 2."""
    task = linear_task(records=60, uneven=True)

    def lose(round_, replies):
        return [r for r in replies if (r.client, round_, message.envelope(r.frame)[0]) != (2, 2, Codes.kind)]

    packed = replace(PACKED, scales=scales)
    ends = [
        final(replace(plain, up=up), task, engine=Tamper(lose)) for up in (packed, replace(packed, code_size=3, seed=1))
    ]
    assert torch.equal(ends[0].weights, ends[1].weights)
    assert list(ends[0].ledger.rows[1].missing) == ["2"]
    torch.testing.assert_close(
        final(replace(plain, up=packed), task).weights, final(plain, task).weights, atol=3e-3, rtol=0
    )


def test_packed_codes_survive_a_secure_sum_with_enough_bits():
    """The sum rounds codes, by less than half in all, and λ; with equal clients λ is the same for all."""
    task = linear_task(records=60, uneven=True)
    small = replace(PACKED, levels=64)
    clear = final(fv.FedAvg(LOCAL, up=small), task)
    summed = final(fv.FedAvg(LOCAL, up=small, secure=fv.SecureSum(bits=28)), task)
    torch.testing.assert_close(summed.weights, clear.weights, atol=1e-3, rtol=0)
    with pytest.raises(
        ValueError, match=r"secure\.bits is 18, but fedage's codes of 4 clients add up exactly with 19 bits"
    ):
        final(fv.FedAvg(LOCAL, up=small, secure=fv.SecureSum(bits=18)), task)
    final(fv.FedAvg(LOCAL, up=small, secure=fv.SecureSum(bits=19)), task, rounds=1)


@pytest.mark.parametrize(("kind", "asked"), [("uniform", 5), ("poisson", 6)])
def test_a_cohort_that_packed_codes_cannot_hold_is_refused_before_the_first_round(kind, asked):
    method = fv.FedAvg(LOCAL, up=PACKED)
    cohort = fv.CohortSampler(size=5, kind=kind)
    why = f"a round may ask {asked} clients, but fedage's codes add up for 4 at most; set method.up.cohort={asked}"
    with pytest.raises(ValueError, match=why):
        fv.run(linear_task(clients=6), method, rounds=1, cohort=cohort)


@pytest.mark.parametrize("plain", [fv.FedAvg(LOCAL), fv.QFedAvg(LOCAL, q=2.0)], ids=lambda method: method.name)
def test_a_client_that_drops_out_between_the_two_questions_is_left_out_of_the_mean(plain):
    task = linear_task(records=60, uneven=True)

    def lose(kind: int):
        return Tamper(lambda _, replies: [r for r in replies if (r.client, message.envelope(r.frame)[0]) != (2, kind)])

    coded = final(replace(plain, up=LOSSLESS), task, engine=lose(Codes.kind))
    expected = final(plain, task, engine=lose(plain.parts.up.payloads.record.kind))
    assert all(list(row.missing) == ["2"] for row in coded.ledger.rows)
    torch.testing.assert_close(coded.weights, expected.weights, atol=2e-3, rtol=0)
    everybody = final(plain, task)
    assert float((everybody.weights - expected.weights).abs().max()) > 0.01


def test_the_scale_is_the_largest_change_of_any_client_times_a_factor_that_decays():
    task = linear_task()
    method = fv.FedAvg(fv.LocalTraining(lr=0.1, batch=100), up=replace(LOSSLESS, scale=0.5, decay=0.5))
    first, second, _ = final(method, task).ledger.rows
    stack = stack_of(task, 0, 1, 2, 3)
    largest = float(method.released(stack, Train(task.initial), task.initial)["update"].abs().max())
    assert first.metrics["scale"] == pytest.approx(0.5 * largest, rel=1e-5)
    assert second.metrics["scale"] < 0.5 * first.metrics["scale"]
    assert first.metrics["clipped"] > 0
    assert final(replace(method, up=LOSSLESS), task).ledger.rows[0].metrics["clipped"] == 0


def test_results_do_not_depend_on_the_engine_or_on_an_interruption(tmp_path):
    method = fv.FedAvg(LOCAL, up=FedAgeCodec(block=4, code="linear"), feedback=True)
    here = fv.run(linear_task(), method, rounds=4, cohort=3, folder=tmp_path / "a")
    there = fv.run(linear_task(), method, rounds=4, cohort=3, engine=OtherProcess())
    torch.testing.assert_close(here.weights, there.weights)
    fv.run(linear_task(), method, rounds=2, cohort=3, folder=tmp_path / "b")
    fv.run(linear_task(), method, rounds=4, cohort=3, folder=tmp_path / "b")
    one, other = kept(tmp_path / "a"), kept(tmp_path / "b")
    assert one[1:3] == other[1:3]


def test_with_feedback_what_one_shuffle_loses_another_sends():
    task = linear_task(records=60)
    codec = FedAgeCodec(block=4, code="linear", levels=1 << 15)
    target = final(fv.FedSGD(server=fv.ServerOptimizer(lr=0.3)), task, rounds=30).weights - task.initial
    plain, fed = (
        final(fv.FedSGD(up=codec, feedback=on, server=fv.ServerOptimizer(lr=0.3)), task, rounds=30).weights
        - task.initial
        for on in (False, True)
    )
    assert float((fed - target).norm()) < 0.7 * float((plain - target).norm())


def test_noise_and_clipping_come_before_the_code():
    task = linear_task()
    quiet, loud = (
        final(fv.FedAvg(LOCAL, up=LOSSLESS, user_privacy=how), task, rounds=1, insecure_test_noise=1)
        for how in (fv.UserLevel(clip=1e-3, noise=noise, delta=0.1, where="client") for noise in (1e-4, 100.0))
    )
    assert float((quiet.weights - task.initial).norm()) <= 1.01e-3
    assert 0.02 < float((loud.weights - task.initial).norm()) < 0.6  # √8 · 0.1 / √4 is 0.14


def test_what_it_will_cost_is_what_it_costs():
    linear = ["method.up.name=fedage", "method.up.block=16", "method.up.code=linear"]
    layers = ["method.up.scales=layers"]
    for source, code in (("digits/fedage", linear), ("digits/q-fedavg", linear), ("digits/fedage-packed", layers)):
        up = [*code, "rounds=2", "method.local.epochs=1"]
        plan = recipe.read(source, up)
        told = cost(digits(), plan)
        spent = fv.run(digits(), plan.method, rounds=2, cohort=plan.cohort, seed=plan.seed).summary()
        assert (told["up"]["total"], told["down"]["total"]) == (spent["bytes_up"], spent["bytes_down"])


@pytest.mark.slow
def test_on_the_digits_it_ends_within_a_point_of_fedavg_with_or_without_drop_outs():
    plan, plain = recipe.read("digits/fedage"), recipe.read("digits/fedavg")
    best = fv.run(digits(), plain.method, rounds=20, cohort=plain.cohort).accuracy
    for drop in (0.0, 0.3):
        found = fv.run(digits(), plan.method, rounds=20, cohort=replace(plan.cohort, drop=drop))
        assert found.accuracy >= best - 0.01
        assert bool(found.ledger.summary("")["clients_failed"]) == (drop > 0)


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: fv.FedAvg(up=SHIPPED, aggregator=fv.Aggregator("median")), "decodes only the mean"),
        (
            lambda: fv.FedAvg(up=SHIPPED, aggregator=fv.Aggregator("clip")),
            'user_privacy.where="client" to bound updates',
        ),
        (lambda: fv.FedAvg(down=SHIPPED), "fedage, which is for the way up only"),
        (lambda: fv.FedAvg(up=replace(SHIPPED, permute=False), feedback=True), "set method.up.permute=true"),
        (lambda: fv.Zstd(inner=SHIPPED), "averaged as they are sent"),
        (lambda: fv.Tiers(strong=SHIPPED, weak=SHIPPED), "averaged and so are of one kind"),
        (lambda: fv.Scaffold(up=SHIPPED), "scaffold sends 2 vectors .update, control., and fedage codes one"),
        (lambda: fv.QFedAvg(up=SHIPPED, full_rounds=1), "q-fedavg sends fedage's codes in every round"),
        (lambda: FedAgeCodec(scale=0), "scale > 0"),
        (lambda: FedAgeCodec(code_size=100), "a pair needs"),
        (lambda: FedAgeCodec(code="dense"), "a code of learned, linear, packed and a pretraining of own or paper"),
        (lambda: FedAgeCodec(code="packed", levels=512), "set at most 409 levels"),
    ],
)
def test_what_makes_no_sense_is_a_configuration_error_with_its_reason(make, why):
    with pytest.raises(ValueError, match=why):
        make()


def test_q_fedavg_takes_any_codec():
    """Its weights h_k travel beside the payload, whatever that is."""
    task = linear_task(records=60, uneven=True)
    expected = final(fv.QFedAvg(LOCAL, q=2.0), task)
    found = final(fv.QFedAvg(LOCAL, q=2.0, up=fv.Half()), task)
    torch.testing.assert_close(found.weights, expected.weights, atol=2e-3, rtol=0)
    rough = final(fv.QFedAvg(LOCAL, q=2.0, up=fv.Qsgd(bits=8)), task)
    torch.testing.assert_close(rough.weights, expected.weights, atol=0.1, rtol=0)


def test_a_pair_that_was_never_trained_is_said_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    for method in (fv.FedAge(), fv.QFedAvg(up=FedAgeCodec(seed=12345))):
        with pytest.raises(ValueError, match="fedage has no trained pair b64-h32-s64-m10-w512"):
            fv.run(linear_task(), method, rounds=1)


def answer(method: fv.Method, *questions: fv.Question) -> list[str]:
    """What a client says to questions in one round: the kind of its answer, or its refusal."""
    task, heard = linear_task(), []
    clients = Clients(method, task, bytes(8), fv.Seed.root(0))
    for serial, question in enumerate(questions):
        letter = Letter(question.kind, Envelope(bytes(8), 1, 0, serial), message.pack(question))
        try:
            heard.append(message.KINDS[message.envelope(clients.answer([letter])[0].frame)[0]].__name__)
        except fv.Refused as error:
            heard.append(str(error))
    return heard


def test_a_client_sends_codes_only_of_what_it_trained_and_only_with_the_servers_pair():
    method = fv.FedAvg(LOCAL, up=LOSSLESS)
    train, send = Train(linear_task().initial), Send(1.0, LOSSLESS.digest)
    assert answer(method, train, send) == [Magnitude.__name__, Codes.__name__]
    (lost,) = answer(method, send)
    assert lost.startswith("lost state: ")
    _, other = answer(method, train, Send(1.0, replace(LOSSLESS, seed=1).digest))
    assert other.startswith("out of step: ")
    (wrong,) = answer(fv.FedAvg(LOCAL), send)
    assert wrong.startswith("wrong kind: ")


def test_the_digest_is_of_the_pair_and_not_of_how_it_is_used():
    assert LINEAR.digest == replace(LINEAR, scale=2.0, permute=False).digest
    others = [replace(LINEAR, levels=32), replace(LINEAR, code="packed"), replace(LINEAR, code="packed", cohort=6)]
    assert len({codec.digest for codec in (SHIPPED, LINEAR, *others)}) == 5


def test_one_client_cannot_drown_the_others_where_the_scale_is_bounded():
    task = linear_task()

    def boast(_, replies):
        return [
            replace(r, frame=rewritten(r.frame, largest=1e6))
            if r.client == 1 and message.envelope(r.frame)[0] == Magnitude.kind
            else r
            for r in replies
        ]

    honest = final(fv.FedAvg(LOCAL, up=FedAgeCodec(block=4, code_size=4, code="linear")), task)
    for most, close in ((None, False), (1.0, True)):
        method = fv.FedAvg(LOCAL, up=FedAgeCodec(block=4, code_size=4, code="linear", max_scale=most))
        drowned = final(method, task, engine=Tamper(boast))
        assert (float((drowned.weights - honest.weights).abs().max()) < 0.05) is close


def rewritten(frame: bytes, **changes: object) -> bytes:
    _, where = message.envelope(frame)
    record, _ = message.unframe(frame, message.KINDS, len(frame))
    return message.frame(msgspec.structs.replace(record, **changes), where)
