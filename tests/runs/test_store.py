"""Clients' memories on the disk: what is written and read, by which thread, and what becomes of damaged files."""

import contextlib
import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch

import fedveil as fv
from fedveil.core import message
from fedveil.core.files import digested, write
from fedveil.core.memory import Memory, Spent
from fedveil.core.message import Envelope, Refused
from fedveil.engines import LocalEngine
from fedveil.gpu.host import HostCopies
from fedveil.methods.scaffold import Control
from fedveil.runs import log
from fedveil.runs.checkpoint import Checkpoint, Remembered, checkpoints_in, newest
from fedveil.runs.folder import RunFolder
from fedveil.runs.log import Stored
from fedveil.runs.store import Store
from toys import kept, linear_task

LOCAL = fv.LocalTraining(batch=4)
METHODS = {
    "scaffold": fv.Scaffold(local=LOCAL),
    "error feedback": fv.FedAvg(local=LOCAL, up=fv.TopK(share=0.4), feedback=True),
}


@pytest.fixture(params=METHODS)
def method(request):
    return METHODS[request.param]


def train(folder, method, rounds=4, clients=None, **options):
    task = linear_task(records=2 * clients, clients=clients) if clients else linear_task()
    options = {"cohort": 3, "engine": LocalEngine(stack=1, workers=1), **options}
    return fv.run(task, method, rounds=rounds, folder=folder, **options)


def control(value, size=8):
    return Control(torch.full((size,), float(value)))


def saved(store, run=bytes(8)):
    """Write what has changed, and return how a checkpoint refers to it."""
    copies = HostCopies()
    index = store.write(run, store.hand_over(copies))
    store.tidy()
    return index


def on_disk(folder):
    return sum(path.stat().st_size for pattern in ("memory-*", "index-*") for path in folder.glob(pattern))


# ------------------------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("name", METHODS)
def test_a_round_writes_what_its_cohort_remembers_whatever_other_clients_remember(name, tmp_path):
    written = []

    def count(row):
        folder.join()
        written.append(on_disk(tmp_path) - sum(written))

    with contextlib.closing(RunFolder(tmp_path)) as folder:
        train(folder, METHODS[name], rounds=40, clients=100, observer=count)
    assert len(newest(tmp_path).memory) > 60
    assert max(written[20:]) < 1.1 * max(written[:3])


def test_over_many_rounds_files_hold_little_that_nobody_needs_and_moving_costs_no_more_than_writing(
    tmp_path, monkeypatch
):
    """Of 300 clients, four change a round."""
    sizes = {"FULL": 2000, "WASTE": 2000, "BLOCKS": 1000}
    for name, size in sizes.items():
        monkeypatch.setattr(log, name, size)
    store, entry = Store(tmp_path), message.size(control(0))
    store.update({client: [(1, 0, "part", control(client))] for client in range(300)})
    index, written = saved(store), []
    order = torch.randperm(1200, generator=fv.Seed.root(0).torch()).tolist()
    for round_ in range(2, 302):
        before, last = store._log.sizes.copy(), store._log.last
        for i in range(4):
            client = order[4 * (round_ - 2) + i] % 300
            store[client] = [(round_, 0, "part", control(round_ + client))]
        index = saved(store)
        grown = {number: size - before.get(number, 0) for number, size in store._log.sizes.items()}
        written.append(sum(size for number, size in grown.items() if number in before or number > last))
    assert 4 * entry <= sum(written) / len(written) <= 2 * 4 * entry
    assert max(written) <= 4 * entry + sizes["FULL"]
    data = sum(path.stat().st_size for path in tmp_path.glob("memory-*"))
    assert data <= 2 * 300 * entry + 3 * sizes["WASTE"]
    listing = len(msgspec.msgpack.encode(store._disk.places))
    assert sum(path.stat().st_size for path in tmp_path.glob("index-*")) <= 2 * (2 * listing + 1000)
    stored = Stored.read(tmp_path, index, 301)
    assert len(stored) == 300
    for client, entries in stored.items():
        ((round_, _, _, record),) = entries
        assert record.control[0] == (client if round_ == 1 else round_ + client)


