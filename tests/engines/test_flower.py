"""The Flower engine on a grid in this process: what crosses, what is kept, and nodes that misbehave."""

import json
import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict
from torch import nn
from typer.testing import CliRunner

import fedveil as fv
from engines.grids import Nodes, made
from fedveil import cli
from fedveil.core import message
from fedveil.core.message import Envelope, Slots
from fedveil.data import from_tensors
from fedveil.engines import LocalEngine
from fedveil.engines.claims import Claims, Roster, Seat
from fedveil.engines.flower import Flower, client_app, wire
from fedveil.engines.flower import app as client_side
from fedveil.runs.folder import RunFolder
from toys import LastReference, Plain, Twice, linear_task

METHODS = [fv.FedAvg(), fv.Scaffold(), Twice(), LastReference()]
LOCAL = {"engine": LocalEngine(stack=1, workers=1)}


def name(method):
    return method.name


def on_flower(method, tmp_path=None, change=None, rounds=2, task=None, patience=600.0, **more):
    """A run on nodes in this process: simulated, or with a folder as deployed."""
    task = task or linear_task(3)
    memory = (lambda context: tmp_path / str(context.node_id)) if tmp_path else None
    grid = Nodes(client_app(made(task, method), memory), range(len(task.clients)), change)
    told = []
    engine = Flower(grid, patience, poll=0.001, tell=told.append, simulated=tmp_path is None)
    result = fv.run(task, method, rounds=rounds, cohort=len(task.clients), engine=engine, **more)
    return result, grid, told


@pytest.mark.parametrize("deployed", [False, True])
@pytest.mark.parametrize("method", METHODS, ids=name)
def test_a_run_is_the_same_as_on_the_local_engine(method, deployed, tmp_path):
    local = fv.run(linear_task(3), method, rounds=3, cohort=3, **LOCAL)
    flower, _, _ = on_flower(method, tmp_path if deployed else None, rounds=3)
    assert torch.equal(local.weights, flower.weights)
    for one, other in zip(local.ledger.rows, flower.ledger.rows, strict=True):
        assert (one.up, one.down, one.missing, one.events) == (other.up, other.down, other.missing, other.events)
        assert one.metrics == other.metrics
        assert other.passes == (0 if deployed else one.passes)


def test_the_ledger_counts_flowers_bytes_too():
    result, grid, _ = on_flower(fv.Scaffold(), rounds=3)
    for row in result.ledger.rows:
        assert row.bytes_up < row.wire_up < row.bytes_up + 3 * 500
        assert row.bytes_down < row.wire_down < row.bytes_down + 3 * 500
    question = grid.questions[-1]
    assert wire.KEPT in question.content  # what a simulated client keeps is there, and not counted
    assert wire.size(question) < len(question.content[wire.OURS]["frame"]) + 200


def test_figures_may_be_whole_numbers_and_are_left_out_if_not_finite():
    class Counting(fv.FedAvg):
        def released(self, stack, question, w, parts=None):
            stack.measure(
                count=torch.tensor([3] * len(stack)), none=torch.full((len(stack),), torch.nan), half=w[:1] + 0.5
            )
            return super().released(stack, question, w, parts)

    result, _, _ = on_flower(Counting(), rounds=1)
    assert not result.ledger.rows[0].missing
    assert result.ledger.rows[0].metrics["count"] == 3
    assert "none" not in result.ledger.rows[0].metrics


def test_a_deployed_clients_memory_is_its_own_file_and_leaves_nothing_in_the_messages(tmp_path):
    result, grid, _ = on_flower(fv.Scaffold(), tmp_path)
    files = sorted(tmp_path.glob("*/*.fv"))
    assert len(files) == 3
    assert {file.parent.stat().st_mode & 0o777 for file in files} == {0o700}
    assert all(set(question.content) == {wire.OURS} for question in grid.questions)
    assert all(set(reply.content) == {wire.OURS} for reply in grid.replies.values())
    assert not any(key in reply.content[wire.OURS] for reply in grid.replies.values() for key in ("passes", "values"))
    assert not result.ledger.rows[-1].missing


