"""Who counts what: clients what they gave away, the server what it asked for, and neither forgets."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import fedveil as fv
from fedveil.core.clients import Clients, Letter, Unanswered
from fedveil.core.ledger import Ledger, Row
from fedveil.core.memory import Memory
from fedveil.core.message import Envelope, pack
from fedveil.engines import LocalEngine as Engine
from fedveil.engines import kept
from fedveil.links.down import Train
from fedveil.links.steps import ClientWeights
from fedveil.privacy.account import Account, Tally, priced
from fedveil.privacy.accountant import Noised, epsilon
from fedveil.runs.checkpoint import RunError
from fedveil.runs.folder import RunFolder
from toys import Tamper, linear_task

LOCAL = fv.LocalTraining(lr=0.1, steps=3, batch=2)
STEPS = Noised(1.0, 2 / 6, 3)  # of one answer, of clients of 6 records
ASKED = '{"cohort":[0,1,2,3],"price":["noised",1.0,0.3333333333333333,3]}\n'  # a line of asked.jsonl


def private(budget=None) -> fv.FedAvg:
    return fv.FedAvg(LOCAL, privacy=fv.DpSgd(delta=1e-3, budget=budget))


def cost(answers: int) -> float:
    return epsilon([Noised(1.0, 2 / 6, 3 * answers)], 1e-3)


# ---------------------------------------------------------------------------------------------------- clients


def test_what_was_spent_stays_while_the_memory_of_a_round_is_replaced():
    memory, first, again = Memory(), ClientWeights(1), ClientWeights(2)
    price = private().client_cost(linear_task())
    memory.charge(3, bytes(8), price)
    for record in (first, again):
        memory.keep(3, 1, 0, {"down": record})
        memory.charge(3, bytes(8), price)
    assert priced(memory.spent(3)) == {STEPS: 3}
    assert not memory.before(3, 1, 0)
    assert memory.before(3, 1, 1)["down"] is again
    memory.keep(3, 2, 0, {"down": first})
    memory.keep(3, 3, 0, {"down": first})
    assert priced(memory.spent(3)) == {STEPS: 3}
    assert [e[:2] for e in memory.entries[3]] == [(0, 0), (2, 0), (3, 0)]
    assert not priced(memory.spent(4))


def test_a_question_that_is_asked_again_is_charged_again_and_refused_over_budget():
    """By the same client in another process, too: what it keeps goes with it."""
    task, method = linear_task(), private(budget=cost(3) + 1e-9)
    asked = Letter(Train.kind, Envelope(bytes(8), 1, 2), pack(Train(task.initial)))
    frame, seen = b"", set()
    for _ in range(3):
        clients = Clients(method, task, bytes(8), fv.Seed.root(0))
        if frame:
            kept.unpack(frame, clients, 2)
        seen.add(clients.answer([asked])[0].frame)
        frame = kept.pack(clients, 2)
    assert len(seen) == 3  # each with noise of its own
    assert priced(clients.memory.spent(2)) == {STEPS: 3}
    with pytest.raises(fv.Refused, match=r"over budget: the answer would bring ε to .*, the budget is"):
        clients.answer([asked])
    assert priced(clients.memory.spent(2)) == {STEPS: 3}
    assert clients.answer([Letter(Train.kind, Envelope(bytes(8), 1, 1), asked.payload)])  # another has its own account


class Broken(fv.FedAvg):
    """Training fails, and its words quote records."""

    def correction(self, stack, question, w):  # called before the records are looked at
        SEEN.append(dict(priced(CLIENTS[0].memory.spent(stack.clients[0]))))
        raise RuntimeError(f"a record is {float(stack.task.x[0, 0])}")


SEEN: list[dict] = []
CLIENTS: list[Clients] = []


def test_an_answer_is_charged_before_records_are_looked_at_and_stays_charged_if_it_fails(caplog):
    """Once an answer was checked, then charged: one that was refused for its values cost nothing, again and again."""
    clients = Clients(Broken(LOCAL, privacy=fv.DpSgd(delta=1e-3)), linear_task(), bytes(8), fv.Seed.root(0))
    CLIENTS[:], SEEN[:] = [clients], []
    asked = Letter(Train.kind, Envelope(bytes(8), 1, 2), pack(Train(clients.task.initial)))
    for times in (1, 2):
        with pytest.raises(Unanswered) as caught:
            clients.answer([asked])
        assert Clients.problem(caught.value) == "failed: the client gives no answer; its own log says why"
        assert priced(clients.memory.spent(2)) == SEEN[-1] == {STEPS: times}
    assert "a record is" in caplog.text


def test_a_refusal_of_its_own_answer_tells_no_value(caplog):
    """FedLAP-DP with weights × 100 once answered "images reaches from -5657.06 to 7754.15", at no cost, without end."""

    class Wild(fv.FedAvg):
        def trained(self, stack, question, w, trained):
            return super().trained(stack, question, w, trained).map(lambda _, update: update + 1e7)

    method = Wild(LOCAL, privacy=fv.DpSgd(delta=1e-3, budget=cost(2) * 1.001))
    clients = Clients(method, linear_task(), bytes(8), fv.Seed.root(0))
    asked = Letter(Train.kind, Envelope(bytes(8), 1, 2), pack(Train(clients.task.initial)))
    for _ in range(2):
        with pytest.raises(Unanswered):
            clients.answer([asked])
    with pytest.raises(fv.Refused, match="over budget: the answer would bring"):
        clients.answer([asked])
    assert "update reaches from" in caplog.text


def test_without_privacy_a_simulation_tells_what_went_wrong():
    clients = Clients(Broken(LOCAL), linear_task(), bytes(8), fv.Seed.root(0))
    CLIENTS[:] = [clients]
    asked = Letter(Train.kind, Envelope(bytes(8), 1, 2), pack(Train(clients.task.initial)))
    with pytest.raises(RuntimeError, match="a record is"):
        clients.answer([asked])
    clients.discreet = True  # as a deployed one is
    with pytest.raises(Unanswered):
        clients.answer([asked])


def test_a_stack_that_is_halved_is_charged_once():
    """One delivery is one charge, however often its stack is cut down to the client that fails."""

    class Failing(fv.FedAvg):
        def correction(self, stack, question, w):
            if 2 in stack.clients:
                raise RuntimeError("out of luck")
            return super().correction(stack, question, w)

    task, method = linear_task(), Failing(LOCAL, privacy=fv.DpSgd(delta=1e-3))
    federation = fv.Federation(task, method, Engine(workers=1), fv.CohortSampler(size=4), fv.Seed.root(0))
    state = method.init_state(task)
    for times in (1, 2):
        state, row = federation.step(state, times, 9)
        assert list(row.missing) == ["2"]
        assert [priced(federation.clients.memory.spent(k)) for k in range(4)] == [{STEPS: times}] * 4


def test_answers_of_different_prices_and_runs_are_composed():
    memory, more = Memory(), fv.FedAvg(LOCAL, privacy=fv.DpSgd(noise=2.0, delta=1e-3)).client_cost(linear_task())
    price = private().client_cost(linear_task())
    memory.charge(0, b"one run.", price)
    memory.charge(0, b"another.", price)
    memory.charge(0, b"another.", more)
    spent = priced(memory.spent(0, price.unit))
    assert spent == {STEPS: 2, more.answer: 1}
    both = epsilon([Noised(1.0, 2 / 6, 6), Noised(2.0, 2 / 6, 3)], 1e-3)
    assert price.spent(spent) == more.spent(spent) == both > cost(2)
    assert not priced(memory.spent(0, "user_privacy, replacement")), "what protects clients is another promise"


# ---------------------------------------------------------------------------------------------------- the server


def test_a_tally_knows_the_client_that_has_lost_most():
    told = []
    tally = Tally(Account(STEPS, fv.DpSgd(delta=1e-3, budget=cost(2))), lambda *asked: told.append(asked))
    assert [tally.ask(cohort) for cohort in ([0, 1], [2], [0])] == [cost(1), cost(1), cost(2)]
    assert told == [([0, 1], STEPS), ([2], STEPS), ([0], STEPS)]
    assert tally.exhausted([0, 3])
    assert not tally.exhausted([1, 2, 3])
    assert not tally.exhausted([])


def test_where_everybody_is_charged_an_empty_round_is_one_too():
    tally = Tally(Account(STEPS, fv.DpSgd(delta=1e-3, budget=cost(2)), everyone=True))
    assert [tally.ask(cohort) for cohort in ([], [5])] == [cost(1), cost(2)]
    assert tally.exhausted([])


def test_the_ledgers_epsilon_never_goes_down():
    ledger = Ledger()
    for given in (None, 2.0, 1.0, None, 3.0):
        ledger.append(Row(round=1, cohort=[], epsilon=given))
    assert [row.epsilon for row in ledger.rows] == [None, 2.0, 2.0, 2.0, 3.0]


def test_a_run_ends_before_a_round_that_would_exceed_the_budget():
    result = fv.run(linear_task(), private(budget=cost(2) * 1.001), rounds=9, cohort=4)
    assert result.stopped == "budget"
    assert [row.epsilon for row in result.ledger.rows] == [cost(1), cost(2)]
    assert not any(row.missing for row in result.ledger.rows)
    assert fv.run(linear_task(), private(), rounds=2, cohort=4).stopped == "rounds"
    assert fv.run(linear_task(), private(), rounds=2, cohort=4, stop=lambda: True).stopped == "interrupt"


def test_a_budget_that_allows_nothing_is_a_mistake_in_the_recipe():
    with pytest.raises(ValueError, match=r"privacy.budget is 0.1, but one answer already costs \d+"):
        fv.run(linear_task(), private(budget=0.1), rounds=1)


@pytest.mark.parametrize("folder", [True, False])
def test_a_round_is_charged_that_nobody_answered_or_that_a_kill_cut_off(tmp_path, folder):
    def lose(round_, replies):
        if round_ == 3 and folder:
            raise KeyboardInterrupt  # the answers were on their way
        return replies if round_ > 1 else []

    where = {"folder": tmp_path} if folder else {}
    quorum = fv.CohortSampler(size=4, quorum=4)
    if folder:
        with pytest.raises(KeyboardInterrupt):
            fv.run(linear_task(), private(), rounds=3, cohort=quorum, engine=Tamper(lose), **where)
        result = fv.run(linear_task(), private(), rounds=4, cohort=quorum, **where)
        assert [row.epsilon for row in result.ledger.rows] == [cost(1), cost(2), cost(4), cost(5)]
    else:
        result = fv.run(linear_task(), private(), rounds=2, cohort=quorum, engine=Tamper(lose))
        assert [row.epsilon for row in result.ledger.rows] == [cost(1), cost(2)]
    assert result.ledger.rows[0].events


def test_a_resumed_run_stops_where_a_whole_one_does(tmp_path):
    method = private(budget=cost(3) * 1.001)
    for rounds, done in ((2, 2), (9, 3), (9, 3)):
        result = fv.run(linear_task(), method, rounds=rounds, cohort=4, folder=tmp_path)
        assert len(result.ledger.rows) == done
    assert result.stopped == "budget"


def test_a_folder_that_lost_who_was_asked_is_not_continued(tmp_path):
    fv.run(linear_task(), private(), rounds=2, cohort=4, folder=tmp_path)
    line = (tmp_path / "asked.jsonl").read_bytes().splitlines(keepends=True)[0]
    for damage in (line, line + b"{}\n", line + b'{"cohort":[0],"price":["free"]}\n', b"[0,1,2,3]\n" * 2, b""):
        (tmp_path / "asked.jsonl").write_bytes(damage)
        with pytest.raises(RunError, match="does not tell who was asked in 2 rounds"):
            fv.run(linear_task(), private(), rounds=3, cohort=4, folder=tmp_path)


def test_what_was_asked_is_on_the_disk_before_it_is_asked(tmp_path):
    seen = []

    class Looking(Engine):
        def deliver(self, letters, deadline):
            seen.append((tmp_path / "asked.jsonl").read_text())
            return super().deliver(letters, deadline)

    fv.run(linear_task(), private(), rounds=2, cohort=4, engine=Looking(), folder=RunFolder(tmp_path))
    assert seen == [ASKED, ASKED * 2]


def test_a_line_that_a_kill_cut_off_is_not_ended_by_the_next(tmp_path):
    fv.run(linear_task(), private(), rounds=1, cohort=4, folder=tmp_path)
    with open(tmp_path / "asked.jsonl", "ab") as file:
        file.write(b"[0,1")
    for rounds in (2, 3):
        result = fv.run(linear_task(), private(), rounds=rounds, cohort=4, folder=tmp_path)
    assert (tmp_path / "asked.jsonl").read_text() == ASKED * 3
    whole = fv.run(linear_task(), private(), rounds=3, cohort=4)
    assert [row.epsilon for row in result.ledger.rows] == [row.epsilon for row in whole.ledger.rows]


def test_a_method_that_promises_nothing_is_not_charged(tmp_path):
    result = fv.run(linear_task(), fv.FedAvg(LOCAL), rounds=2, cohort=4, folder=tmp_path)
    assert [row.epsilon for row in result.ledger.rows] == [None, None]
    assert not (tmp_path / "asked.jsonl").exists()


# ---------------------------------------------------------------------------------------------------- deployed clients


def deployed(folder, task, method, run: bytes):
    """A function that asks client 2, which keeps its files in `folder`, to train in a round of this run."""
    pytest.importorskip("flwr")
    from engines.grids import Nodes, made
    from fedveil.engines.flower import Flower, client_app

    grid = Nodes(client_app(made(task, method), lambda context: folder), [2])
    engine = Flower(grid, 600.0, nodes=1, poll=0.001, tell=lambda said: None)
    engine.open(Clients(method, task, run, fv.Seed.root(0)))

    def ask(round_: int) -> str:
        (reply,) = engine.deliver([Letter(Train.kind, Envelope(run, round_, 2), pack(Train(task.initial)))], None)
        return reply.problem

    return ask


def test_a_budget_is_that_of_the_client_and_not_of_a_run(tmp_path):
    """A run is 8 bytes that the server chooses: once, others gave as many answers again."""
    task, method = linear_task(), private(budget=cost(3) * 1.001)
    told = [deployed(tmp_path, task, method, bytes([k]) * 8)(1) for k in range(20)]
    assert told[:3] == [""] * 3
    assert all(why.startswith("refused: over budget: the answer would bring ε to") for why in told[3:])


def test_a_deployed_clients_charge_is_on_its_disk_before_it_looks_at_records(tmp_path):
    class Looking(fv.FedAvg):
        def correction(self, stack, question, w):
            found.append((tmp_path / "account-2.fv").read_bytes())
            raise MemoryError("killed")

    found: list[bytes] = []
    task, method = linear_task(), Looking(LOCAL, privacy=fv.DpSgd(delta=1e-3, budget=cost(2) * 1.001))
    ask = deployed(tmp_path, task, method, bytes(8))
    assert ask(1) == ask(2) == "failed: the client gives no answer; its own log says why"
    assert len(set(found)) == 2
    assert ask(3).startswith("refused: over budget")


def test_a_clients_files_are_its_own(tmp_path):
    deployed(tmp_path / "home", linear_task(), private(), bytes(8))(1)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "home").iterdir()}
    assert set(modes) == {"account-2.fv", "0000000000000000-2.fv", "lock-2"}
    assert set(modes.values()) == {0o600}
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700


def test_two_processes_of_one_client_do_not_count_one_answer(tmp_path):
    """Each loads the account, answers and saves it under a lock."""
    task, method = linear_task(), private()
    with ThreadPoolExecutor(4) as pool:
        homes = [Clients(method, task, bytes([k]) * 8, fv.Seed.root(0)) for k in range(12)]

        def answer(here: Clients) -> None:
            with kept.Home(tmp_path, 2) as home:
                home.load(here, bytes(32))
                here.persist = lambda: home.save_account(here)
                here.answer([Letter(Train.kind, Envelope(here.run, 1, 2), pack(Train(task.initial)))])
                home.save(here, bytes(32))

        list(pool.map(answer, homes))
    last = Clients(method, task, bytes(8), fv.Seed.root(0))
    with kept.Home(tmp_path, 2) as home:
        home.load(last, bytes(32))
    assert priced(last.memory.spent(2)) == {STEPS: 12}


def test_a_damaged_account_is_refused_and_not_begun_anew(tmp_path):
    ask = deployed(tmp_path, linear_task(), private(), bytes(8))
    assert ask(1) == ""
    path = tmp_path / "account-2.fv"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert "refused: lost state: the client's memory file is damaged" in ask(2)


def test_a_folder_with_hidden_cohorts_is_its_owners(tmp_path):
    users = fv.UserLevel(noise=1.0, delta=1e-2, relation="zero-out")
    for name, plan in (("hidden", fv.CohortSampler(size=2, kind="poisson")), ("public", fv.CohortSampler(size=2))):
        fv.run(linear_task(), fv.FedAvg(LOCAL, user_privacy=users), rounds=1, cohort=plan, folder=tmp_path / name)
    assert (tmp_path / "hidden").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "public").stat().st_mode & 0o077


def test_a_server_that_goes_back_to_an_older_checkpoint_says_so_and_is_caught_up(tmp_path):
    """Clients that have seen a round before refuse it; once the run then ended for want of answers."""
    pytest.importorskip("flwr")
    from engines.grids import Nodes, made
    from fedveil.engines.flower import Flower, client_app

    task, method = linear_task(), private()
    grid = Nodes(client_app(made(task, method), lambda context: tmp_path / str(context.node_id)), range(4))

    def run(rounds):
        engine = Flower(grid, 600.0, poll=0.001, tell=lambda said: None)
        return fv.run(task, method, rounds=rounds, cohort=4, engine=engine, folder=tmp_path / "run", patience=1)

    run(4)
    newest = tmp_path / "run" / "checkpoint-00000004.fv"
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    for k, context in enumerate(sorted(grid.contexts.values(), key=lambda each: each.node_config["partition-id"])):
        (path,) = (tmp_path / str(context.node_id)).glob(f"????????????????-{k}.fv")
        here = Clients(method, task, bytes.fromhex(path.name.split("-")[0]), fv.Seed.root(0))
        kept.unpack(kept.load(path), here, k)
        here.round = 5  # it was asked in a round that the server does not remember
        kept.save(path, kept.pack(here, k))
    rows = run(6).ledger.rows
    assert "cannot be read: the run goes on from the checkpoint of round 3" in rows[3].events[1]
    assert rows[3].events[2] == "clients have seen round 4 before; the run goes on with the next one"
    assert all(why.startswith("refused: wrong round: round 4 is over") for why in rows[3].missing.values())
    assert not rows[4].missing
    assert not rows[5].missing
