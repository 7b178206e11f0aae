"""A server that lies and clients that cheat: whatever would give a client's vector away, the client refuses."""

import secrets
from dataclasses import replace as renewed

import pytest
import torch
from msgspec.structs import replace

import fedveil as fv
from fedveil.core import message
from fedveil.core.clients import Clients
from fedveil.core.identity import Identities, simulated
from fedveil.core.message import Refused
from fedveil.privacy import SecureSum
from fedveil.privacy.secagg import masks
from fedveil.privacy.secagg.context import Context
from fedveil.privacy.secagg.records import (
    SEALED,
    Advertise,
    Advertised,
    Agree,
    Agreed,
    Deal,
    Dealt,
    Mask,
    Masked,
    Share,
    Shared,
    Unmask,
    Unmasked,
    tensor,
)
from fedveil.privacy.secagg.server import ask_sum
from privacy.secagg.sums import LAST, Give, Only, Summed, Transport, expected, letter, unpacked
from toys import linear_task

N = 6
TASK = linear_task(10, 60, uneven=True)
VICTIM = 2
WHO = simulated(fv.Seed.root(0))  # what the clients of a simulation with seed 0 sign with
MALICIOUS = SecureSum(server="malicious")


def run(engine: Transport, how: SecureSum | None = None) -> fv.core.ledger.Row:
    LAST.clear()
    method = Summed(SecureSum() if how is None else how)
    result = fv.run(TASK, method, rounds=1, cohort=Only(size=N), engine=engine)
    if not LAST:
        assert torch.equal(result.weights, TASK.initial)
    return result.ledger.rows[0]


def lying(kind: type, **changes):
    """A server that asks the victim something else: each change is a function of the true question."""

    def ask(client, question):
        if client != VICTIM or not isinstance(question, kind):
            return question
        return replace(question, **{name: change(question) for name, change in changes.items()})

    return ask


def said(row: fv.core.ledger.Row) -> str:
    """Why the victim did not answer, wherever the ledger says it."""
    found = [row.missing.get(str(VICTIM), ""), *(e for e in row.events if e.startswith(f"client {VICTIM}:"))]
    assert [bool(each) for each in found].count(True) == 1, (row.missing, row.events)
    return next(filter(None, found))


def without(ids, *gone):
    return [k for k in ids if k not in gone]


def other_row(field: str, row: int, data: bytes):
    """The true tensor of a question with one row replaced."""

    def change(question):
        changed = getattr(question, field).clone()
        changed[row] = tensor(data)
        return changed

    return change


# ---------------------------------------------------------------------------------------------------- sets