def test_a_damaged_memory_file_is_lost_state_and_not_a_new_beginning(tmp_path):
    def damage(node, reply):
        for file in (tmp_path / "1000").glob("*.fv"):
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        return reply

    result, _, _ = on_flower(fv.Scaffold(), tmp_path, damage)
    assert not result.ledger.rows[0].missing
    assert list(result.ledger.rows[1].missing) == ["0"]
    assert "refused: lost state" in result.ledger.rows[1].missing["0"]


@dataclass(frozen=True)
class Secretive(Twice):
    """Notes an object that no record can hold."""

    name: ClassVar[str] = "toy-secretive"

    def first(self, stack, question):
        answers = super().first(stack, question)
        for note in stack.notes:
            note["own"] = ("never to be written",)
        return answers


del fv.METHODS[Secretive.name]


@pytest.mark.parametrize("deployed", [False, True])
def test_a_note_of_another_type_is_a_secret_that_leaves_no_process(deployed, tmp_path):
    with pytest.warns(RuntimeWarning, match="no client answered|nothing was learned"):
        result, _, _ = on_flower(Secretive(), tmp_path if deployed else None, rounds=1)
    assert {reason.split(";")[0] for reason in result.ledger.rows[0].missing.values()} == {
        "refused: lost state: 'own' of round 1 is gone"
    }
    for file in tmp_path.glob("*/*.fv"):
        assert b"never" not in file.read_bytes()


@dataclass(frozen=True)
class Noting(Twice):
    """Notes one value of every kind that is carried, and finds the same."""

    name: ClassVar[str] = "toy-noting"
    values: ClassVar[dict] = {"i": 3, "f": 0.5, "s": "ü", "b": b"\0\1", "t": True, "n": None, "e": b""}

    def first(self, stack, question):
        for note in stack.notes:
            record = Plain(torch.arange(8.0))
            note.update(self.values, record=record, slots=Slots({"part": record}))
        return super().first(stack, question)

    def second(self, stack, question):
        for note in stack.notes:
            assert {key: note[key] for key in self.values} == self.values
            assert {key: type(note[key]) for key in self.values} == {k: type(v) for k, v in self.values.items()}
            for record in (note["record"], note["slots"]["part"]):
                assert torch.equal(record.weights, torch.arange(8.0))
        return super().second(stack, question)


del fv.METHODS[Noting.name]


def test_every_kind_of_note_is_carried_to_another_process(tmp_path):
    assert not on_flower(Noting(), tmp_path)[0].ledger.rows[-1].missing


def test_a_resumed_run_finds_the_memories_of_simulated_clients_in_its_checkpoint(tmp_path):
    whole = fv.run(linear_task(3), fv.Scaffold(), rounds=4, cohort=3, **LOCAL)
    on_flower(fv.Scaffold(), rounds=2, folder=tmp_path)
    resumed, _, _ = on_flower(fv.Scaffold(), rounds=4, folder=tmp_path)
    assert torch.equal(whole.weights, resumed.weights)


def test_a_simulation_holds_what_the_clients_of_a_round_keep_and_of_no_others():
    task, method, options = linear_task(3), fv.Scaffold(), {"rounds": 5, "cohort": 1}
    engine = Flower(Nodes(client_app(made(task, method)), range(3)), 600.0, poll=0.001, simulated=True)
    held = []
    result = fv.run(
        task,
        method,
        engine=engine,
        observer=lambda row: held.append((row.cohort, list(engine._carried._frames))),
        **options,
    )
    assert all(cohort == kept for cohort, kept in held)
    assert len({cohort[0] for cohort, _ in held}) > 1
    assert torch.equal(result.weights, fv.run(task, method, **LOCAL, **options).weights)


