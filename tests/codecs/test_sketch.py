"""Sketches: linear maps that a round's clients share, so messages add up, are clipped and noised, and decoded once."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedveil as fv
from codec_tools import stack_of, through_the_wire
from fedveil.codecs.sketch import LAWS, Sketch, Sketched, mix, transform
from fedveil.core import message, schema
from fedveil.core.directions import Directions, words
from fedveil.core.message import Envelope
from fedveil.core.setup import private_root
from fedveil.methods.baffle.probing import Prober
from fedveil.privacy.dpsgd import WITHIN, normal
from methods.matrix import LOCAL, task
from testing.settings import SECURE

KEYS = [fv.Seed.root(i).word for i in range(300)]
FULL = fv.LocalTraining(lr=0.2, batch=100)
USER = fv.UserLevel(noise=1.5, clip=0.1, delta=1e-2)
ORTHONORMAL = ("hadamard", "count")


def ran(method: fv.Averaging, rounds: int = 2, **sampling: float) -> fv.Result:
    return fv.run(task(), method, rounds=rounds, cohort=fv.CohortSampler(**{"size": 6} | sampling))


def sylvester(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def matrix(law: str, key: int, size: int, count: int) -> torch.Tensor:
    """S [K, d] in float64."""
    return LAWS[law](key, size, count).sketch(torch.eye(size)).T.double()


# ---------------------------------------------------------------------------------------------------- the maps


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_the_transform_is_a_product_with_sylvesters_matrix(size):
    x = torch.randn(3, size, 5, generator=fv.Seed.root(0).torch(), dtype=torch.float64)
    torch.testing.assert_close(transform(x.clone()), sylvester(size) @ x, atol=1e-13, rtol=0)


def test_golden_transform():
    x = torch.tensor([1.0, 0, 2, -1, 0.5, 0, 0, 3], dtype=torch.float64)
    found = transform(x.clone()[None, :, None]).flatten().tolist()
    assert found == [5.5, 1.5, -2.5, 1.5, -1.5, 6.5, 2.5, -5.5]


def test_golden_sketches():
    """Both sides of a run draw the same map in every version."""
    for law, expected in GOLDEN.items():
        assert LAWS[law](1234567, 5, 3).sketch(torch.arange(1.0, 6.0)[None])[0].tolist() == pytest.approx(expected)


GOLDEN = {
    "hadamard": [-3.8729832, 6.4549723, -1.2909944],
    "count": [2.7386129, 6.3900967, -3.8729832],
    "gaussian": [7.1262698, -0.1317960, -2.7673895],
}


@pytest.mark.parametrize("law", ORTHONORMAL)
@pytest.mark.parametrize(("size", "count"), [(5, 5), (64, 20), (96, 96), (1000, 1)])
def test_rows_are_orthonormal_but_for_their_scale(law, size, count):
    s = matrix(law, KEYS[0], size, count)
    torch.testing.assert_close(s @ s.T, size / count * torch.eye(count).double(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 5003])
def test_mixing_is_its_own_inverse_and_spreads_a_weight(size):
    x = torch.eye(size, dtype=torch.float64)[:3].clone()
    mixed = mix(x.clone())
    torch.testing.assert_close(mix(mixed.clone()), x, atol=1e-13, rtol=0)
    if size >= 64:
        assert float(mixed.abs().max()) <= (32 / size) ** 0.5


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("size", "count"), [(163, 48), (10, 10), (33, 1)])
def test_decoding_loses_no_more_than_it_is_given_and_is_the_scaled_transpose(law, size, count):
    for key in KEYS[:10]:
        law_ = LAWS[law](key, size, count)
        s, back = matrix(law, key, size, count), law_.restore(torch.eye(count)).T.double()
        ratio = float((back * s.T).sum() / s.square().sum())
        torch.testing.assert_close(back, ratio * s.T, atol=1e-5, rtol=1e-4)
        if law in ORTHONORMAL:
            lost = torch.linalg.matrix_norm(torch.eye(size).double() - back @ s, 2)
            assert float(lost) <= 1 + 1e-5


@pytest.mark.parametrize("law", LAWS)
def test_the_mean_of_sts_is_the_identity_and_the_norm_is_kept_on_average(law):
    size, count = 40, 8
    mean = torch.stack([(s := matrix(law, key, size, count)).T @ s for key in KEYS]).mean(0)
    off = mean - torch.eye(size).double()
    assert float(off.diagonal().abs().max()) < 0.35  # of 300 draws
    assert float(off.diagonal().mean().abs()) < 0.05
    assert float((off - off.diagonal().diag()).abs().max()) < 6 * math.sqrt(size / count / 2 / len(KEYS))


@pytest.mark.parametrize("law", LAWS)
def test_no_other_factor_decodes_nearer_in_the_mean_square(law):
    """The least error of a factor a on Sᵀ S u is at E⟨u, SᵀS u⟩ / E|SᵀS u|²."""
    size, count = 120, 24
    u = torch.randn(1, size, generator=fv.Seed.root(0).torch())
    maps = [LAWS[law](key, size, count) for key in KEYS]
    decoded = torch.cat([m.restore(m.sketch(u)) for m in maps])
    best = float((decoded @ u[0]).sum() / decoded.square().sum())
    assert best == pytest.approx(1, abs=0.06)


def test_all_places_are_equally_likely_and_none_comes_twice():
    draws = [LAWS["hadamard"](key, 200, 60)._places(torch.device("cpu")) for key in KEYS]
    assert all(len(set(draw.tolist())) == 60 for draw in draws)
    counts = torch.bincount(torch.cat(draws))
    assert len(counts) == 200
    expected = 300 * 60 / 200
    assert float((counts - expected).abs().max()) < 5 * math.sqrt(expected)


def test_gaussian_sketches_are_decoded_as_baffles_slopes_are():
    key, size, count = KEYS[0], task().layout.size, 20
    law = Directions.of("gaussian", size, count)
    numbers = torch.randn(1, count, generator=fv.Seed.root(0).torch())
    scale = math.sqrt(count) / (size + count + 1)
    theirs = Prober(task(), law, 1e-4, "forward").combine([key], [numbers[0] * scale])
    torch.testing.assert_close(LAWS["gaussian"](key, size, count).restore(numbers)[0], theirs)


def test_pieces_of_a_large_stack_are_mapped_alike(monkeypatch):
    updates = torch.randn(7, 163, generator=fv.Seed.root(0).torch())
    law = LAWS["hadamard"](KEYS[0], 163, 48)
    whole = law.sketch(updates)
    monkeypatch.setattr("fedveil.codecs.sketch.AT_ONCE", {"cpu": 400})
    assert torch.equal(law.sketch(updates), whole)
    assert torch.equal(law.restore(whole[:1]), law.restore(whole)[:1])


# ---------------------------------------------------------------------------------------------------- payloads


@pytest.mark.parametrize("law", LAWS)
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 163), st.integers(0, 10**6), st.integers(1, 4))
def test_payloads_add_up(law, count, seed, clients):
    """The sum of payloads is decoded to the sum of what each is decoded to, and is the payload of the sum."""
    codec, w = Sketch(count, law), task().initial
    updates = torch.randn(clients, 163, generator=fv.Seed.root(seed).torch())
    stack = stack_of(task(), *range(clients), round_=seed)
    payloads = codec.encode(task(), w.expand(clients, -1), updates, stack.seeds("encoding"), stack)
    received = [through_the_wire(codec, task(), payload) for payload in payloads]
    total = Sketched(torch.stack([p.numbers for p in received]).sum(0), received[0].key)
    (whole,) = codec.encode(task(), w[None], updates.sum(0)[None], stack.seeds("encoding")[:1], stack)
    torch.testing.assert_close(total.numbers, whole.numbers, atol=1e-4, rtol=1e-4)
    each = codec.decode(task(), w.expand(clients, -1), received).sum(0)
    torch.testing.assert_close(codec.decode(task(), w[None], [total])[0], each, atol=1e-4, rtol=1e-4)


def test_each_round_has_directions_of_its_own_and_payloads_of_different_rounds_are_decoded():
    codec, w = Sketch(16), task().initial
    updates = torch.randn(2, 163, generator=fv.Seed.root(0).torch())
    payloads = [
        codec.encode(task(), w[None], row[None], [fv.Seed.root(0)], stack_of(task(), 0, round_=i))[0]
        for i, row in enumerate(updates)
    ]
    assert payloads[0].key != payloads[1].key
    both = codec.decode(task(), w.expand(2, -1), payloads)
    for payload, row in zip(payloads, both, strict=True):
        torch.testing.assert_close(codec.decode(task(), w[None], [payload])[0], row)


def test_a_frame_has_four_bytes_a_number_and_a_key():
    (row,) = ran(fv.FedAvg(LOCAL, up=Sketch(48)), 1).ledger.rows
    blank = schema.blank(Sketched, Sketch(48).sizes(task()))
    assert len(blank.key) == 8
    assert set(row.up.values()) == {message.size(blank)}
    raw = message.frame(fv.Raw.payload(torch.zeros(48)), Envelope())
    assert message.size(blank) <= len(raw) + 16


# ---------------------------------------------------------------------------------------------------- runs


def test_one_round_by_hand():
    """The server's step is the decoded mean of the updates, weighted by records."""
    codec = Sketch(48)
    mean = (ran(fv.FedAvg(LOCAL), 1).weights - task().initial)[None]
    seed = fv.Seed.root(0).child("round", 1)
    expected = codec.decode(task(), mean, codec.encode(task(), mean, mean, [seed], None))[0]
    got = ran(fv.FedAvg(LOCAL, up=codec), 1).weights - task().initial
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("law", LAWS)
def test_a_secure_sum_gives_what_the_clear_gives(law):
    codec = Sketch(48, law)
    clear, secure = (ran(fv.FedAvg(LOCAL, up=codec, secure=how)) for how in (None, SECURE))
    torch.testing.assert_close(secure.weights, clear.weights, atol=1e-5, rtol=0)
    assert secure.ledger.rows[0].metrics["clipped"] == 0


