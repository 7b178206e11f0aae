"""Plain compression: bounds on what each codec loses, what it refuses, and what error feedback gives back."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedveil as fv
from codec_tools import body, digits, stack_of, through_the_wire
from fedveil.codecs.qsgd import Quantised
from fedveil.codecs.topk import Sparse
from fedveil.core.message import Refused, Slots
from fedveil.engines import LocalEngine
from fedveil.links.down import Train
from toys import linear_task

BITS = (2, 4, 8)
ROOT = fv.Seed.root(3)


def sized(d: int) -> SimpleNamespace:
    """As much of a task as plain compression looks at."""
    return SimpleNamespace(layout=SimpleNamespace(size=d), sizes={"weights": d, "records": 1})


def sent(codec: fv.Codec, updates: torch.Tensor, seed: fv.Seed = ROOT) -> torch.Tensor:
    """What arrives of updates [C, d], each with a stream of its own."""
    task, w = sized(updates.shape[1]), torch.zeros_like(updates)
    payloads = codec.encode(task, w, updates, [seed.child(k) for k in range(len(updates))], None)
    return codec.decode(task, w, [through_the_wire(codec, task, p) for p in payloads])


def vectors(seed: int, d: int, count: int = 1) -> torch.Tensor:
    """Updates with entries of very different sizes."""
    draw = fv.Seed.root(seed).torch()
    return torch.randn(count, d, generator=draw) * torch.randn(count, d, generator=draw).exp()


# ---------------------------------------------------------------------------------------------------- QSGD


@pytest.mark.parametrize("bits", BITS)
def test_qsgd_is_unbiased(bits):
    update = vectors(0, 20)
    draws = sent(fv.Qsgd(bits=bits, bucket=8), update.expand(4000, -1))
    error = draws.std(0) / 4000**0.5
    assert ((draws.mean(0) - update[0]).abs() <= 4 * error + 1e-6).all()
    assert (error > 0).sum() >= 15, "rounding is stochastic wherever an entry lies between two levels"


@given(st.sampled_from(BITS), st.integers(1, 70), st.integers(8, 40), st.integers(0, 2**30))
def test_qsgd_packs_any_number_of_codes_and_unpacks_the_same(bits, d, bucket, seed):
    codec = fv.Qsgd(bits=bits, bucket=bucket)
    codes = torch.randint(2 * codec.levels + 1, (d,), generator=fv.Seed.root(seed).torch()).to(torch.uint8)
    packed = codec._pack(codes)
    assert len(packed) == -(-d * bits // 8)
    assert torch.equal(codec._unpack(packed[None])[0, :d], codes)


@given(st.sampled_from(BITS), st.integers(1, 70), st.integers(8, 40), st.integers(0, 2**30))
def test_qsgd_errs_by_at_most_one_level_of_the_entrys_bucket(bits, d, bucket, seed):
    codec, update = fv.Qsgd(bits=bits, bucket=bucket), vectors(seed, d)
    for got, wanted in zip(sent(codec, update)[0].split(bucket), update[0].split(bucket), strict=True):
        level = wanted.abs().max() / codec.levels
        assert (got - wanted).abs().max() <= level * (1 + 1e-5)


def test_qsgd_sends_an_update_of_zeros_as_zeros():
    assert torch.equal(sent(fv.Qsgd(), torch.zeros(1, 30)), torch.zeros(1, 30))


@pytest.mark.parametrize("bits", BITS)
def test_qsgd_sends_its_bits_a_weight_and_a_scale_a_bucket(bits):
    codec, task = fv.Qsgd(bits=bits, bucket=512), sized(20010)
    (payload,) = codec.encode(task, torch.zeros(1, 20010), vectors(1, 20010), [ROOT], None)
    assert body(payload) == -(-20010 * bits // 8) + 4 * 40


def test_qsgd_refuses_a_code_above_its_highest_level():
    with pytest.raises(Refused, match="out of range: a code is above 14"):
        fv.Qsgd(bits=4).check(sized(4), Quantised(torch.tensor([0x1F, 0], dtype=torch.uint8), torch.ones(1)))


# ---------------------------------------------------------------------------------------------------- top-k


@given(st.integers(1, 60), st.floats(0.01, 1), st.integers(0, 2**30))
def test_top_k_keeps_exactly_the_largest_entries(d, share, seed):
    codec, update = fv.TopK(share=share), vectors(seed, d)[0]
    k = max(1, round(share * d))
    got = sent(codec, update[None])[0]
    largest = update.abs().argsort(descending=True)
    assert torch.equal(got[largest[:k]], update[largest[:k]])
    assert not got[largest[k:]].any()


def test_top_k_sends_eight_bytes_for_each_entry_it_keeps():
    codec = fv.TopK(share=0.01)
    (payload,) = codec.encode(sized(20010), torch.zeros(1, 20010), vectors(1, 20010), [ROOT], None)
    assert body(payload) == 8 * 200


@pytest.mark.parametrize(
    "places",
    [[0, 5, 4], [7, 3, 1], [0, 4, 4], [3, 3, 3], [0, 4, 8], [0, 4, 2**31 - 1], [9, 1, 2]],
    ids=str,
)
def test_top_k_refuses_places_that_descend_repeat_or_lie_outside(places):
    payload = Sparse(torch.ones(3), torch.tensor(places, dtype=torch.int32))
    with pytest.raises(Refused, match="out of range: places are not ascending numbers below 8"):
        fv.TopK().check(sized(8), payload)


def test_top_k_takes_the_first_and_the_last_place():
    fv.TopK().check(sized(8), Sparse(torch.ones(3), torch.tensor([0, 3, 7], dtype=torch.int32)))


# ---------------------------------------------------------------------------------------------------- half


@pytest.mark.parametrize(("dtype", "bits", "least"), [("float16", 11, 2.0**-25), ("bfloat16", 8, 0.0)])
def test_half_floats_err_by_half_a_unit_in_the_last_place(dtype, bits, least):
    update = vectors(4, 20010)
    error = (sent(fv.Half(dtype=dtype), update) - update).abs()
    assert (error <= 2.0**-bits * update.abs() + least).all()
    assert error.max() > 0


def test_half_floats_are_half_the_bytes():
    (payload,) = fv.Half().encode(sized(20010), torch.zeros(1, 20010), vectors(1, 20010), [ROOT], None)
    assert body(payload) == 20010 * 2


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fv.Half(dtype="float8"), "half.dtype is 'float8'; use float16 or bfloat16"),
        (lambda: fv.Qsgd(bits=3), "qsgd packs 2, 4 or 8 bits"),
        (lambda: fv.Qsgd(bucket=4), "buckets of at least 8"),
        (lambda: fv.TopK(share=0.0), "above 0 and at most 1"),
        (lambda: fv.TopK(share=1.5), "above 0 and at most 1"),
    ],
)
def test_a_setting_that_makes_no_sense_is_one_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


# ---------------------------------------------------------------------------------------------------- error feedback


def residuals(feedback: bool, rounds: int) -> list[float]:
    """How far the sum of what was sent is from the sum of the true updates, round by round, over one update's norm."""
    task, up = linear_task(1, 24), fv.TopK(share=0.25)
    method = fv.FedAvg(local=fv.LocalTraining(lr=0.5), up=up, feedback=feedback)
    w, memory, behind, found = task.initial, Slots(), torch.zeros(8), []
    for round_ in range(1, rounds + 1):
        stack = stack_of(task, 0, round_=round_, memory=[memory])
        true = method.released(stack_of(task, 0, round_=round_), Train(w), w)["update"][0]
        payload = method.handlers[Train](stack, Train(w))
        memory = Slots(stack.kept_by(0))
        assert set(memory) == ({"feedback"} if feedback else set())
        behind = behind + true - up.decode(task, w[None], payload)[0]
        found.append(float(behind.norm() / true.norm()))
    return found