def test_a_restarted_server_finds_deployed_clients_with_their_memories(tmp_path):
    whole = fv.run(linear_task(3), fv.Scaffold(), rounds=4, cohort=3, **LOCAL)
    on_flower(fv.Scaffold(), tmp_path / "clients", rounds=3, folder=tmp_path / "server")
    (tmp_path / "server" / "checkpoint-00000003.fv").unlink()  # as if it was killed before it could write that
    resumed, _, _ = on_flower(fv.Scaffold(), tmp_path / "clients", rounds=4, folder=tmp_path / "server")
    assert torch.equal(whole.weights, resumed.weights)
    with_memory = RunFolder(tmp_path / "server")
    assert with_memory.load().memory == {}  # what clients keep is theirs
    with_memory.close()


# ---------------------------------------------------------------------------------------------------- hostile


def ours(**values):
    return RecordDict({wire.OURS: ConfigRecord(values)})


HOSTILE = {
    "nothing": (lambda: RecordDict(), "refused: truncated"),
    "no frame": (lambda: ours(problem=""), "refused: truncated"),
    "a frame that is text": (lambda: ours(frame="FV"), "refused: malformed: the Flower message has no 'frame'"),
    "a list of frames": (lambda: ours(frame=[b"FV", b"FV"]), "refused: malformed"),
    "garbage": (lambda: ours(frame=b"\x80\x04pickle" * 9), "refused: not a frame"),
    "a problem that is a number": (lambda: ours(frame=b"", problem=3), "refused: malformed"),
    "a long problem": (lambda: ours(frame=b"", problem="x \n" * 9999), "x x x"),
    "a problem for a terminal": (lambda: ours(frame=b"", problem="\x1b[2Jgone\x07"), "?[2Jgone?"),
}
FIGURES = {
    "passes below zero": {"passes": -1},
    "passes beyond belief": {"passes": 2**62},
    "true passes": {"passes": True},
    "a figure that is no number": {"names": ["a"], "values": [float("nan")]},
    "a figure too many": {"names": ["a"], "values": [1.0, 2.0]},
    "numbers for names": {"names": [1], "values": [1.0]},
    "whole numbers for figures": {"names": ["a"], "values": [1]},
    "a long name": {"names": ["a" * 999], "values": [1.0]},
    "very many figures": {"names": [str(i) for i in range(2000)], "values": [1.0] * 2000},
    "a text for figures": {"names": "a", "values": [1.0]},
}


@pytest.mark.parametrize("case", [*HOSTILE, *FIGURES])
def test_a_hostile_reply_is_refused_by_name_and_costs_its_own_client_only(case):
    def change(node, reply):
        if node != 1000 or "partition" in reply.content[wire.OURS]:
            return reply
        if case in FIGURES:
            reply.content[wire.OURS].update(FIGURES[case])
            return reply
        return Message(HOSTILE[case][0](), reply_to=grid_question(reply))

    result, _, _ = on_flower(fv.FedAvg(), change=change, rounds=1)
    (row,) = result.ledger.rows
    assert list(row.missing) == ["0"]
    assert row.missing["0"].startswith(HOSTILE[case][1] if case in HOSTILE else "refused: malformed")
    assert len(row.missing["0"]) < 500
    others = fv.run(linear_task(3), fv.FedAvg(), rounds=1, cohort=3, **LOCAL)
    assert row.passes <= others.ledger.rows[0].passes


def grid_question(reply):
    """A message like the one that was answered, to reply to once more."""
    return Message(RecordDict(), reply.metadata.src_node_id, "train")