def test_a_robust_aggregator_sees_decoded_updates():
    codec = Sketch(48)
    result = ran(fv.FedAvg(LOCAL, up=codec, aggregator=fv.Aggregator("median")), 1)
    stack = dataclasses.replace(stack_of(task(), *range(6)), seed=fv.Seed.root(0).child("round", 1))
    w = task().initial
    updates = LOCAL.train(stack, w)[0] - w
    decoded = codec.decode(task(), w.expand(6, -1), codec.encode(task(), w, updates, stack.seeds("encoding"), stack))
    ordered = decoded.sort(0).values
    torch.testing.assert_close(result.weights, w + (ordered[2] + ordered[3]) / 2, atol=1e-6, rtol=1e-4)


def test_feedback_sends_later_what_a_sketch_loses():
    plain = ran(fv.FedAvg(FULL), 30).weights
    lost, kept = (ran(fv.FedAvg(FULL, up=Sketch(16), feedback=feedback), 30).weights for feedback in (False, True))
    assert torch.linalg.norm(kept - plain) < 0.8 * torch.linalg.norm(lost - plain)


def test_steps_of_plain_averaging_go_down_in_a_sketch_without_loss():
    """The step is in the span of the round's directions, and the way down has the same."""
    codec = Sketch(48)
    full, steps = (ran(fv.FedAvg(LOCAL, up=codec, down=down), 4) for down in (None, codec))
    torch.testing.assert_close(steps.weights, full.weights, atol=1e-5, rtol=0)
    assert steps.ledger.rows[-1].metrics["cosine_down"] == pytest.approx(1, abs=1e-5)
    assert steps.ledger.rows[-1].bytes_down < 0.5 * full.ledger.rows[-1].bytes_down


