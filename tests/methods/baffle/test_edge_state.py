"""The client without PyTorch on a transformer's subset: replay, sums, privacy, and what must not happen twice."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import fedveil as fv
from fedveil.core import message, schema
from fedveil.core.clients import Letter, Reply
from fedveil.core.identity import simulated
from fedveil.core.message import Envelope
from fedveil.core.refused import Refused
from fedveil.core.seeds import Seed
from fedveil.deploy import keys
from fedveil.engines import LocalEngine
from fedveil.links.replay import Step
from fedveil.links.steps import CatchUp, WeightsDigest
from fedveil.methods.baffle import graph, private
from fedveil.methods.baffle.baffle import Probe, ProbeHere, Slopes
from fedveil.methods.baffle.edge import frames
from fedveil.methods.baffle.edge.client import NO_ANSWER, Edge
from fedveil.methods.baffle.edge.store import Store
from fedveil.methods.baffle.export import export
from fedveil.privacy.secagg.context import Context
from fedveil.privacy.secagg.records import Advertise, Advertised, Agree, Deal, Mask, Share, Unmask
from methods.baffle.probes import stack

CLIENTS, MINE = 6, (1, 3)
SEED = fv.Seed.root(0)
SUM = fv.SecureSum(clip=16.0, bits=40)
PRIVATE = fv.DpSgd(delta=1e-3, noise=2.0)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The example's language model, tiny: prompts of different lengths, norms and adapters trained."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(fv.__file__).parents[2] / "examples"))
        import smollm2

        folder = tmp_path_factory.mktemp("toy")
        smollm2.toy(folder)
        model, data = smollm2.model(folder, lora=2), smollm2.data(folder)
        for name in ("smollm2", "llama"):
            sys.modules.pop(name, None)
    split = fv.split("iid", data, CLIENTS, SEED, max_records=32)
    return fv.Task(model, data, split, trainable=["*norm.scale", "*adapter*"])


@pytest.fixture(scope="module")
def graphs(task, tmp_path_factory):
    """A graph of each precision, exported once."""
    made = {}

    def write(own, trained, folder, wide=False, quantise=False, write=graph.write):
        if wide not in made:
            kept = tmp_path_factory.mktemp("graph")
            made[wide] = write(own, trained, kept, wide, quantise), kept
        told, kept = made[wide]
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        return told

    return write


@pytest.fixture
def exported(task, graphs, tmp_path, monkeypatch):
    def make(method):
        monkeypatch.setattr(graph, "write", graphs)
        export(task, method, tmp_path / "edge", seed=SEED)
        return tmp_path / "edge"

    return make


def method(**more):
    return fv.Baffle(**{"directions": 8, "sigma": 1e-3, **more})


def edge(task, folder, state, client=1):
    own = task.clients[client]
    return Edge(folder, task.x[own].numpy(), task.y[own].numpy(), client, state, simulated(SEED))


class Mixed(LocalEngine):
    """Some clients are without PyTorch; each begins every round as a new process."""

    def __init__(self, task, folder, state, spoil=lambda round_, edge: None):
        super().__init__()
        self.own, self.spoil, self.here = (task, folder, state), spoil, {}

    def deliver(self, letters, deadline):
        yield from super().deliver([x for x in letters if x.client not in MINE], deadline)
        for letter in letters:
            if letter.client in MINE:
                try:
                    yield Reply(letter.client, self.asked(letter).answer(letter.frame))
                except Refused as error:
                    yield Reply(letter.client, problem=f"refused: {error}")

    def asked(self, letter):
        task, folder, state = self.own
        at, here = self.here.get(letter.client, (0, None))
        if at != letter.envelope.round:
            if here:
                here.close()
            here = edge(task, folder, state / str(letter.client), letter.client)
            self.here[letter.client] = letter.envelope.round, here
            self.spoil(letter.envelope.round, here)
        return here


def federated(task, chosen, folder, state, **more):
    return fv.run(task, chosen, rounds=4, cohort=CLIENTS, engine=Mixed(task, folder, state, **more))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"down": "replay"},
        {"secure": SUM, "weak": 3},
        {"secure": fv.SecureSum(clip=16.0, bits=40, server="malicious"), "down": "replay", "centered": True},
    ],
    ids=["weights", "replay", "sum", "malicious, replay"],
)
def test_a_federation_with_edge_clients_ends_where_one_without_ends(task, exported, tmp_path, settings):
    chosen = method(**settings)
    mixed = federated(task, chosen, exported(chosen), tmp_path / "state")
    plain = fv.run(task, chosen, rounds=4, cohort=CLIENTS)
    assert not any(row.missing for row in mixed.ledger.rows)
    assert not any(row.metrics.get("resynced") for row in mixed.ledger.rows)
    for one, other in zip(mixed.ledger.rows, plain.ledger.rows, strict=True):
        assert (one.up, one.down) == (other.up, other.down)
    moved = torch.linalg.vector_norm(plain.weights - task.initial)
    assert 1e-8 < float(torch.linalg.vector_norm(mixed.weights - plain.weights)) < 1e-3 * float(moved)


@pytest.mark.parametrize("settings", [{"mechanism": "gaussian"}, {"mechanism": "skellam"}], ids=str)
def test_private_edge_clients_take_part_in_everything(task, exported, tmp_path, settings):
    how = fv.DpSgd(delta=1e-3, noise=2.0, **settings)
    chosen = method(down="replay", secure=SUM, privacy=how, batch=8)
    result = federated(task, chosen, exported(chosen), tmp_path / "state")
    assert not any(row.missing for row in result.ledger.rows)
    assert not any(row.metrics["resynced"] for row in result.ledger.rows)
    assert json.loads((tmp_path / "state" / "1" / "account-1").read_bytes()[:-16]) == {"answers": 4}


# ---------------------------------------------------------------------------------------------------- replay


def at(round_, serial, client=1, run=b"run 1234"):
    return Envelope(run, round_, client, serial)


def caught_up(mine, task, serial=1, round_=1, **question):
    frame = mine.answer(message.frame(CatchUp(**{"version": 0, **question}), at(round_, serial)))
    return message.unframe(frame, {WeightsDigest.kind: WeightsDigest}, 1000)[0].digest


@pytest.mark.parametrize("law", ["gaussian", "rademacher", "orthogonal"])
@pytest.mark.parametrize(
    "server",
    [
        fv.ServerOptimizer("adam", 0.01, tau=1e-8, schedule="cosine", schedule_rounds=5, warmup=1),
        fv.ServerOptimizer("momentum", 0.1),
        fv.ServerOptimizer("plain", 0.3),
    ],
    ids=["adam", "momentum", "plain"],
)
def test_a_replayed_step_is_the_servers_bit_for_bit(task, exported, tmp_path, law, server):
    chosen = method(down="replay", law=law, server=server, clip=0.05)
    mine = edge(task, exported(chosen), tmp_path / "state")
    rows = torch.randn(5, 8, generator=SEED.torch()) * torch.tensor([1e-6, 1e-2, 1.0, 30.0, 1e5])[:, None]
    steps = [message.frame(Step(-(2**62) + k, row), Envelope()) for k, row in enumerate(rows)]
    whole = stack(task, (1,))
    (told,) = chosen.steps.follow(whole, CatchUp(3, steps[:3]))
    assert caught_up(mine, task, version=3, frames=steps[:3]) == told.digest
    mine.close()
    mine = edge(task, tmp_path / "edge", tmp_path / "state")  # a new process
    assert caught_up(mine, task, round_=2, version=3, frames=steps[:3]) == told.digest  # asked again: nothing moves
    later = stack(task, (1,), [message.Slots(whole.kept_by(0))])
    (told,) = chosen.steps.follow(later, CatchUp(5, steps[2:]))
    assert caught_up(mine, task, round_=3, version=5, frames=steps[2:]) == told.digest
    asked = message.frame(ProbeHere(5, 7, 8), at(3, 2))
    own = stack(task, (1,), [message.Slots(later.kept_by(0))])
    (expected,) = chosen.handlers[ProbeHere](own, ProbeHere(5, 7, 8))
    found, _ = message.unframe(mine.answer(asked), {Slopes.kind: Slopes}, 1000)
    assert float((found.slopes - expected.slopes).norm() / expected.slopes.norm()) < 1e-3
    with pytest.raises(Refused, match="lost state: the weights of version 4 are not held"):
        mine.answer(message.frame(ProbeHere(4, 7, 8), at(3, 3)))
    with pytest.raises(Refused, match="wrong round: round 2 is over"):
        mine.answer(message.frame(ProbeHere(5, 7, 8), at(2, 9)))


def test_a_client_that_strayed_is_sent_the_whole_state(task, exported, tmp_path):
    class Spoiled(Mixed):
        def asked(self, letter):
            here = super().asked(letter)
            if letter.envelope.round == 3 and letter.kind == CatchUp.kind and letter.client not in self.spoilt:
                self.spoilt.add(letter.client)
                replayed = here._replayed
                replayed._open(letter.envelope.run)
                replayed._held[0][0] += 1e-3
            return here

    engine = Spoiled(task, exported(method(down="replay")), tmp_path / "state")
    engine.spoilt = set()
    result = fv.run(task, method(down="replay"), rounds=4, cohort=CLIENTS, engine=engine)
    assert [row.metrics["resynced"] for row in result.ledger.rows] == [0, 0, len(MINE), 0]
    assert not any(row.missing for row in result.ledger.rows)


def test_hostile_steps_and_damaged_files_are_refused(task, exported, tmp_path):
    mine = edge(task, exported(method(down="replay")), tmp_path / "state")
    for question, told in (
        ({"version": 1, "frames": [b"no frame"]}, "truncated"),
        ({"version": 1, "frames": [message.frame(Advertise(), Envelope())]}, "wrong kind: a Advertise where a step"),
        ({"version": 1, "frames": [message.frame(Step(1, torch.ones(9)), Envelope())]}, "too large: a step of 9"),
        ({"version": 1, "weights": task.initial}, "wrong field: the state has not the moments"),
        ({"version": 1, "weights": torch.ones(3)}, "wrong shape"),
    ):
        with pytest.raises(Refused, match=told):
            caught_up(mine, task, **question)
    caught_up(mine, task)
    mine.close()
    (path,) = (tmp_path / "state").glob("weights-*")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(Refused, match="lost state: a file of the client's state is damaged"):
        caught_up(edge(task, tmp_path / "edge", tmp_path / "state"), task, serial=2)


# ---------------------------------------------------------------------------------------------------- privacy


def test_a_private_question_is_answered_once_whatever_happens(task, exported, tmp_path, monkeypatch):
    folder = exported(method(privacy=PRIVATE, batch=8))
    question = message.frame(Probe(task.initial, 5, 8), at(2, 4))

    def fails(*args):
        held = Store.notes(mine._store, b"run 1234")
        assert tuple(held.private) == (2, 4)  # on the disk before anything looks at records
        raise FloatingPointError("record 7 is to blame")

    mine = edge(task, folder, tmp_path / "state")
    with monkeypatch.context() as patch:
        patch.setattr(mine._model, "losses", fails)
        with pytest.raises(Refused, match=f"failed: {NO_ANSWER}"):
            mine.answer(question)
    for _ in range(2):
        with pytest.raises(Refused, match="wrong stage: a private question of round 2 is answered once"):
            mine.answer(question)
        mine.close()
        mine = edge(task, folder, tmp_path / "state")  # a new process
    with pytest.raises(Refused, match="wrong stage"):
        mine.answer(message.frame(Probe(task.initial + 1, 6, 8), at(2, 3)))
    answers = [mine.answer(message.frame(Probe(task.initial, 5, 8), at(2, serial))) for serial in (5, 6)]
    assert answers[0][-32:] != answers[1][-32:]  # other noise
    found, _ = message.unframe(answers[0], {Slopes.kind: Slopes}, 1000)
    assert found.records == 1


def test_a_budget_is_kept_over_runs_and_restarts(task, exported, tmp_path):
    how = fv.DpSgd(delta=1e-3, noise=4.0, budget=1.0)
    chosen = method(privacy=how, batch=8)
    folder = exported(chosen)
    most = json.loads((folder / "settings.json").read_text())["privacy"]["answers"]
    account = chosen.client_cost(task)
    assert account.spent(most) <= 1.0 < account.spent(most + 1)
    told = json.loads((folder / "settings.json").read_text())
    told["privacy"]["answers"] = 2
    (folder / "settings.json").write_text(json.dumps(told))
    for run in (b"run 1234", b"run 5678"):
        mine = edge(task, folder, tmp_path / "state")
        mine.answer(message.frame(Probe(task.initial, 5, 8), at(1, 1, run=run)))
        mine.close()
    with pytest.raises(Refused, match="over budget: 2 private answers are given"):
        edge(task, folder, tmp_path / "state").answer(message.frame(Probe(task.initial, 5, 8), at(2, 1)))


@pytest.mark.parametrize("mechanism", ["gaussian", "skellam"])
def test_private_slopes_are_clipped_and_noised_as_with_pytorch(task, exported, tmp_path, mechanism):
    how = fv.DpSgd(clip=0.05, delta=1e-3, noise=2.0, mechanism=mechanism)
    chosen = method(privacy=how, batch=8)
    mine = edge(task, exported(chosen), tmp_path / "state")
    drawn = np.zeros(len(mine.probing.x), bool)
    drawn[[0, 3, 4, 9]] = True
    total = mine._private.clipped_sum(task.initial.numpy(), 5, 8, drawn)
    own = torch.from_numpy(np.asarray(task.clients[1])[drawn])[None]
    x, y, ones = task.x[own], task.y[own], torch.ones(own.shape)
    expected = private.slopes(how, chosen.prober(task), task.initial, torch.tensor([5]), x, y, ones, 8)
    assert float((torch.from_numpy(total) - expected[0]).norm() / expected.norm()) < 1e-5
    assert float(expected.norm()) < 4 * 0.05 * (1 if mechanism == "gaussian" else 2**30 / 0.05)
    seed = Seed.root(7)
    (noised,) = private.noised(how, torch.from_numpy(total)[None], [seed], 8)
    assert np.array_equal(noised.numpy(), mine._private.noised(total, seed.child("noise").key))
    assert np.array_equal(mine._private.clipped_sum(task.initial.numpy(), 5, 8, ~drawn & drawn), np.zeros(8))


def test_a_record_that_is_not_finite_is_not_in_the_sum(task, exported, tmp_path, monkeypatch):
    mine = edge(task, exported(method(privacy=PRIVATE, batch=8)), tmp_path / "state")
    each = np.array([[1.0, np.inf, np.nan], [2.0, 1.0, 1.0]])
    monkeypatch.setattr(mine.probing, "each", lambda *args: iter(each))
    total = mine._private.clipped_sum(task.initial.numpy(), 5, 2, np.array([True] * 3 + [False] * 13))
    assert np.allclose(total, np.array([1.0, 2.0]) / 5**0.5, rtol=1e-4)


def test_a_model_that_is_not_all_float64_is_refused_with_privacy(tmp_path):
    data = fv.load("digits")
    task = fv.Task(
        fv.models.build("digits-cnn", data.input, 10), data, fv.split("iid", data, 10, SEED, max_records=150)
    )
    with pytest.raises(ValueError, match="ONNX Runtime does not run this model in float64"):
        export(task, fv.Baffle(privacy=fv.DpSgd(delta=1e-4)), tmp_path / "e")


# ---------------------------------------------------------------------------------------------------- secure sum


class Restarting(Mixed):
    """Client 1 becomes a new process before a stage of round 1."""

    def __init__(self, *args, before):
        super().__init__(*args)
        self.before = before

    def asked(self, letter):
        if letter.client == 1 and letter.kind == self.before.kind and 1 in self.here:
            self.here.pop(1)[1].close()
        return super().asked(letter)


@pytest.mark.parametrize("before", [Share, Deal, Mask, Unmask])
def test_a_client_that_restarts_within_a_round_finds_its_secrets_lost(task, exported, tmp_path, before):
    chosen = method(secure=SUM)
    result = fv.run(
        task,
        chosen,
        rounds=1,
        cohort=CLIENTS,
        engine=Restarting(task, exported(chosen), tmp_path / "state", before=before),
    )
    (row,) = result.ledger.rows
    if before is Unmask:  # its vector is in the sum, which the others unmask
        assert not row.missing
    else:
        assert set(row.missing) == {"1"}
        assert "lost state: the secrets of this round are gone" in row.missing["1"]
    assert not torch.equal(result.weights, task.initial)


def later(envelope):
    """The same place with a serial that comes later."""
    return dataclasses.replace(envelope, serial=envelope.serial + 100)


class Heard(Mixed):
    """Keeps what client 1 was asked."""

    questions = ()

    def asked(self, letter):
        if letter.client == 1:
            self.questions = [*self.questions, letter]
        return super().asked(letter)


def test_a_sum_is_unmasked_once_and_one_question_is_masked(task, exported, tmp_path):
    chosen = method(secure=SUM)
    engine = Heard(task, exported(chosen), tmp_path / "state")
    fv.run(task, chosen, rounds=1, cohort=CLIENTS, engine=engine)
    first = {letter.kind: letter for letter in engine.questions}
    here = engine.here[1][1]
    with pytest.raises(Refused, match="lost state"):
        here.answer(first[Unmask.kind].frame)
    for _ in range(2):
        with pytest.raises(Refused, match="wrong stage: client 1 takes part in one sum a round, and unmasks it once"):
            here.answer(first[Advertise.kind].frame)
        here.close()
        here = edge(task, tmp_path / "edge", tmp_path / "state" / "1")  # a new process


@pytest.mark.parametrize("more", [{}, {"privacy": PRIVATE, "batch": 8}], ids=["sum", "private sum"])
def test_another_question_is_not_masked_in_the_same_round(task, exported, tmp_path, more):
    """The server asks a sum of one question up to the masked stage, and then another; both serials are new."""
    chosen = method(secure=SUM, **more)
    folder = exported(chosen)

    class Twice(Mixed):
        refused = ""

        def deliver(self, letters, deadline):
            for letter in letters:
                if letter.client == 1 and letter.kind == Mask.kind:
                    self.ask_twice(self.asked(letter), letter)
            yield from super().deliver(letters, deadline)

        def ask_twice(self, here, letter):
            before = here._summed._secrets
            here.answer(letter.frame)
            here._summed._secrets = before
            inner, probe = message.unpack(letter.payload, Mask), message.pack(Probe(task.initial + 1, 5, 8))
            other = torch.frombuffer(bytearray(probe), dtype=torch.uint8)
            with pytest.raises(Refused) as refused:
                here.answer(message.frame(replace(inner, question=other), later(letter.envelope)))
            self.refused = str(refused.value)

    engine = Twice(task, folder, tmp_path / "state")
    result = fv.run(task, chosen, rounds=1, cohort=CLIENTS, engine=engine)
    assert engine.refused == "wrong stage: client 1 has masked the answer to another question in round 1"
    if more:  # the same question again is private, and was answered
        assert "a private question of round 1 is answered once" in result.ledger.rows[0].missing["1"]
    else:  # the same question again is masked again
        assert not result.ledger.rows[0].missing


def test_a_summed_question_is_not_answered_in_the_clear(task, exported, tmp_path):
    mine = edge(task, exported(method(secure=SUM)), tmp_path / "state")
    with pytest.raises(Refused, match="wrong kind: this client does not answer a Probe"):
        mine.answer(message.frame(Probe(task.initial, 5, 8), at(1, 1)))
    with pytest.raises(Refused, match="wrong kind: this client does not answer a CatchUp"):
        mine.answer(message.frame(CatchUp(0), at(1, 1)))


def test_where_records_fail_zeros_are_masked(task, exported, tmp_path, monkeypatch):
    chosen = method(secure=SUM)

    def spoil(round_, here):
        monkeypatch.setattr(here._model, "losses", lambda w, x, y: np.full(len(x), np.nan))

    result = federated(task, chosen, exported(chosen), tmp_path / "state", spoil=spoil)
    assert not any(row.missing for row in result.ledger.rows)
    assert bool(torch.isfinite(result.weights).all())


def test_state_and_identities_are_asked_for(task, exported):
    folder = exported(method(secure=SUM, down="replay"))
    own = task.clients[1]
    x, y = task.x[own].numpy(), task.y[own].numpy()
    with pytest.raises(ValueError, match=r"this client keeps state \(secure, replay\); give it a folder"):
        Edge(folder, x, y, 1)
    with pytest.raises(ValueError, match="give it --identity and --known"):
        Edge(folder, x, y, 1, folder / "state")
    with pytest.raises(ValueError, match="there are 33 records, but a client may hold 32"):
        Edge(folder, x[np.zeros(33, int)], y[np.zeros(33, int)], 1, folder / "state")


# ---------------------------------------------------------------------------------------------------- frames


def octets(*shape):
    return torch.arange(int(np.prod(shape)), dtype=torch.uint8).view(*shape)


QUESTIONS = [
    ProbeHere(2**33, -5, 9),
    CatchUp(3, [b"frame", bytes(300), bytes(70_000)], torch.ones(4), torch.zeros(4), None),
    Step(2**63 - 1, torch.ones(5)),
    Advertise(1),
    Share([1, 2, 300], 3, octets(3, 32), octets(3, 32), octets(3, 64)),
    Share(list(range(2000)), 3, octets(3, 32), octets(3, 32), octets(3, 64)),
    Deal([0, 1, 2], octets(2, 94), octets(2, 32)),
    Mask([1, 2, 3], 10, True, 5, octets(100)),
    Agree(list(range(20))),
    Unmask([1, 2], [3], 3),
    Unmask([1, 2, 4], [3], 3, [1, 4], octets(2, 64)),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: type(q).__name__)
def test_every_question_is_read_as_the_library_writes_it(question):
    name, _, payload = frames.opened(message.frame(question, Envelope()))
    found = frames.read(payload, name, {"weights": 4})
    for label in question.__struct_fields__:
        value = getattr(question, label)
        if isinstance(value, torch.Tensor):
            assert np.array_equal(found[label], value.numpy())
        else:
            assert found[label] == value
    with pytest.raises(Refused):
        frames.read(bytes(payload) + bytes(8), name, {"weights": 4})


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([q for q in QUESTIONS if len(message.pack(q)) < 5000]), st.data())
def test_no_bytes_make_the_reader_fail_in_another_way(question, data):
    frame = bytearray(message.frame(question, Envelope()))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, min(len(frame), 80) - 1))] = data.draw(st.integers(0, 255))
    try:
        name, _, payload = frames.opened(bytes(frame))
        found = frames.read(payload, name, {"weights": 4})
    except Refused:
        return
    kind = message.KINDS[frames.kind(name)]
    read = message.unpack(payload, kind)  # what it reads the library reads, too
    assert list(found) == list(kind.__struct_fields__)
    assert schema.fields(kind).keys() <= found.keys()
    assert isinstance(read, kind)


def test_letters_are_what_an_edge_client_reads():
    letter = Letter.read(message.frame(Advertise(), at(3, 1)))
    name, where, _ = frames.opened(letter.frame)
    assert (name, where.round, where.client, where.serial, where.run) == ("Advertise", 3, 1, 1, b"run 1234")


# ---------------------------------------------------------------------------------------------------- in a process

ALONE = """
import sys
from fedveil_edge.__main__ import main
main(sys.argv[1:])
sys.stderr.write(f"{'torch' in sys.modules or 'fedveil' in sys.modules}")
"""


def test_a_process_without_pytorch_serves_questions(task, exported, tmp_path):
    chosen = method(down="replay", secure=SUM)
    folder = exported(chosen)
    own = task.clients[1]
    np.savez(tmp_path / "records.npz", x=task.x[own].numpy(), y=task.y[own].numpy())
    for client in range(CLIENTS):
        secret = Ed25519PrivateKey.from_private_bytes(simulated(SEED).own[client])
        keys.private(
            tmp_path / f"identity-{client}",
            secret.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()),
        )
        public = secret.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        (tmp_path / f"identity-{client}.pub").write_bytes(public)
    questions = [CatchUp(0), Advertise(), Advertise(1), CatchUp(0)]
    asked = [message.frame(question, at(1, serial)) for serial, question in enumerate(questions, 1)]
    asked[-1] = b"no frame"
    arguments = [tmp_path / "records.npz", "--client", "1", "--state", tmp_path / "state", "--serve"]
    arguments += ["--identity", tmp_path / "identity-1", "--known", tmp_path]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *map(str, arguments)],
        cwd=folder,
        input=b"".join(len(frame).to_bytes(4, "little") + frame for frame in asked),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": ""},
        timeout=600,
    )
    assert done.stderr.decode() == "False"
    replies, rest = [], done.stdout
    while rest:
        end = 4 + int.from_bytes(rest[:4], "little")
        replies, rest = [*replies, rest[4:end]], rest[end:]
    held, advertised, refused, malformed = replies
    (expected,) = chosen.steps.follow(stack(task, (1,)), CatchUp(0))
    assert message.unframe(held[1:], {WeightsDigest.kind: WeightsDigest}, 1000)[0].digest == expected.digest
    keys_, where = message.unframe(advertised[1:], {Advertised.kind: Advertised}, 1000)
    assert where == at(1, 2)
    signed = Context(b"run 1234", 1).signed_keys(1, *(part.numpy().tobytes() for part in (keys_.channel, keys_.mask)))
    simulated(SEED).verify(1, keys_.signature.numpy().tobytes(), signed)
    assert refused == b"\1wrong stage: client 1 takes part in one sum a round, and unmasks it once"
    assert malformed == b"\1truncated: 8 bytes are fewer than a frame's 24"