def test_with_error_feedback_the_sum_of_what_was_sent_tracks_the_sum_of_the_updates():
    """Stich et al. 2018: the residual of top-k stays below d/k updates, however many rounds there are."""
    assert max(residuals(True, 60)) < 8 / 2
    without = residuals(False, 60)
    assert without[59] > 2 * without[29] > 4 * without[9]
    assert without[59] > 20


def test_without_a_loss_there_is_nothing_to_remember():
    task = linear_task(1, 24)
    stack = stack_of(task, 0)
    fv.FedAvg(up=fv.TopK(share=1.0), feedback=True).handlers[Train](stack, Train(task.initial))
    assert not stack.kept["feedback"][0].lost[0].any()


def test_scaffold_feeds_back_what_is_lost_of_both_vectors():
    """A client's memory has a slot for its control variate and one for what the codec lost, of update and control."""
    task, up = linear_task(4, 24), fv.TopK(share=0.25)
    method = fv.Scaffold(fv.LocalTraining(lr=0.5), up=up, feedback=True)
    run = fv.Federation(task, method, LocalEngine(), fv.CohortSampler(size=4), fv.Seed.root(0))
    state, memories = method.init_state(task), []
    for number in (1, 2):
        asked = method.parts.down.question(weights=state.weights, **method.broadcast(state))
        before = [run.clients.memory.before(k, number, 0) for k in range(4)]
        state, row = run.step(state, number, 2)
        assert not row.missing
        assert {"cosine", "cosine_control"} <= set(row.metrics)
        memories.append([run.clients.memory.before(k, number + 1, 0) for k in range(4)])
        assert all(set(memory) == {"scaffold", "feedback"} for memory in memories[-1])
        stack = stack_of(task, 0, 1, 2, 3, round_=number, memory=before)
        x = method.released(stack, asked, asked.weights)
        for place, name in enumerate(("update", "control")):
            for k, memory in enumerate(memories[-1]):
                added = before[k]["feedback"].lost[place] if before[k] else torch.zeros(8)
                lost = memory["feedback"].lost[place]
                sent = x[name][k] + added - lost
                assert int((sent.abs() > 1e-6).sum()) <= 2, "of 8 numbers a quarter is sent"
                assert lost.abs().max() > 0
        for k, memory in enumerate(memories[-1]):
            torch.testing.assert_close(memory["scaffold"].control, stack.kept["scaffold"][k].control)
    first, second = (memory[0]["feedback"].lost[0] for memory in memories)
    assert not torch.equal(first, second)


def test_error_feedback_improves_top_k_on_the_digits():
    def run(feedback):
        method = fv.FedAvg(
            local=fv.LocalTraining(lr=0.3, epochs=5, batch=20), up=fv.TopK(share=0.003), feedback=feedback
        )
        return fv.run(digits(), method, rounds=10, cohort=5, evaluate_every=10).summary()

    plain, better = run(False), run(True)
    assert better["accuracy"] > plain["accuracy"] + 0.02
    assert better["loss"] < 0.6 * plain["loss"]
    assert better["bytes_up"] == plain["bytes_up"]
