"""The floor of an inner loop: bytes and operations counted by hand."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture
def counter(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.count import Counter

    return Counter()


def test_a_product_and_what_follows_it_are_one_group(counter):
    w, x, state = torch.ones(8, 16), torch.ones(16, 4), torch.zeros(8, 4)
    with counter:
        y = (w @ x).relu() * 2
        state.add_(y)
    [group] = counter.groups
    assert group.operations == counter.operations == 2 * 8 * 16 * 4
    assert counter.bytes == 4 * (8 * 16 + 16 * 4 + 2 * 8 * 4)  # w, x, and the state read and written
    assert counter.operators == 4
    assert counter.launched == 4 * ((8 * 16 + 16 * 4 + 32) + (32 + 32) + (32 + 32) + (32 + 32 + 32))
    assert counter.seconds(bandwidth=1.0, speed=1e9) == counter.bytes
    assert counter.seconds(bandwidth=1e9, speed=1.0) == counter.operations


def test_a_reduction_ends_a_group(counter):
    x = torch.ones(10, 20)
    with counter:
        (x * 2 - (x * 2).sum(1, keepdim=True)).clone()
    twice, summed, less = 4 * 200, 4 * 200, 4 * (200 + 10)
    assert len(counter.groups) == 3  # either product of x, the second with its sum, and the difference of both
    assert counter.bytes == twice + 4 * 200 + summed + 4 * 10 + less


def test_views_cost_nothing_and_expanded_entries_are_read_once(counter):
    x, ones = torch.ones(6, 1), torch.ones(6, 5)
    with counter:
        (x.expand(6, 5) + ones.view(5, 6).t()[:, :5]).sum()
    [group] = counter.groups
    assert group.bytes == 4 * (6 + 25 + 5)


@pytest.mark.parametrize("groups", [1, 5])
def test_convolutions_count_their_groups(counter, groups):
    x = torch.ones(2, 10, 6, 6, requires_grad=True)
    weight = torch.ones(20, 10 // groups, 3, 3, requires_grad=True)
    with counter:
        out = torch.conv2d(x, weight, groups=groups)
        torch.autograd.grad(out.sum(), (x, weight))
    one = 2 * out.numel() * (10 // groups) * 3 * 3
    assert counter.operations == 3 * one


def test_both_derivatives_are_counted(counter):
    w, x = torch.ones(4, 3, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    with counter:
        (g,) = torch.autograd.grad((w @ x).square().sum(), w, create_graph=True)
        torch.autograd.grad(g.square().sum(), x)
    one = 2 * 4 * 3 * 2
    assert counter.operations == 5 * one  # w x and y xᵀ; by y and by x of the second, then by x of the first


def test_a_floor_says_how_close_a_loop_comes(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.floor import Inner, measure

    x = torch.ones(1 << 16)

    def run(steps):
        for _ in range(steps):
            x.mul_(1.0)

    figures = measure(Inner(run, few=10, many=30, times=10))
    assert figures["operators"] == figures["groups"] == 10
    assert figures["gigabytes"] == pytest.approx(10 * 2 * 4 * (1 << 16) / 1e9)
    assert figures["measured / floor"] == figures["measured, milliseconds"] / figures["floor, milliseconds"]


def test_an_unknown_floor_is_named():
    command = [sys.executable, "-m", "benchmarks", "--floor", "digits"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 2
    assert "there is no floor digits; use fedsynth, tofu" in found.stderr