SETS = {
    # the sets to be unmasked
    "a client both alive and dead": (Unmask, {"gone": lambda q: [4]}, "named as left and as gone"),
    "the victim itself dead": (
        Unmask,
        {"alive": lambda q: without(q.alive, VICTIM), "gone": lambda q: [VICTIM]},
        "is not",
    ),
    "nobody alive": (Unmask, {"alive": lambda q: [], "gone": lambda q: q.alive}, "this client is not"),
    "fewer alive than the threshold": (
        Unmask,
        {"alive": lambda q: [0, 1, 2], "gone": lambda q: [3, 4, 5]},
        "3 clients are left, 4 are",
    ),
    "somebody never seen, alive": (Unmask, {"alive": lambda q: [*q.alive, 9]}, "not among who shared"),
    "somebody never seen, dead": (Unmask, {"gone": lambda q: [9]}, "are not those who shared"),
    "somebody left out": (Unmask, {"alive": lambda q: without(q.alive, 4)}, "are not those who shared"),
    "somebody alive twice": (Unmask, {"alive": lambda q: [*q.alive, 5]}, "each once"),
    "somebody dead twice": (Unmask, {"alive": lambda q: without(q.alive, 5), "gone": lambda q: [5, 5]}, "or twice"),
    # who shared
    "fewer dealers than the threshold": (Mask, {"ids": lambda q: [0, 1, 2]}, "3 clients shared, 4 are needed"),
    "a dealer never seen": (Mask, {"ids": lambda q: [*q.ids, 9]}, "not among who shared"),
    "a dealer twice": (Mask, {"ids": lambda q: [*q.ids, 5]}, "each once"),
    "dealt without the victim": (Mask, {"ids": lambda q: without(q.ids, VICTIM)}, "this client is not"),
    "a sharer never seen": (Deal, {"ids": lambda q: [*q.ids, 9]}, "not among who advertised"),
    "a sharer twice": (Deal, {"ids": lambda q: [*q.ids, 5]}, "each once"),
    "shared without the victim": (Deal, {"ids": lambda q: without(q.ids, VICTIM)}, "this client is not"),
    "more shares than neighbours": (Unmask, {"holders": lambda q: q.holders + 1}, "7 shares are asked for, of 6"),
    # who advertised
    "a threshold below the majority": (Share, {"quorum": lambda q: 3}, "3 of 6 clients are to be enough"),
    "a threshold above everybody": (Share, {"quorum": lambda q: 7}, "7 of 6 clients"),
    "a threshold of one": (Share, {"quorum": lambda q: 1}, "protects too little"),
    "two clients": (Share, {"ids": lambda q: [VICTIM, 3], "quorum": lambda q: 2}, "2 of 2 clients"),
    "clients out of order": (Share, {"ids": lambda q: q.ids[::-1]}, "in ascending order"),
    "a client twice": (Share, {"ids": lambda q: [*q.ids, 5]}, "once each"),
    "without the victim": (Share, {"ids": lambda q: [0, 1, 3, 4, 5, 9]}, "is not listed"),
    "a client without keys": (Share, {"ids": lambda q: [*q.ids, 9]}, "6 keys came for 7 clients"),
}


@pytest.mark.parametrize("name", SETS)
def test_a_client_refuses_sets_that_would_give_it_away(name):
    kind, changes, why = SETS[name]
    row = run(Transport(ask=lying(kind, **changes)))
    assert "refused: bad set: " in said(row)
    assert why in said(row)
    total, _ = expected(TASK, LAST[0].clients, SecureSum(), N)
    assert torch.equal(LAST[0].totals["update"], total), "the others are summed all the same"


def test_a_client_is_asked_to_unmask_once_a_round():
    """A second time with the other sets would give both secrets of a client away."""
    engine = Transport()
    run(engine)
    asked = next(x for x in engine.letters if x.kind == Unmask.kind and x.client == VICTIM)
    assert "refused: wrong stage: client 2 is at 'unmask', the question follows 'masked'" in engine.again(asked).problem
    swapped = replace(unpacked(asked), alive=[0, 1, 2, 3], gone=[4, 5])
    for question in (swapped, replace(swapped, alive=[1, 2, 3, 4, 5], gone=[0])):
        assert "wrong stage" in engine.again(renewed(asked, contents=message.pack(question))).problem
    for kind in (Advertise, Share, Deal, Mask):
        asked = next(x for x in engine.letters if x.kind == kind.kind and x.client == VICTIM)
        assert "refused: wrong stage" in engine.again(asked).problem


def test_a_refused_unmask_reveals_nothing_and_leaves_the_right_one_to_be_answered():
    hidden = {}

    class Trying(Transport):
        def deliver(self, letters, deadline):
            if letters[0].kind == Unmask.kind:
                mine = next(x for x in letters if x.client == VICTIM)
                for question in (
                    replace(unpacked(mine), gone=[4]),
                    replace(unpacked(mine), alive=[0, 1, 2], gone=[3, 4, 5]),
                ):
                    hidden[len(hidden)] = self.again(renewed(mine, contents=message.pack(question)))
            return super().deliver(letters, deadline)

    row = run(Trying())
    assert all(reply.frame == b"" and "bad set" in reply.problem for reply in hidden.values())
    assert not row.missing
    assert not row.events


