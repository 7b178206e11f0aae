"""The way down: everyone holds the same weights, whoever was away, lost its memory or was interrupted."""

from dataclasses import dataclass, field

import pytest
import torch
from msgspec.structs import replace

import fedveil as fv
from codec_tools import image_task, stack_of
from fedveil import models
from fedveil.codecs.raw import Update
from fedveil.codecs.topk import Sparse
from fedveil.core import message
from fedveil.core.clients import Clients, Letter, Reply
from fedveil.core.message import Envelope, Slots
from fedveil.data import from_tensors
from fedveil.engines import LocalEngine
from fedveil.links.down import Train, TrainFrom, TrainFull, TrainHere
from fedveil.links.steps import CatchUp, ClientWeights
from fedveil.train.transforms import Residuals
from toys import kept

LOCAL = fv.LocalTraining(lr=0.3, batch=5)
TASK = image_task(hidden=40)  # 803 weights
STEPS = {
    "top-k": fv.TopK(share=0.02),
    "qsgd": fv.Qsgd(bits=2, bucket=512),
    "tofu": fv.TofuCodec(points=2, steps=10),
}


@dataclass(frozen=True)
class Scheduled(fv.CohortSampler):
    """Who is asked, round by round."""

    cohorts: list[tuple[int, ...]] = field(default_factory=list)

    def draw(self, task, seed):
        return self.cohorts.pop(0)


class Noting(LocalEngine):
    """Keeps the letters it carries and the replies it brings back, and loses those that `lose(letter)` says."""

    def __init__(self, lose=lambda letter: False) -> None:
        super().__init__(stack=1, workers=1, wire="bytes")
        self.letters: list[Letter] = []
        self.replies: list[Reply] = []
        self.lose = lose

    def deliver(self, letters, deadline):
        replies = list(super().deliver(letters, deadline))
        self.letters += letters
        self.replies += replies
        lost = {letter.client for letter in letters if self.lose(letter)}
        return [r for r in replies if r.client not in lost]

    def asked(self, kind) -> list[message.Question]:
        return [message.unpack(letter.payload, kind) for letter in self.letters if letter.kind == kind.kind]


class Run:
    """A run that goes round by round, with everything in view."""

    def __init__(self, method: fv.FedAvg, cohorts, task: fv.Task = TASK, engine=None, rounds: int = 100) -> None:
        self.engine, self.rounds, self.number = engine or Noting(), rounds, 0
        plan = Scheduled(cohorts=list(cohorts))
        self.federation = fv.Federation(task, method, self.engine, plan, fv.Seed.root(0), 100)
        self.state = method.init_state(task)
        self.rows: list[fv.Row] = []

    def go(self, rounds: int = 1) -> fv.Row:
        for _ in range(rounds):
            self.number += 1
            self.before = self.state
            self.state, row = self.federation.step(self.state, self.number, self.rounds)
            self.rows.append(row)
        return row

    def held(self, client: int):
        """The weights that a client holds now."""
        return self.slots(client)["down"]

    def slots(self, client: int) -> Slots:
        """What a client remembers now."""
        return self.federation.clients.memory.before(client, self.number + 1, 0)

    @staticmethod
    def history(state: fv.State) -> list[bytes]:
        """The steps that the server keeps."""
        return state.slots["down"].history


def frame_bytes(record: message.Record) -> int:
    return len(message.frame(record, Envelope()))


AWAY = [(0, 1), (0, 2), (0, 2), (0, 2), (0, 1, 2)]  # client 1 misses three rounds


# ---------------------------------------------------------------------------------------------------- reference last


@pytest.mark.parametrize("codec", STEPS.values(), ids=STEPS)
def test_a_client_that_missed_three_rounds_is_caught_up_bit_for_bit(codec):
    run = Run(fv.FedAvg(local=LOCAL, down=codec), AWAY)
    row = run.go(5)
    for client in (0, 1, 2):
        assert torch.equal(run.held(client).weights, run.before.weights)
        assert run.held(client).version == 4
    assert not torch.equal(run.before.weights, TASK.initial)
    assert row.metrics["caught_up"] == 1
    assert all(r.metrics["resynced"] == 0 for r in run.rows)


@pytest.mark.parametrize("codec", STEPS.values(), ids=STEPS)
def test_a_client_that_was_away_gets_the_bytes_of_the_messages_it_missed(codec):
    run = Run(fv.FedAvg(local=LOCAL, down=codec), AWAY)
    row = run.go(5)
    history, here = run.history(run.before), frame_bytes(TrainHere(4))
    assert len(history) == 4
    assert row.down["0"] == frame_bytes(CatchUp(4, history[3:])) + here
    assert row.down["1"] == frame_bytes(CatchUp(4, history)) + here
    assert row.down["1"] < 4 * TASK.layout.size


