"""What an adversary gets: messages and public things, and of records and the server's state no more than its role."""

import gc
import types

import pytest
import torch

import fedveil as fv
from attack_tools import FULL, attacked, run, seen_in
from codec_tools import image_task
from fedveil.attacks.seen import public, view
from toys import linear_task


def test_a_task_that_is_shown_has_nobodys_records():
    task = image_task()
    shown = public(task)
    for x, y in ((shown.x, shown.y), (shown.data.x, shown.data.y)):
        assert x.shape == (1, 1, 4, 4)
        assert not x.any()
        assert not y.any()
    assert shown.data.groups is None
    assert shown.validation is None
    assert (shown.clients.order == 0).all()
    assert (shown.clients.sizes == 1).all()
    assert shown.largest == task.largest
    assert shown.sizes == task.sizes
    assert torch.equal(shown.test_x, task.test_x)
    assert len(task.x) == 60
    w, x, y = task.initial[None], task.test_x[None, :5], task.test_y[None, :5]
    ones = torch.ones(1, 5)
    assert torch.equal(shown.fast_gradient(w, x, y, ones)[0], task.fast_gradient(w, x, y, ones)[0])


def test_nothing_that_is_shown_leads_to_records_or_to_who_has_them(tmp_path):
    """Follow every reference from what an adversary gets, after a run has filled all caches of the task."""
    task = image_task()
    seen, _ = attacked(tmp_path, task, fv.FedAvg(FULL), keep="2")
    hidden = {id(each) for each in (task, task.x, task.y, task.data, task.data.x, task.data.y, task.clients)}
    hidden |= {id(task.clients.order), id(task.clients.starts)}
    left, met = [seen], set()
    while left:
        each = left.pop()
        if id(each) in met or isinstance(each, (type, types.ModuleType, types.FunctionType)):
            continue
        met.add(id(each))
        assert id(each) not in hidden, type(each)
        left += gc.get_referents(each)
    assert id(task.test_x) in met, "the walk comes through"


def test_the_server_has_all_messages_and_its_state(tmp_path):
    task, method = linear_task(), fv.FedAvg(FULL, server=fv.ServerOptimizer("adam", 0.01))
    seen, _ = attacked(tmp_path, task, method)
    assert [len(each.messages) for each in seen.rounds] == [4, 4]
    assert all("server" in each.state.slots for each in seen.rounds)
    assert seen.round_seed(2) == fv.Seed.root(0).child("round", 2)


@pytest.mark.parametrize(
    ("method", "slots"),
    [
        (fv.FedAvg(FULL, server=fv.ServerOptimizer("adam", 0.01, ema=0.9)), set()),
        (fv.Scaffold(FULL), set()),
        (fv.FedAvg(up=fv.PowerSgd(), down=fv.Qsgd()), set()),
        (fv.Baffle(directions=4, down="replay"), {"server"}),
    ],
    ids=["moments", "control", "steps", "replay"],
)
def test_a_client_has_its_own_messages_and_the_weights(tmp_path, method, slots):
    task = linear_task()
    run(tmp_path, task, method)
    seen, server = (seen_in(tmp_path, task, method, who) for who in ("client", "server"))
    assert len({m.client for each in seen.rounds for m in each.messages}) == 1
    for own, its in zip(seen.rounds, server.rounds, strict=True):
        assert own.messages
        assert set(own.state.slots) == set(own.after.slots) == slots
        assert torch.equal(own.state.weights, its.state.weights)
        assert torch.equal(own.after.weights, its.after.weights)


def test_an_unknown_adversary_is_a_sentence():
    with pytest.raises(ValueError, match="the adversary is 'god'; use server or client"):
        view("god", linear_task(), fv.FedAvg(), fv.Seed.root(0), [])


def test_no_rounds_are_no_messages():
    assert view("client", linear_task(), fv.FedAvg(), fv.Seed.root(0), []).rounds == ()