@pytest.mark.parametrize("kind", [Share, Deal, Mask, Unmask])
def test_stages_are_answered_in_order(kind):
    engine = Transport()
    run(engine)
    asked = next(x for x in engine.letters if x.kind == kind.kind and x.client == VICTIM)
    clients = Clients(Summed(), TASK, asked.envelope.run, fv.Seed.root(0))
    with pytest.raises(Refused, match="lost state"):
        clients.answer([asked])
    clients.answer([letter(Advertise(), VICTIM, asked.envelope.run)])
    with pytest.raises(Refused, match="bad key" if kind is Share else "wrong stage: client 2 is at 'keys'"):
        clients.answer([asked])


def test_a_client_never_reveals_both_secrets_of_anybody():
    """Whatever sets the server tries, one after another, a client answers once: a share of one secret a neighbour."""
    engine = Transport()
    run(engine)
    shared, revealed = engine.heard(Shared), engine.heard(Unmasked)
    context = Context.of(engine.letters[0].envelope.run, 1, range(N), 4)
    for holder, answer in revealed.items():
        for dealer, share in enumerate(answer.shares):
            marks = shared[dealer].marks[holder].numpy().tobytes()
            found = context.mark(share.numpy().tobytes(), dealer, holder)
            assert found == marks[:16]
            assert found != marks[16:]


# ---------------------------------------------------------------------------------------------------- keys


def signed(client: int, channel: bytes, mask: bytes, run_: bytes, round_: int = 1) -> bytes:
    return WHO.sign(client, Context(run_, round_).signed_keys(client, channel, mask))


def test_swapped_keys_are_refused():
    server = secrets.token_bytes(32)
    ask = lying(Share, mask=other_row("mask", 4, masks.public_key(server)))
    assert "refused: bad signature: client 4 did not sign this" in said(run(Transport(ask=ask)))
    ask = lying(Share, channel=lambda q: q.channel[[0, 1, 2, 3, 5, 4]], mask=lambda q: q.mask[[0, 1, 2, 3, 5, 4]])
    assert "refused: bad signature: client 4 did not sign this" in said(run(Transport(ask=ask)))
    ask = lying(Share, channel=lambda q: q.mask, mask=lambda q: q.channel)
    assert "refused: bad signature" in said(run(Transport(ask=ask)))


@pytest.mark.parametrize("part", ["run", "round"])
def test_keys_of_another_run_or_round_are_refused(part):
    channel, mask = (masks.public_key(secrets.token_bytes(32)) for _ in range(2))

    def ask(client, question):
        if client != VICTIM or not isinstance(question, Share):
            return question
        where = (engine.letters[0].envelope.run, 2) if part == "round" else (b"another!", 1)
        changed = {"channel": channel, "mask": mask, "signatures": signed(4, channel, mask, *where)}
        return replace(question, **{name: other_row(name, 4, data)(question) for name, data in changed.items()})

    engine = Transport(ask=ask)
    assert "refused: bad signature: client 4 did not sign this" in said(run(engine))


def test_keys_that_the_client_made_earlier_in_the_round_are_refused():
    """Signed by itself and yet not those whose secrets it now holds."""

    class Replaying(Transport):
        def deliver(self, letters, deadline):
            if letters[0].kind == Advertise.kind:
                frame = self.again(letters[VICTIM]).frame
                old, _ = message.unframe(frame, message.KINDS, len(frame))
                new = {"channel": old.channel, "mask": old.mask, "signatures": old.signature}
                changes = {k: other_row(k, VICTIM, v.numpy().tobytes()) for k, v in new.items()}
                self.ask = lying(Share, **changes)
            return super().deliver(letters, deadline)

    assert "refused: bad key: the keys listed for client 2 are not those it made" in said(run(Replaying()))