def test_full_weights_are_sent_where_they_are_fewer_bytes_than_the_missed_messages():
    run = Run(fv.FedAvg(local=LOCAL, down=fv.Half()), AWAY)
    row = run.go(5)
    here = frame_bytes(TrainHere(4))
    assert row.down["0"] == frame_bytes(CatchUp(4, run.history(run.before)[3:])) + here
    assert row.down["1"] == frame_bytes(CatchUp(4, weights=run.before.weights)) + here
    assert run.history(run.before)[:3] == [b""] * 3, "what will never be sent is not kept"
    assert row.down["1"] < frame_bytes(CatchUp(4, run.history(run.before)[3:] * 2)) + here
    assert torch.equal(run.held(1).weights, run.before.weights)


def test_the_server_itself_takes_the_step_that_clients_decode():
    """A step that loses 98 of 100 weights moves the server by what is left of it, and only by that."""
    run = Run(fv.FedAvg(local=LOCAL, down=STEPS["top-k"]), [(0, 1)])
    run.go()
    assert (run.state.weights != TASK.initial).sum() == 16


def damaged(run: Run, change) -> None:
    """Change what client 1 remembers."""
    entries = run.federation.clients.memory.entries
    entries[1] = [(r, s, part, change(record)) for r, s, part, record in entries[1]]


def flipped(weights: torch.Tensor) -> torch.Tensor:
    """One bit of one weight is another."""
    bits = weights.clone().view(torch.int32)
    bits[3] ^= 1
    return bits.view(torch.float32)