def test_a_deployed_client_cannot_put_figures_into_the_ledger(tmp_path):
    def boast(node, reply):
        reply.content[wire.OURS].update({"passes": 10**9, "names": ["accuracy"], "values": [1.0]})
        return reply

    result, _, _ = on_flower(fv.FedAvg(), tmp_path, boast, target=0.999, evaluate_every=2)
    assert len(result.ledger.rows) == 2
    assert not result.ledger.rows[0].metrics
    assert [row.passes for row in result.ledger.rows] == [0, 0]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (
            lambda reply: Message(Error(5, "node is\ngone"), reply_to=grid_question(reply)),
            "Flower's error 5: node is gone",
        ),
        (lambda reply: KeyError("no such object"), "refused: malformed: Flower cannot read the answer (KeyError)"),
        (lambda reply: None, "late: no answer within 0.2 s"),
    ],
)
def test_a_node_that_fails_is_missing_with_flowers_reason(fault, reason, tmp_path):
    def change(node, reply):
        return reply if node != 1000 or "partition" in reply.content[wire.OURS] else fault(reply)

    result, _, _ = on_flower(fv.FedAvg(), tmp_path, change, rounds=1, patience=0.2)
    (row,) = result.ledger.rows
    assert list(row.missing) == ["0"]
    assert reason in row.missing["0"]
    assert row.wire_down > row.bytes_down > 0


@pytest.mark.parametrize("simulated", [False, True])
def test_a_deadline_is_real_in_a_deployment_only(simulated, tmp_path):
    class Slow(Nodes):
        def pull_messages(self, message_ids):
            found = super().pull_messages(message_ids)
            self.pulls += 1
            return found if self.pulls > 60 or "partition" in found[0].content[wire.OURS] else []

    task, plan = linear_task(3), fv.CohortSampler(size=3, deadline=0.1)
    memory = None if simulated else lambda context: tmp_path / str(context.node_id)
    grid = Slow(client_app(made(task, fv.FedAvg()), memory), range(3))
    grid.pulls = 0
    with nullcontext() if simulated else pytest.warns(RuntimeWarning, match="no client answered|nothing was learned"):
        late = fv.run(task, fv.FedAvg(), rounds=1, cohort=plan, engine=Flower(grid, poll=0.02, simulated=simulated))
    told = {} if simulated else dict.fromkeys("012", "late: no answer within 0.1 s")
    assert late.ledger.rows[0].missing == told


# ---------------------------------------------------------------------------------------------------- nodes


def engine_on(grid, told=(), simulated=True, **more):
    return Flower(grid, poll=0.001, tell=list(told).append, simulated=simulated, **more)


def test_a_node_that_left_keeps_its_number_and_is_asked_again_when_it_is_back():
    class Leaving(Nodes):
        def push_messages(self, messages):
            numbers = super().push_messages(messages)
            if len(self.questions) == 3 and 1000 in self.contexts:  # after the first round
                self.away = self.contexts.pop(1000)
                self.join(0, 5)  # another key, which says that it is client 0 too
            elif len(self.questions) == 5:
                self.contexts[1000] = self.away
            return numbers

    task = linear_task(3)
    grid = Leaving(client_app(made(task, fv.Scaffold())), range(3))
    result = fv.run(task, fv.Scaffold(), rounds=3, cohort=3, engine=engine_on(grid))
    rows = result.ledger.rows
    assert [row.missing for row in rows] == [{}, {"0": "failed: no Flower node is client 0"}, {}]
    (named,) = (event for row in rows for event in row.events)
    assert "Flower node 5 says that it is client 0, but node 1000 said so first" in named
    assert rows[1].events == [named]
    assert {q.metadata.dst_node_id for q in grid.questions[5:]} == {1000, 993, 986}
    assert 5 not in {q.metadata.dst_node_id for q in grid.questions}


def test_a_client_without_a_node_is_missing():
    task = linear_task(3)
    grid = Nodes(client_app(made(task, fv.FedAvg())), range(2))
    result = fv.run(task, fv.FedAvg(), rounds=1, cohort=3, engine=engine_on(grid, nodes=2))
    assert result.ledger.rows[0].missing == {"2": "failed: no Flower node is client 2"}


def test_too_few_nodes_are_waited_for_and_then_said():
    task, told = linear_task(3), []
    grid = Nodes(client_app(made(task, fv.FedAvg())), range(2))
    grid.join(1, 4)
    with pytest.raises(TimeoutError, match=r"2 of 3 Flower nodes were there after 0.1 s.*node 993 says .* first"):
        fv.run(task, fv.FedAvg(), rounds=1, cohort=3, engine=Flower(grid, 0.1, poll=0.01, tell=told.append))