@pytest.mark.parametrize("cheat", ["low order", "reused", "its own twice"])
def test_a_client_with_a_bad_key_is_left_out_by_the_server_and_refused_by_clients(cheat):
    true: dict[int, Advertised] = {}

    def bad(client, answer):
        if not isinstance(answer, Advertised):
            return answer
        true[client] = answer
        if client != 4:
            return answer
        channel, mask = answer.channel.numpy().tobytes(), bytes(32)
        if cheat != "low order":
            mask = channel if cheat == "its own twice" else true[1].mask.numpy().tobytes()
        run_ = engine._clients.run
        return Advertised(tensor(channel), tensor(mask), tensor(signed(4, channel, mask, run_)))

    engine = Transport(answer=bad)
    row = run(engine)
    because = {"low order": "low order", "reused": "client 1 has the same", "its own twice": "client 4 has the same"}
    assert row.missing["4"].startswith("refused: bad key: ")
    assert because[cheat] in row.missing["4"]
    assert row.secure[1].asked == 5, "nobody else was told its keys"
    assert LAST[0].clients == (0, 1, 2, 3, 5)

    def pass_on(client, question):  # a server that does not look
        if client != VICTIM or not isinstance(question, Share):
            return question
        made = bad(4, Advertised(question.channel[4], question.mask[4], tensor(bytes(64))))
        changes = {"channel": made.channel, "mask": made.mask, "signatures": made.signature}
        return replace(question, **{k: other_row(k, 4, v.numpy().tobytes())(question) for k, v in changes.items()})

    engine = Transport(ask=pass_on, answer=lambda client, answer: true.update({client: answer}) or answer)
    row = run(engine)
    assert said(row).startswith("refused: bad key: ")
    assert row.secure[1].answered == 5, "the victim gave nothing"


def test_a_client_that_signs_with_anothers_identity_is_left_out():
    def forged(client, answer):
        if client != 4 or not isinstance(answer, Advertised):
            return answer
        keys = [part.numpy().tobytes() for part in (answer.channel, answer.mask)]
        data = Context(engine._clients.run, 1).signed_keys(4, *keys)
        return replace(answer, signature=tensor(WHO.sign(5, data)))

    engine = Transport(answer=forged)
    row = run(engine)
    assert row.missing == {"4": "refused: bad signature: client 4 did not sign this"}
    assert LAST[0].clients == (0, 1, 2, 3, 5)


def test_whose_public_key_is_not_known_is_refused():
    known = Identities({1: b"1" * 32}, {1: bytes(32)})
    with pytest.raises(Refused, match="bad signature: no public key of client 2 is known here"):
        known.verify(2, bytes(64), b"")
    with pytest.raises(Refused, match="bad signature: the private key of client 2 is not here"):
        known.sign(2, b"")
    with pytest.raises(Refused, match="did not sign"):
        known.verify(1, known.sign(1, b""), b"")


# ---------------------------------------------------------------------------------------------------- shares


@pytest.mark.parametrize("forgery", ["a bit flipped", "another's", "random", "other marks"])
def test_a_client_complains_of_a_forged_share_and_goes_on(forgery):
    def change(question):
        changed = question.sealed.clone()
        if forgery == "a bit flipped":
            changed[0, 40] ^= 1
        elif forgery == "another's":
            changed[0] = changed[1]
        elif forgery == "random":
            changed[0] = tensor(secrets.token_bytes(SEALED))
        return changed

    def marks(question):
        return question.marks.flip(0) if forgery == "other marks" else question.marks

    engine = Transport(ask=lying(Deal, sealed=change, marks=marks))
    row = run(engine)
    accused = [0, 1, 4, 5] if forgery == "other marks" else [0]  # flipped, the one in the middle stays
    assert engine.heard(Dealt)[VICTIM].complaints == accused
    assert not row.missing, "nobody is blamed on one word"
    assert f"client 0 dealt shares that cannot be opened, or so say clients {VICTIM}" in row.events
    assert torch.equal(LAST[0].totals["update"], expected(TASK, range(N), SecureSum(), N)[0])