# ---------------------------------------------------------------------------------------------------- privacy


def codes(codec: Sketch, clip: float) -> torch.Tensor:
    """The clipped sketches of all clients in round 1, [6, K]."""
    stack = dataclasses.replace(stack_of(task(), *range(6)), seed=fv.Seed.root(0).child("round", 1))
    updates = LOCAL.train(stack, task().initial)[0] - task().initial
    payloads = codec.encode(task(), task().initial, updates, stack.seeds("encoding"), stack)
    numbers = torch.stack([payload.numbers for payload in payloads])
    norms = numbers.norm(dim=1, keepdim=True)
    assert (norms > clip).all()
    return numbers * (WITHIN * clip / norms)


def test_a_trusted_server_clips_sketches_and_adds_noise_to_k_numbers():
    codec, w = Sketch(16), task().initial
    method = fv.FedAvg(LOCAL, up=codec, user_privacy=USER)
    result = fv.run(task(), method, rounds=1, cohort=6, insecure_test_noise=5)
    noise = normal(private_root(5).child("server", 1, "noise"), 16).float() * (1.5 * 0.1)
    mean = Sketched((codes(codec, 0.1).sum(0) + noise) / 6, **codec.shared(fv.Seed.root(0).child("round", 1)))
    torch.testing.assert_close(result.weights, w + codec.decode(task(), w[None], [mean])[0], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("secure", [None, fv.SecureSum(bits=40)])
@pytest.mark.parametrize("where", ["sum", "client"])
def test_sketches_are_clipped_wherever_noise_is_added(where, secure):
    """With hardly any noise the step is the decoded mean of clipped sketches, not of sketches of clipped updates."""
    codec, w = Sketch(16), task().initial
    quiet = dataclasses.replace(USER, noise=1e-6, where=where)
    result = ran(fv.FedAvg(LOCAL, up=codec, user_privacy=quiet, secure=secure), 1)
    mean = Sketched(codes(codec, 0.1).mean(0), **codec.shared(fv.Seed.root(0).child("round", 1)))
    torch.testing.assert_close(result.weights, w + codec.decode(task(), w[None], [mean])[0], atol=1e-5, rtol=1e-3)


def test_a_noised_secure_sum_is_charged_for_k_numbers_and_no_more():
    how, plain = fv.SecureSum(bits=20), fv.FedAvg(user_privacy=USER, secure=fv.SecureSum(bits=20))
    method = fv.FedAvg(up=Sketch(16), user_privacy=USER, secure=how)
    assert method.client_cost(task()).answer == USER.step(20, 16)
    assert fv.Scaffold(up=Sketch(16), user_privacy=USER, secure=how).client_cost(task()).answer == USER.step(20, 32)
    assert plain.client_cost(task()).answer == USER.step(20, 163)
    full = dataclasses.replace(method, full_rounds=1)  # whose last rounds sum all weights
    assert full.client_cost(task()).answer == USER.step(20, 163)


def test_update_and_control_variate_are_clipped_together():
    method = fv.Scaffold(LOCAL, up=Sketch(16), user_privacy=dataclasses.replace(USER, noise=1e-6), secure=SECURE)
    stack = stack_of(task(), 0, 1)
    state = method.init_state(task())
    question = method.parts.down.question(weights=state.weights, **method.broadcast(state))
    answers = method.parts.up._answer(lambda s, q: method.given(method.parts, s, q), stack, question)
    for answer in answers:
        both = torch.cat([answer.update_numbers, answer.control_numbers])
        assert float(both.norm()) == pytest.approx(0.1 * WITHIN, rel=1e-5)


def test_feedback_does_not_take_the_noise_back():
    """What is remembered is what the sketch lost of the update, the same whatever the noise."""
    kept = []
    for noise in (1e-6, 10.0):
        how = dataclasses.replace(USER, noise=noise, where="client")
        method = fv.FedAvg(LOCAL, up=Sketch(16), feedback=True, user_privacy=how)
        stack = stack_of(task(), 0)
        method.handlers[method.parts.down.question](stack, method.parts.down.question(task().initial))
        kept.append(stack.kept["feedback"][0].lost[0])
    assert torch.equal(*kept)
    assert float(kept[0].norm()) > 0


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("wrong", "sentence"), [({"numbers": 0}, "sketch.numbers is 0"), ({"law": "sobel"}, "sketch.law is 'sobel'")]
)
def test_wrong_settings_are_refused(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        Sketch(**wrong)


def test_more_numbers_than_weights_are_refused():
    with pytest.raises(ValueError, match=r"sketch\.numbers is 164, but the model has 163 weights"):
        ran(fv.FedAvg(up=Sketch(164)))


@pytest.mark.parametrize("payload", [fv.Half.payload, fv.Qsgd.payload])
def test_a_linear_codec_needs_a_payload_of_one_tensor_that_adds_up(payload, monkeypatch):
    monkeypatch.setattr(Sketch, "payload", payload)
    with pytest.raises(ValueError, match="a linear codec's payload states additive = True and has one tensor"):
        fv.FedAvg(up=Sketch(16))


def test_the_words_behind_a_map_serve_once():
    """Signs are words 0, 1, …; places are the words that end before word 0, as `order` draws them."""
    key = torch.tensor([KEYS[0]])
    low, high = words(key, torch.arange(-50, -1)), words(key, torch.arange(0, 50))
    assert not set(low.tolist()) & set(high.tolist())