# ---------------------------------------------------------------------------------------------------- who is who


def claimed(tmp_path, claims, join=(), rounds=1, partitions=range(3)):
    """A deployed run of three clients on nodes 1000, 993 and 986, and others that join with a number each."""
    task = linear_task(3)
    grid = Nodes(client_app(made(task, fv.FedAvg()), lambda context: tmp_path / str(context.node_id)), partitions)
    for node, partition in join:
        grid.join(partition, node)
    engine = Flower(grid, nodes=1, poll=0.001, tell=lambda _: None, claims=claims)
    result = fv.run(task, fv.FedAvg(), rounds=rounds, cohort=3, engine=engine)
    return result.ledger.rows, {(q.metadata.dst_node_id, number(q)) for q in grid.questions}


def number(question):
    return message.envelope(question.content[wire.OURS]["frame"])[1].client


OWN = {(1000, 0), (993, 1), (986, 2)}


def test_a_second_claimant_is_never_asked_and_is_named_in_the_ledger(tmp_path):
    task = linear_task(3)
    grid = Nodes(client_app(made(task, fv.FedAvg())), range(3))
    engine = engine_on(grid)
    engine.open(made(task, fv.FedAvg()).clients)
    grid.join(1, 4)
    grid.join(99, 5)
    result = fv.run(task, fv.FedAvg(), rounds=2, cohort=3, engine=engine)
    first, second = result.ledger.rows
    assert not first.missing
    assert {q.metadata.dst_node_id for q in grid.questions} == {1000, 993, 986}
    assert sorted(event.partition("; ")[0] for event in first.events) == [
        "Flower node 4 says that it is client 1, but node 993 said so first",
        "Flower node 5 says that it is client 99, but this run has 3, from 0",
    ]
    assert second.events == []  # once is enough


def test_a_first_claim_stays_for_good_over_a_restart_of_the_server(tmp_path):
    kept = tmp_path / "nodes.json"
    claimed(tmp_path, Claims(kept=kept))
    assert json.loads(kept.read_text()) == {"0": 1000, "1": 993, "2": 986}
    # the first process is gone, and so is node 1000; node 4, with a lower id, says that it is client 0
    rows, asked = claimed(tmp_path, Claims(kept=kept), [(4, 0)], partitions=(1, 2))
    assert asked == OWN - {(1000, 0)}
    assert rows[0].missing == {"0": "failed: no Flower node is client 0"}
    assert "node 4 says that it is client 0, but node 1000 said so first" in rows[0].events[0]


def test_a_key_is_one_client_and_no_other(tmp_path):
    kept = tmp_path / "nodes.json"
    claimed(tmp_path, Claims(kept=kept), partitions=(0,))
    rows, asked = claimed(tmp_path, Claims(kept=kept), [(1000, 2)], partitions=(1,))
    assert asked == {(993, 1)}
    assert rows[0].events == [
        "Flower node 1000 says that it is client 2, but its key is client 0's; start it with partition-id=0"
    ]


def roster(path, **nodes):
    Roster({int(name[1:]): Seat(node, f"SHA256:{node}") for name, node in nodes.items()}).write(path)
    return Claims(path, path.with_name("nodes.json"))


def test_the_roster_decides_whoever_comes_first(tmp_path):
    rows, asked = claimed(tmp_path, roster(tmp_path / "r.json", k0=1000, k1=993), [(4, 0), (3, 1)])
    assert asked == {(1000, 0), (993, 1)}
    assert rows[0].missing == {"2": "failed: no Flower node is client 2"}
    assert sorted(event.partition("; ")[0] for event in rows[0].events) == [
        "Flower node 3 says that it is client 1, but by the roster that is node 993",
        "Flower node 4 says that it is client 0, but by the roster that is node 1000",
        "Flower node 986 says that it is client 2, but by the roster nobody is",
    ]
    assert not (tmp_path / "nodes.json").exists()