DAMAGES = {
    "other weights": lambda held: replace(held, weights=held.weights + 1e-6),
    "one bit flipped": lambda held: replace(held, weights=flipped(held.weights)),
    "a version too high": lambda held: replace(held, version=held.version + 1),
    "no memory": None,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_client_that_strayed_is_sent_full_weights_and_goes_on_as_if_nothing_had_been(damage):
    sound, hurt = (Run(fv.FedAvg(local=LOCAL, down=fv.TofuCodec(points=2, steps=10)), [(0, 1)] * 5) for _ in range(2))
    sound.go(5)
    hurt.go(3)
    if damage:
        damaged(hurt, damage)
    else:
        del hurt.federation.clients.memory.entries[1]
    row = hurt.go()
    assert row.metrics["resynced"] == 1
    assert row.down["1"] - row.down["0"] == frame_bytes(CatchUp(3, weights=hurt.before.weights))
    assert not row.missing
    assert hurt.go().metrics["resynced"] == 0
    assert torch.equal(hurt.state.weights, sound.state.weights)
    assert torch.equal(hurt.held(1).weights, sound.held(1).weights)


def test_a_client_whose_answer_was_lost_applies_no_step_twice():
    def lose(letter):
        return letter.kind == CatchUp.kind and letter.client == 1 and letter.envelope.round == 3

    run = Run(fv.FedAvg(local=LOCAL, down=STEPS["top-k"]), [(0, 1)] * 4, engine=Noting(lose))
    run.go(2)
    assert run.go().missing == {"1": "late: no answer when the question closed"}
    assert int(run.state.slots["down"].versions[1]) == 1, "as far as the server knows"
    row = run.go()
    assert (row.metrics["resynced"], row.metrics["caught_up"]) == (0, 1)
    assert torch.equal(run.held(1).weights, run.before.weights)


def test_a_client_that_is_gone_when_it_should_be_resynced_does_not_stop_the_others():
    def lose(letter):
        return letter.kind == CatchUp.kind and message.unpack(letter.payload, CatchUp).weights is not None

    run = Run(fv.FedAvg(local=LOCAL, down=STEPS["top-k"]), [(0, 1)] * 3, engine=Noting(lose))
    run.go(2)
    damaged(run, DAMAGES["other weights"])
    row = run.go()
    assert row.missing == {"1": "late: no answer when the question closed"}
    assert not row.events
    assert not torch.equal(run.state.weights, run.before.weights)


def test_a_client_that_does_not_hold_the_weights_refuses_to_train():
    method = fv.FedAvg(local=LOCAL, down=STEPS["top-k"])
    with pytest.raises(fv.Refused, match="lost state: the weights of version 7 are not held; catch up first"):
        method.handlers[TrainHere](stack_of(TASK, 0), TrainHere(7))
    older, feedback = {"down": ClientWeights(6, TASK.initial)}, {"feedback": Residuals([TASK.initial])}
    for slots, version in ((older, 7), (feedback, 0), ({"down": ClientWeights()}, 0)):
        with pytest.raises(fv.Refused, match=f"lost state: the weights of version {version} are not held"):
            method.handlers[TrainHere](stack_of(TASK, 0, memory=[Slots(slots)]), TrainHere(version))


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_the_moments_of_the_servers_optimiser_stay_with_the_server(optimizer):
    run = Run(fv.FedAvg(local=LOCAL, down=fv.Half(), server=fv.ServerOptimizer(optimizer, 0.5)), AWAY)
    row = run.go(5)
    assert row.down["1"] == frame_bytes(CatchUp(4, weights=run.before.weights)) + frame_bytes(TrainHere(4))
    assert all(r.metrics["resynced"] == 0 for r in run.rows)
    assert not any(r.missing for r in run.rows)
    assert run.held(1).first is None
    assert run.before.slots["server"].first is not None
    assert torch.equal(run.held(1).weights, run.before.weights)


def test_a_step_within_a_question_is_checked_like_any_bytes_from_outside():
    method = fv.FedAvg(local=LOCAL, down=STEPS["top-k"])
    good = Run(method, [(0, 1)])
    good.go()
    (step,) = good.history(good.state)
    strange = message.frame(Update(torch.ones(803)), Envelope())
    places = torch.arange(16, dtype=torch.int32)
    shorter, nan, twice = (
        message.frame(Sparse(*fields), Envelope())
        for fields in (
            (torch.ones(15), places[:15]),
            (torch.full((16,), torch.nan), places),
            (torch.ones(16), places.clamp(max=14)),
        )
    )
    for frame, reason in (
        (step[:-9], "truncated"),
        (strange, "too large"),
        (b"?", "truncated"),
        (shorter, "wrong shape"),
        (nan, "not finite"),
        (twice, "out of range: places are not ascending"),
    ):
        stack = stack_of(TASK, 0)
        with pytest.raises(fv.Refused, match=f"^{reason}"):
            method.handlers[CatchUp](stack, CatchUp(1, [frame]))
        assert not stack.kept
    clients = Clients(fv.FedAvg(), TASK, bytes(8), fv.Seed.root(0))  # this run sends full weights down
    with pytest.raises(fv.Refused, match="wrong kind: fedavg has no question of kind"):
        clients.answer([Letter(CatchUp.kind, Envelope(client=0, round=1), message.pack(CatchUp(1, [step])))])


def test_threads_of_the_server_do_not_put_clients_out_of_step():
    """Clients work on one thread each and the server on all: matrix products on more threads round differently."""
    draw = fv.Seed.root(0).torch()
    x, y = torch.randn(20, 1, 28, 28, generator=draw), torch.arange(20) % 10
    data = from_tensors(x, y, x, y, classes=10)
    task = fv.Task(models.build("lenet5", (1, 28, 28), 10), data, fv.split("iid", data, 2, fv.Seed.root(0)))
    method = fv.FedAvg(local=fv.LocalTraining(lr=0.05), down=fv.TofuCodec(points=64, steps=1))
    torch.set_num_threads(2)
    try:
        result = fv.run(task, method, rounds=3, cohort=2, evaluate_every=3)
    finally:
        torch.set_num_threads(1)
    assert [row.metrics["resynced"] for row in result.ledger.rows] == [0, 0, 0]


def test_error_feedback_and_the_way_down_share_a_clients_memory():
    run = Run(fv.FedAvg(local=LOCAL, up=fv.TopK(share=0.02), down=STEPS["qsgd"], feedback=True), [(0, 1)] * 3)
    run.go(3)
    for client in (0, 1):
        held = run.held(client)
        assert torch.equal(held.weights, run.before.weights)
        assert run.slots(client)["feedback"].lost[0].abs().max() > 0


def test_a_run_resumed_in_the_middle_ends_with_identical_weights_history_and_versions(tmp_path):
    method = fv.FedAvg(
        local=LOCAL, up=fv.TopK(share=0.1), down=fv.TofuCodec(points=2, steps=10), feedback=True, full_rounds=1
    )

    def run(folder, **options):
        return fv.run(TASK, method, rounds=6, cohort=2, folder=tmp_path / folder, **options)

    whole, rounds = run("whole"), iter(range(6))
    run("halves", stop=lambda: next(rounds) == 2)
    assert kept(tmp_path / "halves")[0] == 3
    halves = run("halves")
    assert torch.equal(whole.weights, halves.weights)
    assert kept(tmp_path / "whole") == kept(tmp_path / "halves")
    assert all(row.metrics.get("resynced", 0) == 0 for row in halves.ledger.rows)


# ---------------------------------------------------------------------------------------------------- reference init

INIT = fv.FedSynthCodec(batches=2, batch=2, epochs=1, fits=10, restarts=2)


def test_with_reference_init_clients_train_from_the_decoded_weights_and_the_server_keeps_its_exact_ones():
    run = Run(fv.FedAvg(local=LOCAL, down=INIT), [(0, 1)] * 3)
    run.go(3)
    question = run.engine.asked(TrainFrom)[-1]
    payload, _ = message.unframe(question.frame, {INIT.payload.kind: INIT.payload}, 10**6)
    decoded = TASK.initial + INIT.decode(TASK, TASK.initial[None], [payload])[0]
    updates = [LOCAL.train(stack_of(TASK, k, round_=3), decoded)[0][0] - decoded for k in (0, 1)]
    counts = TASK.clients.sizes[:2]
    mean = (counts[0] * updates[0] + counts[1] * updates[1]) / sum(counts)
    torch.testing.assert_close(run.state.weights, run.before.weights + mean, atol=1e-6, rtol=0)
    assert (decoded - run.before.weights).abs().max() > 1e-3, "the codec loses something"


def test_with_reference_init_each_message_stands_alone():
    run = Run(fv.FedAvg(local=LOCAL, down=INIT), [(0,), (0,), (0, 1)])
    row = run.go(3)
    assert row.down["0"] == row.down["1"] < 4 * TASK.layout.size
    assert not run.state.slots
    assert not run.slots(1)
    assert 0 < row.metrics["cosine_down"] <= 1


# ---------------------------------------------------------------------------------------------------- full rounds


def test_the_last_rounds_send_full_updates_and_are_those_of_fedavg():
    method = fv.FedAvg(local=LOCAL, up=fv.Half(), down=STEPS["top-k"], full_rounds=2)
    run = Run(method, [(0, 1)] * 5, rounds=5)
    run.go(3)
    plain = Run(fv.FedAvg(local=LOCAL), [(0, 1)] * 2, rounds=5)
    plain.number, plain.state = 3, fv.State(run.state.weights)
    up, down = frame_bytes(Update(run.state.weights, 15)), frame_bytes(TrainFull(run.state.weights))
    assert all(row.up["0"] < 0.7 * up and row.down["0"] < 0.3 * down for row in run.rows)
    del run.engine.letters[:], run.engine.replies[:]
    for _ in range(2):
        row = run.go()
        plain.go()
        assert row.up == {"0": up, "1": up}
        assert row.down == {"0": down, "1": down}
        assert torch.equal(run.state.weights, plain.state.weights)
    assert {letter.kind for letter in run.engine.letters} == {TrainFull.kind}
    assert {message.envelope(reply.frame)[0] for reply in run.engine.replies} == {Update.kind}


def test_without_a_down_codec_full_weights_travel():
    run = Run(fv.FedAvg(local=LOCAL), [(0, 1)])
    assert run.go().down["0"] == frame_bytes(Train(TASK.initial))


# ---------------------------------------------------------------------------------------------------- both sides alike

UP = {
    "half": fv.Half(),
    "qsgd": fv.Qsgd(),
    "top-k": fv.TopK(share=0.05),
    "tofu": fv.TofuCodec(points=2, steps=5),
    "tofu, 8 bits": fv.TofuCodec(points=2, steps=5, precision="uint8"),
    "fedsynth": fv.FedSynthCodec(batches=2, batch=2, epochs=2, fits=5),
    "fedsynth, 16 bits": fv.FedSynthCodec(batches=2, batch=2, epochs=2, fits=5, precision="float16"),
}


def decoded_in(monkeypatch, method: fv.FedAvg) -> list[torch.Tensor]:
    """What `method.up` decodes in three rounds of one client: its own, the server's, its own, and so on."""
    decoded, real = [], type(method.up).decode

    def noted(self, *arguments):
        decoded.append(real(self, *arguments))
        return decoded[-1]

    monkeypatch.setattr(type(method.up), "decode", noted)
    fv.run(TASK, method, rounds=3, cohort=1, engine=LocalEngine(stack=1, workers=1))
    return decoded


@pytest.mark.parametrize("codec", UP.values(), ids=UP)
def test_client_and_server_decode_the_same_bits(monkeypatch, codec):
    decoded = decoded_in(monkeypatch, fv.FedAvg(local=LOCAL, up=codec))
    assert len(decoded) == 6
    for client, server in zip(decoded[::2], decoded[1::2], strict=True):
        assert torch.equal(client, server)
        assert client.any()


@pytest.mark.parametrize("down", [fv.Half(), INIT], ids=["last", "init"])
def test_client_and_server_decode_at_the_weights_that_came_down(monkeypatch, down):
    decoded = decoded_in(monkeypatch, fv.FedAvg(local=LOCAL, up=UP["tofu"], down=down))
    assert all(torch.equal(client, server) for client, server in zip(decoded[::2], decoded[1::2], strict=True))