def test_sealed_shares_too_few_are_refused():
    row = run(Transport(ask=lying(Deal, sealed=lambda q: q.sealed[:-1], marks=lambda q: q.marks[:-1])))
    assert "refused: bad share: 4 sealed shares came from 5 neighbours" in said(row)
    assert LAST[0].clients == (0, 1, 3, 4, 5)


def dealing(garbled):
    """A dealer, client 4, whose sealed shares for some clients cannot be opened."""

    def answer(client, answer):
        if client != 4 or not isinstance(answer, Shared):
            return answer
        sealed, others = answer.sealed.clone(), without(range(N), 4)
        for holder in garbled:
            sealed[others.index(holder)] = tensor(secrets.token_bytes(SEALED))
        return replace(answer, sealed=sealed)

    return answer


@pytest.mark.parametrize("garbled", [(0, 1, 2), (0, 1, 2, 3, 5)])
def test_a_dealer_of_garbage_is_left_out_before_anybody_masks_and_its_victims_are_not_blamed(garbled):
    """4 of 6 shares recover a secret; with three that cannot be opened it would be lost, and the sum with it."""
    row = run(Transport(answer=dealing(garbled)))
    told = f"{len(garbled)} of 5 neighbours say that they cannot open what it dealt"
    assert row.missing == {"4": f"refused: bad share: {told}"}
    assert LAST[0].clients == (0, 1, 2, 3, 5)
    assert torch.equal(LAST[0].totals["update"], expected(TASK, LAST[0].clients, SecureSum(), N)[0])


def test_few_complaints_exclude_nobody_neither_the_dealer_nor_who_complains():
    row = run(Transport(answer=dealing((0, 3))))
    assert not row.missing
    assert row.events == ["client 4 dealt shares that cannot be opened, or so say clients 0, 3"]
    assert LAST[0].clients == tuple(range(N))
    assert torch.equal(LAST[0].totals["update"], expected(TASK, range(N), SecureSum(), N)[0])


def test_who_complains_of_everybody_costs_nobody_anything():
    def answer(client, answer):
        return Dealt(without(range(12), VICTIM)) if client == VICTIM and isinstance(answer, Dealt) else answer

    row = run(Transport(answer=answer))
    assert not row.missing
    assert torch.equal(LAST[0].totals["update"], expected(TASK, range(N), SecureSum(), N)[0])


def test_a_client_that_reveals_a_forged_share_is_left_out_and_the_sum_stays_exact():
    def forged(client, answer):
        if client != VICTIM or not isinstance(answer, Unmasked):
            return answer
        return Unmasked(answer.shares ^ torch.tensor([[0]] * 4 + [[1]] + [[0]], dtype=torch.uint8))

    row = run(Transport(answer=forged))
    assert "refused: bad share: it is not what client 4 dealt to it" in said(row)
    assert torch.equal(LAST[0].totals["update"], expected(TASK, range(N), SecureSum(), N)[0])


@pytest.mark.filterwarnings("ignore:no client answered in round", "ignore:nothing was learned")
def test_a_client_that_deals_shares_of_no_secret_ends_the_sum_by_name(monkeypatch):
    from fedveil.privacy.secagg import shamir

    true, calls = shamir.share, iter(range(100))

    def dealt(secret, t, points):
        return true(secrets.token_bytes(32), t, points) if next(calls) == 6 else true(secret, t, points)

    monkeypatch.setattr("fedveil.privacy.secagg.party.shamir.share", dealt)
    row = run(Transport())
    assert not LAST
    assert "the secure sum cannot be unmasked: client 3 dealt shares of no secret of its own" in row.events[0]


# ---------------------------------------------------------------------------------------------------- agreement