def test_an_entry_that_has_not_changed_is_not_written_again(tmp_path):
    store = Store(tmp_path)
    store[5] = [(0, 0, "account", Spent([])), (1, 0, "one", control(1)), (1, 0, "two", control(2))]
    saved(store)
    size = (tmp_path / "memory-00000001.fv").stat().st_size
    store[5] = [*store[5][:2], (2, 0, "two", control(3))]
    index = saved(store)
    assert (tmp_path / "memory-00000001.fv").stat().st_size == size + message.size(control(3))
    assert [e[:3] for e in Stored.read(tmp_path, index, 2)[5]] == [(0, 0, "account"), (1, 0, "one"), (2, 0, "two")]


def test_a_client_that_is_taken_away_stays_away(tmp_path):
    store = Store(tmp_path)
    store.update({client: [(1, 0, "part", control(client))] for client in range(3)})
    saved(store)
    del store[1]
    assert (1 in store, list(store), len(store)) == (False, [0, 2], 2)
    index = saved(store)
    assert (1 in store, list(store)) == (False, [0, 2])
    assert list(Stored.read(tmp_path, index, 1)) == [0, 2]
    with pytest.raises(KeyError):
        store[1]


def test_a_run_whose_clients_remember_nothing_has_no_files_for_it(tmp_path):
    train(tmp_path, fv.FedAvg(local=LOCAL))
    assert not list(tmp_path.glob("memory-*"))
    assert not list(tmp_path.glob("index-*"))
    assert newest(tmp_path).memory == {}


# ------------------------------------------------------------------------------------------------- what is in memory


def test_only_the_clients_of_a_round_are_in_memory(method, tmp_path):
    seen = []

    class Looking(LocalEngine):
        def deliver(self, letters, deadline):
            replies = super().deliver(letters, deadline)
            store = self._clients.memory.entries
            seen.append({*store._changed, *store._read, *store._handed} - cohorts[-1] - {x.client for x in letters})
            cohorts.append({letter.client for letter in letters})
            return replies

    cohorts = [set()]
    train(tmp_path, method, rounds=20, clients=30, engine=Looking(stack=1, workers=1))
    assert seen == [set()] * 20
    assert len(newest(tmp_path).memory) > 20


def test_whoever_walks_through_all_clients_leaves_none_in_memory(tmp_path):
    store = Store(tmp_path)
    store.update({client: [(1, 0, "part", control(client))] for client in range(9)})
    saved(store)
    store[3] = [(2, 0, "part", control(30))]
    assert sorted(float(entries[0][3].control[0]) for entries in store.values()) == [0, 1, 2, 4, 5, 6, 7, 8, 30]
    assert not store._read


def test_what_was_read_in_a_round_is_forgotten_when_it_is_saved(tmp_path):
    store = Store(tmp_path)
    store.update({client: [(1, 0, "part", control(client))] for client in range(3)})
    saved(store)
    assert float(store[2][0][3].control[0]) == 2
    assert list(store._read) == [2]
    saved(store)
    assert not {*store._read, *store._handed, *store._changed}
    assert float(store[2][0][3].control[0]) == 2


def test_local_batch_norm_is_evaluated_with_all_clients_whether_there_is_a_folder_or_not(tmp_path):
    x = torch.randn(40, 3, generator=fv.Seed.root(0).torch())
    data = fv.data.from_tensors(x, (x[:, 0] > 0).long(), x, (x[:, 0] > 0).long(), classes=2)
    rows = []
    for folder in (None, tmp_path):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        task = fv.Task(model, data, fv.split("iid", data, 5, fv.Seed.root(0)), batch_norm="local")
        result = fv.run(task, fv.FedAvg(LOCAL), rounds=5, cohort=2, folder=folder)
        rows.append([row.untimed() for row in result.ledger.rows])
    assert rows[0] == rows[1]


def test_a_client_keeps_a_copy_of_its_row_and_not_the_whole_stack():
    memory, stack, whole = Memory(), torch.randn(100, 5), control(1)
    memory.keep(7, 1, 0, {"row": Control(stack[3]), "whole": whole})
    slots = memory.before(7, 2, 0)
    assert slots["whole"] is whole
    assert torch.equal(slots["row"].control, stack[3])
    assert slots["row"].control.untyped_storage().nbytes() == 5 * 4


