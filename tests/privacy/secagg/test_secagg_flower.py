"""The secure sum on Flower, where every question may be answered by another process: secrets travel sealed or not."""

import pytest
import torch

pytest.importorskip("flwr")

import fedveil as fv
from engines.grids import Nodes, made
from fedveil.engines import LocalEngine, kept
from fedveil.engines.flower import Flower, client_app
from fedveil.privacy import SecureSum
from fedveil.privacy.secagg.client import NOTE
from fedveil.privacy.secagg.records import Advertise, Agree, Deal, Mask, Share, Unmask
from privacy.secagg.sums import LAST, Summed, letter
from toys import linear_task

TASK = linear_task(5, 40, uneven=True)


def on_flower(method, folder=None, change=None, rounds=2):
    memory = (lambda context: folder / str(context.node_id)) if folder else None
    grid = Nodes(client_app(made(TASK, method), memory), range(5), change)
    engine = Flower(grid, 600.0, poll=0.001, tell=lambda said: None, simulated=folder is None)
    return fv.run(TASK, method, rounds=rounds, cohort=5, engine=engine), grid


@pytest.mark.parametrize("server", ["curious", "malicious"])
@pytest.mark.parametrize("deployed", [False, True])
def test_the_sum_on_flower_is_that_of_the_local_engine(server, deployed, tmp_path):
    method = Summed(SecureSum(server=server))
    local = fv.run(TASK, method, rounds=2, cohort=5, engine=LocalEngine(stack=1, workers=1))
    flower, _ = on_flower(method, tmp_path if deployed else None)
    assert torch.equal(local.weights, flower.weights)
    for one, other in zip(local.ledger.rows, flower.ledger.rows, strict=True):
        assert (one.up, one.down, one.missing, one.secure) == (other.up, other.down, other.missing, other.secure)


def test_a_deployed_clients_secrets_are_not_on_its_disk_in_the_clear(tmp_path, monkeypatch):
    seen, files = [], []
    monkeypatch.setattr(kept, "save", lambda path, frame, save=kept.save: (files.append(frame), save(path, frame)))
    monkeypatch.setattr(kept, "sealed", lambda own, *to, sealed=kept.sealed: (seen.append(own), sealed(own, *to))[1])
    on_flower(Summed(), tmp_path)
    parts = {
        p
        for s in seen
        for p in (s.channel, s.mask, s.own, *s.held.values(), *s.channel_keys.values(), *s.pairs.values())
    }
    assert len(parts) > 100
    assert len(files) == 2 * 5 * 5
    assert not any(part in frame for part in parts - {b""} for frame in files)


def test_a_node_that_restarts_finds_its_secrets_lost(tmp_path):
    """Its file is still there, but the key to what is sealed in it was in its memory."""
    answered = []

    def restart(node, reply):
        answered.append(node)
        if node == 1000 and answered.count(node) == 3:  # which partition, keys, shares
            grid.contexts[node].state.config_records.clear()
        return reply

    method, memory = Summed(), lambda context: tmp_path / str(context.node_id)
    grid = Nodes(client_app(made(TASK, method), memory), range(5), restart)
    engine = Flower(grid, 600.0, poll=0.001, tell=lambda said: None, simulated=False)
    result = fv.run(TASK, method, rounds=1, cohort=5, engine=engine)
    assert result.ledger.rows[0].missing["0"].startswith("refused: lost state: 'secure sum' of round 1 is gone")
    assert LAST[0].clients == (1, 2, 3, 4)


def test_a_node_that_restarts_does_not_unmask_twice_in_a_round(tmp_path):
    method, memory = Summed(), lambda context: tmp_path / str(context.node_id)
    grid = Nodes(client_app(made(TASK, method), memory), range(5))
    engine = Flower(grid, 600.0, poll=0.001, tell=lambda said: None, simulated=False)
    fv.run(TASK, method, rounds=1, cohort=5, engine=engine)
    for context in grid.contexts.values():
        context.state.config_records.clear()
    run = engine._clients.run
    for round_, told in ((1, "refused: wrong stage: client 2 has unmasked a sum in round 1"), (2, "")):
        (reply,) = engine.deliver([letter(Advertise(), 2, run, round_)], None)
        assert reply.problem == told


def test_secrets_are_carried_sealed_to_the_same_round_of_the_same_client_only():
    clients = fv.core.clients.Clients(Summed(), TASK, bytes(8), fv.Seed.root(0))
    clients.answer([letter(Advertise(), 3, bytes(8), 1)])
    key, secret = b"k" * 32, clients.notes[3][NOTE]
    frame = kept.pack(clients, 3, key)

    def carried(with_key, run=bytes(8), client=3):
        other = fv.core.clients.Clients(Summed(), TASK, run, fv.Seed.root(0))
        kept.unpack(frame, other, client, with_key)
        return other.notes[client].get(NOTE)

    assert carried(key) == secret
    assert carried(b"x" * 32) is None
    assert carried(None) is None
    assert carried(key, run=b"another!") is None
    assert carried(key, client=2) is None
    assert NOTE.encode() not in kept.pack(clients, 3)


# ---------------------------------------------------------------------------------------------------- a killed server


class Killed(BaseException):
    """What a SIGKILL does to the server's process: nothing after it happens there. Its clients live elsewhere."""


class Dying(Flower):
    """A server that dies in round 2, when the answers to a stage are on their way."""

    def __init__(self, grid, stage):
        super().__init__(grid, 600.0, poll=0.001, tell=lambda said: None)
        self.stage = stage

    def deliver(self, letters, deadline):
        replies = list(super().deliver(letters, deadline))
        if letters[0].kind == self.stage.kind and letters[0].envelope.round == 2:
            raise Killed
        return replies


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("server", ["curious", "malicious"])
@pytest.mark.parametrize("stage", [Advertise, Share, Deal, Mask, Agree, Unmask], ids=lambda stage: stage.__name__)
def test_a_server_killed_in_a_stage_goes_on_or_is_refused_by_name(stage, server, tmp_path):
    """Clients that have masked answer the same question again, under other masks; those that have unmasked do not."""
    if stage is Agree and server == "curious":
        pytest.skip("there is no such stage")
    method = fv.FedAvg(fv.LocalTraining(lr=0.1, batch=4), secure=SecureSum(server=server))
    grid = Nodes(client_app(made(TASK, method), lambda context: tmp_path / str(context.node_id)), range(5))
    options = {"rounds": 3, "cohort": 5, "folder": tmp_path / "run", "identities": None}
    with pytest.raises(Killed):
        fv.run(TASK, method, engine=Dying(grid, stage), **options)
    again = Flower(grid, 600.0, poll=0.001, tell=lambda said: None)
    result = fv.run(TASK, method, engine=again, **options)
    second = result.ledger.rows[1]
    if stage is Unmask:
        told = "refused: wrong stage: client {} has unmasked a sum in round 2"
        assert second.missing == {str(k): told.format(k) for k in range(5)}
        assert second.events[-1] == "clients have seen round 2 before; the run goes on with the next one"
        assert not result.ledger.rows[2].missing
    else:
        assert not second.missing
        whole = fv.run(TASK, method, rounds=3, cohort=5, engine=LocalEngine(stack=1, workers=1))
        assert torch.equal(result.weights, whole.weights)