def test_a_node_that_is_not_in_the_roster_holds_up_no_round_but_the_first(tmp_path):
    """A number without a node is looked for in every round; a stranger that keeps silent is asked once."""
    asked = []

    def silent(node, reply):
        if node == 4:
            asked.append(node)
            return None
        return reply

    task, claims = linear_task(3), roster(tmp_path / "r.json", k0=1000, k1=993)
    grid = Nodes(client_app(made(task, fv.FedAvg()), lambda c: tmp_path / str(c.node_id)), range(2), silent)
    grid.join(2, 4)
    engine = Flower(grid, 0.05, 2, poll=0.001, tell=lambda _: None, claims=claims)
    rows = fv.run(task, fv.FedAvg(), rounds=3, cohort=3, engine=engine).ledger.rows
    assert [list(row.missing) for row in rows] == [["2"]] * 3
    assert asked == [4]
    assert "Flower node 4 did not say which client it is" in rows[0].events[0]


def test_a_change_of_the_roster_counts_at_the_next_question(tmp_path):
    path, task = tmp_path / "r.json", linear_task(3)
    claims = roster(path, k0=1000, k1=993, k2=986)
    grid = Nodes(client_app(made(task, fv.FedAvg()), lambda c: tmp_path / str(c.node_id)), range(3))
    grid.join(0, 4)

    def change(row):
        roster(path, **[{"k1": 993}, {"k0": 4, "k1": 993}, {"k2": 986}, {}][row.round - 1])

    engine = Flower(grid, nodes=3, poll=0.001, tell=lambda _: None, claims=claims)
    result = fv.run(task, fv.FedAvg(), rounds=4, cohort=3, engine=engine, observer=change)
    assert [sorted(row.up) for row in result.ledger.rows] == [["0", "1", "2"], ["1"], ["0", "1"], ["2"]]
    to_first = [q.metadata.dst_node_id for q in grid.questions if number(q) == 0]
    assert to_first == [1000, 4]


def test_a_roster_that_disappears_or_is_damaged_lets_nobody_in(tmp_path):
    path = tmp_path / "r.json"
    claims = roster(path, k0=1000)
    assert claims.bound() == {0: 1000}
    path.write_text('{"clients": {"0": "mine"}}')
    with pytest.raises(ValueError, match=r"r\.json is not a roster: .*; restore it from a backup"):
        claims.bound()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        claims.refusal(0, 4)


def test_the_question_that_a_node_answers_cannot_be_guessed_by_another(tmp_path):
    """Flower takes an answer from whoever knows the question's id, a hash of its contents."""
    _, grid, _ = on_flower(fv.FedAvg(), tmp_path)
    assert len({q.content[wire.OURS]["nonce"] for q in grid.questions}) == len(grid.questions) == 6


# ---------------------------------------------------------------------------------------------------- versions


class Aged(Nodes):
    """Node 993 runs another version: what it is told and what it says is as that version has it."""

    def __init__(self, app, partitions, version, format):
        super().__init__(app, partitions)
        self.theirs = {"version": version, "format": format}

    def push_messages(self, messages):
        (asked,) = messages
        if asked.metadata.dst_node_id != 993:
            return super().push_messages(messages)
        with pytest.MonkeyPatch.context() as patch:
            if self.theirs["version"]:
                patch.setattr(wire, "__version__", self.theirs["version"])
                patch.setattr(message, "VERSION", self.theirs["format"])
                return super().push_messages(messages)
        asked_before = Message(wire.content({}), reply_to=grid_question(asked))
        reply = Message(wire.content({"partition": 1}), reply_to=asked_before)
        self.replies[str(len(self.replies))] = reply
        return [str(len(self.replies) - 1)]