@pytest.mark.filterwarnings("ignore:no client answered in round", "ignore:nothing was learned")
def test_with_the_signed_check_everybody_must_have_been_told_the_same():
    """To whom a client is dead and to whom alive must not differ, or both its secrets come out."""

    def ask(client, question):
        if isinstance(question, Agree | Unmask) and client % 2:
            changed = replace(question, alive=without(question.alive, 4))
            return replace(changed, gone=[4]) if isinstance(question, Unmask) else changed
        return question

    row = run(Transport(ask=ask), MALICIOUS)
    assert not LAST
    assert row.secure[-1].stage == "unmask"
    assert row.secure[-1].answered == 0
    assert len(row.missing) == N
    assert all(why.startswith(("refused: bad signature", "refused: bad set")) for why in row.missing.values())


@pytest.mark.filterwarnings("ignore:no client answered in round", "ignore:nothing was learned")
def test_without_it_a_server_that_tells_clients_different_things_still_gets_neither_secret():
    """Each half of the clients is fewer than the threshold, which is why that is a majority."""

    def ask(client, question):
        if isinstance(question, Unmask) and client % 2:
            return replace(question, alive=without(question.alive, 4), gone=[4])
        return question

    engine = Transport(ask=ask)
    row = run(engine)
    assert row.secure[-1].answered == N
    shared, revealed = engine.heard(Shared)[4], engine.heard(Unmasked)
    context = Context.of(engine.letters[0].envelope.run, 1, range(N), 4)
    marks = [context.mark(revealed[k].shares[4].numpy().tobytes(), 4, k) for k in range(N)]
    known = [row.numpy().tobytes() for row in shared.marks]
    assert sum(mark == own[:16] for mark, own in zip(marks, known, strict=True)) == 3
    assert sum(mark == own[16:] for mark, own in zip(marks, known, strict=True)) == 3
    assert SecureSum().quorum(N) == 4
    assert not LAST


UNMASKS = {
    "another set than it signed": (
        {"alive": lambda q: without(q.alive, 4), "gone": lambda q: [4]},
        "bad set: who is left is not what this client",
    ),
    "no signatures": ({"signers": lambda q: [], "signatures": lambda q: None}, "bad set: signatures are missing"),
    "too few signatures": (
        {"signers": lambda q: q.signers[:4], "signatures": lambda q: q.signatures[:4]},
        "4 clients signed who is left, 5 are needed",
    ),
    "one signature many times": (
        {"signers": lambda q: [0] * 6, "signatures": lambda q: q.signatures[[0] * 6]},
        "each once",
    ),
    "signatures of others": (
        {"signatures": lambda q: q.signatures[[1, 0, 2, 3, 4, 5]]},
        "bad signature: client 0 did not sign",
    ),
    "a signer who is not left": ({"signers": lambda q: [*q.signers[:-1], 9]}, "not of clients who are left"),
    "a forged signature": (
        {"signatures": other_row("signatures", 5, bytes(64))},
        "bad signature: client 5 did not sign",
    ),
}


@pytest.mark.parametrize("name", UNMASKS)
def test_a_client_refuses_to_unmask_without_the_agreement_of_the_others(name):
    changes, why = UNMASKS[name]
    row = run(Transport(ask=lying(Unmask, **changes)), MALICIOUS)
    assert why in said(row)
    assert LAST[0].clients == tuple(range(N))


def test_a_signature_of_another_try_in_the_same_round_is_refused():
    """What was agreed about other keys says nothing about these."""
    kept: list[torch.Tensor] = []

    class Twice(Summed):
        def round(self, state, cohort):
            engine = cohort._shared.engine
            engine.drop = {Unmask: range(N)}
            with pytest.raises(fv.core.cohort.BelowQuorum):
                ask_sum(cohort, Give(state.weights), self.secure)
            engine.drop = {}
            kept.append(engine.heard(Agreed)[4].signature)
            engine.ask = lying(Unmask, signatures=other_row("signatures", 4, kept[0].numpy().tobytes()))
            return super().round(state, cohort)

    LAST.clear()
    result = fv.run(TASK, Twice(MALICIOUS), rounds=1, cohort=Only(size=N), engine=Transport())
    assert "bad signature: client 4 did not sign" in said(result.ledger.rows[0])