def test_threads_find_what_was_entered_last_while_another_one_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "FULL", 500)
    monkeypatch.setattr(log, "WASTE", 0)
    store, rounds, writing = Store(tmp_path), 30, None

    def answer(client, round_):
        if round_ > 1:
            ((before, _, _, record),) = store[client]
            assert (before, float(record.control[0])) == (round_ - 1, 100.0 * client + round_ - 1)
        store[client] = [(round_, 0, "part", control(100 * client + round_))]

    with ThreadPoolExecutor(4) as pool, ThreadPoolExecutor(1) as writer:
        for round_ in range(1, rounds + 1):
            done = pool.map(answer, range(16), [round_] * 16)
            assert list(done) == [None] * 16
            if writing:
                writing.result()
            writing = writer.submit(store.write, bytes(8), store.hand_over(HostCopies()))
        index = writing.result()
    assert {float(e[3].control[0]) for (e,) in Stored.read(tmp_path, index, rounds).values()} == {
        100.0 * client + rounds for client in range(16)
    }


# ------------------------------------------------------------------------------------------------- going on


def test_a_resumed_run_is_the_run_in_one_with_few_and_many_clients(method, tmp_path):
    train(tmp_path / "whole", method, rounds=12, clients=30)
    for rounds in (1, 5, 6, 12):
        train(tmp_path / "pieces", method, rounds=rounds, clients=30)
    assert kept(tmp_path / "pieces") == kept(tmp_path / "whole")
    without = train(None, method, rounds=12, clients=30)
    assert torch.equal(newest(tmp_path / "whole").state.weights, without.weights)


def test_a_folder_of_a_version_that_kept_memories_in_checkpoints_is_gone_on_with(method, tmp_path):
    train(tmp_path / "whole", method)
    train(tmp_path / "old", method, rounds=2)
    found = newest(tmp_path / "old")
    entries = [
        Remembered(client, r, s, part, message.frame(record, Envelope(found.run, r, client, s)))
        for client, remembered in found.memory.items()
        for r, s, part, record in remembered
    ]
    for path in (tmp_path / "old").glob("*.fv"):
        path.unlink()
    where = Envelope(found.run, 2)
    old = Checkpoint(found.run, 2, message.frame(found.state, where), entries, found.decided)
    write(tmp_path / "old" / "checkpoint-00000002.fv", digested(message.frame(old, where)))
    train(tmp_path / "old", method)
    assert kept(tmp_path / "old") == kept(tmp_path / "whole")


# ------------------------------------------------------------------------------------------------- damaged files


def damaged(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [damaged, cut, lambda path: path.unlink()], ids=["a bit", "cut off", "gone"])
@pytest.mark.parametrize("kind", ["memory", "index"])
def test_if_what_the_newest_checkpoint_refers_to_is_damaged_the_one_before_is_used(kind, damage, method, tmp_path):
    train(tmp_path / "whole", method)
    train(tmp_path / "run", method, rounds=2)
    train(tmp_path / "run", method, rounds=3)  # in files of its own
    damage(max((tmp_path / "run").glob(f"{kind}-*")))
    assert newest(tmp_path / "run").round == 2
    train(tmp_path / "run", method)
    *state, rows = kept(tmp_path / "run")
    assert "checkpoint-00000003.fv (" in rows[2].events.pop()
    assert (*state, rows) == kept(tmp_path / "whole")


def test_an_older_file_that_is_cut_off_is_named(tmp_path):
    for rounds in (2, 6):
        train(tmp_path, METHODS["scaffold"], rounds=rounds, clients=30)
    (tmp_path / "memory-00000001.fv").write_bytes(b"F")
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be read: .*memory-00000001\.fv is cut off"):
        train(tmp_path, METHODS["scaffold"], rounds=8, clients=30)


def test_a_client_whose_older_memory_is_damaged_is_refused_and_named(tmp_path):
    train(tmp_path, METHODS["scaffold"], rounds=6, clients=30)
    places = newest(tmp_path).memory.places
    client = min(places, key=lambda client: places[client][0].round)
    (place,) = places[client]
    damaged(tmp_path / f"memory-{place.file:08d}.fv", place.start + place.length - 1)
    with pytest.raises(Refused, match=f"damaged where it holds 'scaffold' of client {client}$"):
        newest(tmp_path).memory[client]
    result = train(tmp_path, METHODS["scaffold"], rounds=40, clients=30)
    told = [row.missing[str(client)] for row in result.ledger.rows if str(client) in row.missing]
    assert told
    assert set(told) == {
        f"refused: damaged: memory-{place.file:08d}.fv is damaged where it holds 'scaffold' of client {client}"
    }


# ------------------------------------------------------------------------------------------------- beside training