@pytest.mark.parametrize(
    ("version", "format", "runs"),
    [
        ("9.8.7", message.VERSION, f"fedveil 9.8.7 (message format {message.VERSION})"),
        (fv.__version__, 77, f"fedveil {fv.__version__} (message format 77)"),
        ("", 0, "a fedveil too old to say its version"),
    ],
)
def test_a_client_of_another_version_is_refused_by_name_at_the_first_message(version, format, runs, tmp_path):
    task, told = linear_task(3), []
    app = client_app(made(task, fv.FedAvg()), lambda context: tmp_path / str(context.node_id))
    grid = Aged(app, range(3), version, format)
    engine = Flower(grid, nodes=2, poll=0.001, tell=told.append)
    (row,) = fv.run(task, fv.FedAvg(), rounds=1, cohort=3, engine=engine).ledger.rows
    ours = f"the server runs fedveil {fv.__version__} (message format {message.VERSION})"
    why = f"wrong version: client 1 runs {runs}, {ours}; install the same version of fedveil on both"
    assert row.events == told == [f"Flower node 993 is not asked: {why}"]
    assert row.missing == {"1": f"refused: {why}"}
    assert {q.metadata.dst_node_id for q in grid.questions} == {1000, 986}


@pytest.mark.parametrize("kind", ["query", "train"])
@pytest.mark.parametrize("theirs", [{}, {"version": "9.8.7", "format": message.VERSION}])
def test_a_client_refuses_a_server_of_another_version_and_says_so(theirs, kind, tmp_path, caplog):
    grid = Nodes(client_app(made(linear_task(3), fv.FedAvg()), lambda c: tmp_path), [1])
    (node,) = grid.get_node_ids()
    values = theirs if kind == "query" else {"frame": train(), **theirs}
    (reply,) = grid.send_and_receive([Message(ours(**values), node, kind)])
    said = caplog.text if kind == "query" else reply.content[wire.OURS]["problem"]
    runs = "fedveil 9.8.7 (message format" if theirs else "a fedveil too old to say its version"
    assert f"wrong version: the server runs {runs}" in said
    assert f"client 1 runs fedveil {fv.__version__}" in said
    assert "; install the same version of fedveil on both" in said
    with pytest.raises(message.Refused):  # a server of before versions were sent asks nobody without it
        wire.take(reply, "partition", int)


def test_a_version_from_outside_is_fit_for_a_terminal():
    said = Message(ours(version="\x1b[2J" + "9" * 999, format=1), 5, "query")
    with pytest.raises(message.Refused) as refused:
        wire.agree(said, "client 1", "the server")
    assert "client 1 runs fedveil ?[2J999" in str(refused.value)
    assert len(str(refused.value)) < 300


# ---------------------------------------------------------------------------------------------------- the client's side


def asked(frame, tmp_path, method=None, partition=1):
    """What a deployed client says to some bytes."""
    grid = Nodes(client_app(made(linear_task(3), method or fv.FedAvg()), lambda c: tmp_path), [partition])
    (node,) = grid.get_node_ids()
    (reply,) = grid.send_and_receive([Message(ours(frame=frame, **wire.versions()), node, "train")])
    return reply.content[wire.OURS]


def train(client=1, round_=1, run=b"run bear"):
    weights = fv.links.down.Train(torch.zeros(8))
    return message.frame(weights, Envelope(run, round_, client))


def test_a_client_refuses_what_is_too_long_or_not_for_it(tmp_path):
    most = client_side.limit(linear_task(3))
    assert asked(train(), tmp_path)["problem"] == ""
    assert "refused: too large" in asked(bytes(most + 1), tmp_path)["problem"]
    assert "refused: not a frame" in asked(bytes(most), tmp_path)["problem"]
    assert asked(train(client=2), tmp_path)["problem"] == "refused: unknown client: this is client 1, not 2"


def test_a_client_refuses_a_round_that_is_over_in_another_process_too(tmp_path):
    assert asked(train(round_=5), tmp_path)["problem"] == ""
    assert "refused: wrong round" in asked(train(round_=4), tmp_path)["problem"]
    assert asked(train(round_=4, run=b"another!"), tmp_path)["problem"] == ""