@pytest.mark.parametrize("kind", [Agree])
def test_a_client_signs_once(kind):
    engine = Transport()
    run(engine, MALICIOUS)
    assert engine.heard(Agreed)
    asked = next(x for x in engine.letters if x.kind == Agree.kind and x.client == VICTIM)
    assert "refused: wrong stage" in engine.again(asked).problem


# ---------------------------------------------------------------------------------------------------- the vector


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"asked": lambda q: 4}, "wrong kind: answers to questions of kind 4 are not summed"),
        ({"elements": lambda q: q.elements + 1}, "wrong shape: 11 elements were asked for, there are 10"),
        ({"wide": lambda q: True}, "wrong shape"),
        ({"question": lambda q: q.question[:-8]}, "truncated"),
        ({"question": lambda q: tensor(message.pack(Give(torch.full((8,), float("nan")))))}, "not finite"),
        ({"question": lambda q: tensor(message.pack(Give(torch.zeros(9))))}, "wrong shape"),
    ],
)
def test_a_hostile_question_within_the_sum_is_refused_by_name(changes, why):
    row = run(Transport(ask=lying(Mask, **changes)))
    assert said(row).startswith(f"refused: {why}")
    assert LAST[0].clients == (0, 1, 3, 4, 5)


@pytest.mark.parametrize(
    ("vector", "why"),
    [
        (torch.zeros(9, dtype=torch.int32), "wrong shape"),
        (torch.zeros(10, dtype=torch.int64), "wrong dtype"),
        (torch.zeros(10), "wrong dtype"),
        (torch.zeros(1, 10, dtype=torch.int32), "wrong shape"),
    ],
)
def test_a_hostile_vector_is_refused_by_name_and_the_sum_is_of_the_others(vector, why):
    row = run(Transport(answer=lambda k, a: replace(a, vector=vector) if k == VICTIM and isinstance(a, Masked) else a))
    assert said(row).startswith(f"refused: {why}")
    assert torch.equal(LAST[0].totals["update"], expected(TASK, (0, 1, 3, 4, 5), SecureSum(), N)[0])


class Bad(Summed):
    """A client whose training went wrong."""

    def give(self, stack, question):
        answers = super().give(stack, question)
        spoiled = {"nan": {"update": torch.full((8,), float("nan"))}, "weight": {"records": 10**6}}[self.fault]
        return [replace(a, **spoiled) if k == VICTIM else a for k, a in zip(stack.clients, answers, strict=True)]


@pytest.mark.parametrize(("fault", "why"), [("nan", "not finite"), ("weight", "out of range: the weight is 1000000")])
def test_a_client_whose_vector_is_no_number_or_weight_too_large_masks_zeros(fault, why, caplog):
    """To refuse would tell the server; what it tells whoever runs the client is in the client's log."""
    method = type("Faulty", (Bad,), {"fault": fault, "__annotations__": {}})()
    LAST.clear()
    result = fv.run(TASK, method, rounds=1, cohort=Only(size=N), engine=Transport())
    (row,) = result.ledger.rows
    assert not row.missing
    assert not row.events
    assert LAST[0].clients == tuple(range(N))
    assert LAST[0].weight == sum(TASK.clients.sizes[:N])
    assert torch.equal(LAST[0].totals["update"], expected(TASK, (0, 1, 3, 4, 5), SecureSum(), N)[0])
    (record,) = caplog.records
    assert record.message.startswith(f"client 2 masks zeros in round 1: Refused: {why}")