@pytest.fixture
def slow(monkeypatch):
    """Checkpoints that take a while; the list tells what has happened."""
    told, save = [], RunFolder._save

    def slowly(folder, run, round_, *args):
        time.sleep(0.05)
        took = save(folder, run, round_, *args)
        told.append(("saved", round_, threading.current_thread() is threading.main_thread()))
        return took + 0.05

    monkeypatch.setattr(RunFolder, "_save", slowly)
    return told


class Telling(LocalEngine):
    def __init__(self, told, **options):
        super().__init__(stack=1, workers=1)
        self.told = told
        vars(self).update(options)

    def deliver(self, letters, deadline):
        self.told.append(("asked", letters[0].envelope.round))
        return super().deliver(letters, deadline)


def test_a_checkpoint_is_written_beside_the_next_round_and_before_its_row(slow, tmp_path):
    engine = Telling(slow)
    train(tmp_path, METHODS["scaffold"], 3, engine=engine, observer=lambda row: slow.append(("row", row.round)))
    assert slow == [
        *(("asked", 1), ("row", 1), ("asked", 2), ("saved", 1, False), ("row", 2)),
        *(("asked", 3), ("saved", 2, False), ("row", 3), ("saved", 3, False)),
    ]


def test_where_clients_are_elsewhere_a_checkpoint_is_complete_before_the_next_round_is_asked(slow, tmp_path):
    """Clients that have seen round 2 refuse round 1, so a killed server must not go back to it."""
    train(tmp_path, METHODS["scaffold"], 2, engine=Telling(slow, simulated=False))
    assert slow == [("asked", 1), ("saved", 1, False), ("asked", 2), ("saved", 2, False)]


def test_a_run_that_fails_waits_for_its_checkpoint(slow, tmp_path):
    def fail(row):
        raise ArithmeticError("observer")

    with pytest.raises(ArithmeticError, match="observer"):
        train(tmp_path, METHODS["scaffold"], observer=fail)
    assert slow == [("saved", 1, False)]
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-00000001.fv"]


def test_an_error_of_the_last_checkpoint_is_told(tmp_path):
    (tmp_path / "checkpoint-00000003.fv.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"could not write .*00000003\.fv: No space left.*written before is kept"):
        train(tmp_path, METHODS["scaffold"], rounds=3)
    assert newest(tmp_path).round == 2


@pytest.mark.parametrize("kind", ["memory", "index"])
def test_without_room_for_memories_the_run_stops_and_can_go_on(kind, method, tmp_path, monkeypatch):
    train(tmp_path / "whole", method)
    train(tmp_path / "run", method, rounds=2)

    def full(file):
        if kind in file.name:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(log, "_sync", full)
        with pytest.raises(OSError, match=rf"could not write .*{kind}-\d+\.fv: No space left.*written before is kept"):
            train(tmp_path / "run", method)
    assert newest(tmp_path / "run").round == 2
    train(tmp_path / "run", method)
    assert kept(tmp_path / "run") == kept(tmp_path / "whole")


def test_rows_tell_what_evaluation_and_saving_took(slow, tmp_path):
    began = time.perf_counter()
    rows = train(tmp_path, METHODS["scaffold"], rounds=3).ledger.rows
    took = time.perf_counter() - began
    assert [row.saving > 0.05 for row in rows] == [False, True, True]
    assert all(0 < row.evaluating < row.seconds for row in rows)
    assert all(row.seconds > 0.04 for row in rows[1:])  # most of which was waiting
    assert sum(row.seconds for row in rows) < took
    summary = fv.Ledger.read(tmp_path / "ledger.jsonl").summary("scaffold")
    assert summary["saving"] == sum(row.saving for row in rows)
    assert summary["evaluating"] == sum(row.evaluating for row in rows)


def test_rows_of_older_versions_are_read(tmp_path):
    (tmp_path / "ledger.jsonl").write_text('{"round": 1, "cohort": [0], "seconds": 1.5}\n')
    (row,) = fv.Ledger.read(tmp_path / "ledger.jsonl").rows
    assert (row.seconds, row.evaluating, row.saving) == (1.5, 0, 0)


def test_a_row_without_evaluation_or_folder_has_no_seconds_of_them():
    first, last = train(None, METHODS["scaffold"], rounds=2, evaluate_every=2).ledger.rows
    assert first.evaluating == first.saving == last.saving == 0
    assert last.evaluating > 0