def test_an_exceptions_words_stay_with_a_deployed_client(tmp_path, caplog):
    class Quoting(fv.FedAvg):
        def released(self, stack, question, w, parts=None):
            raise ValueError("the record of Ada Lovelace is odd")

    reply = asked(train(), tmp_path, Quoting())
    assert reply["problem"] == "failed: the client gives no answer; its own log says why"
    assert "Ada Lovelace" in caplog.text
    assert re.search("Ada", str(dict(reply))) is None


# ---------------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ray-address", "127.0.0.1:1"], "--ray-address is for engines that run on Ray; add --engine ray or"),
        (["--engine", "flower", "--stack", "2"], "leave out --stack/--workers"),
        (["--engine", "flower", "--compile"], "--compile is for the local engine; leave it out"),
        (["--engine", "flower", "--workers", "2", "--ray-address", "127.0.0.1:1"], "leave out --stack/--workers"),
        (["--engine", "flower", "--ray-address", "127.0.0.1:1"], "there is no Ray at 127.0.0.1:1; start one"),
        (["--engine", "flower", "--ray-address", "there"], "the Ray address is 'there'; it is HOST:PORT"),
        (["--engine", "ray", "--ray-address", "127.0.0.1:1"], "there is no Ray at 127.0.0.1:1; start one"),
        (["--engine", "ray", "--ray-address", "there"], "the Ray address is 'there'; it is HOST:PORT"),
        (["--engine", "ray", "--compile"], "--compile is for the local engine; leave it out"),
        (["--engine", "ray", "--wire", "memory"], "--wire memory is for the local engine, whose clients are in this"),
    ],
)
def test_a_mistake_is_one_sentence(options, said, tmp_path):
    result = CliRunner().invoke(cli.app, ["run", "digits/fedavg", "--out", str(tmp_path / "run"), *options])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") <= 2
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


@pytest.mark.parametrize(("missing", "said"), [("flwr", "the Flower engine is not installed"), ("ray", "needs Ray")])
def test_an_absent_extra_is_said_with_the_command(missing, said, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "flwr":
        monkeypatch.delitem(sys.modules, "fedveil.engines.flower")
    result = CliRunner().invoke(
        cli.app, ["run", "digits/fedavg", "--engine", "flower", "--out", str(tmp_path / "run"), "--format", "json"]
    )
    assert result.exit_code == 2
    assert said in result.stderr
    assert "run: pip install 'fedveil[flower]'" in result.stderr


def normed():
    """Batch norm and dropout: what a client draws and keeps must not depend on where it runs."""
    torch.manual_seed(0)
    data = from_tensors(torch.randn(40, 6), torch.arange(40) % 3, torch.randn(12, 6), torch.arange(12) % 3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    split = fv.split("iid", data, 4, fv.Seed.root(0))
    return {policy: fv.Task(model, data, split, batch_norm=policy) for policy in ("federated", "local")}


@pytest.mark.parametrize("policy", ["federated", "local"])
@pytest.mark.parametrize("deployed", [False, True])
def test_batch_norm_and_dropout_are_the_same_on_flower(policy, deployed, tmp_path):
    task, method = normed()[policy], fv.FedAvg(local=fv.LocalTraining(batch=4))
    here = fv.run(task, method, rounds=3, cohort=4, **LOCAL)
    there, _, _ = on_flower(method, task=task, rounds=3, tmp_path=tmp_path if deployed else None)
    assert torch.equal(here.weights, there.weights)
    assert torch.equal(here.task.norms.values, there.task.norms.values)
    assert [row.bytes_up for row in here.ledger.rows] == [row.bytes_up for row in there.ledger.rows]
    if policy == "federated" or not deployed:
        assert [row.metrics for row in here.ledger.rows] == [row.metrics for row in there.ledger.rows]
    else:
        assert all("batch norm layers stay with clients" in row.events[-1] for row in there.ledger.rows)
