"""Descent within a ball: by hand."""

import math

import pytest
import torch

from fedveil.methods.surrogates.descent import descend, rates


def test_rates_fall_to_nothing_along_half_a_cosine():
    assert rates(0.2, 4).tolist() == pytest.approx([0.1 * (1 + math.cos(math.pi * t / 4)) for t in range(4)])
    assert rates(0.2, 1).tolist() == pytest.approx([0.2])


def test_rates_of_a_plain_descent_stay():
    assert rates(0.2, 3, "plain").tolist() == pytest.approx([0.2] * 3)


def bowl(weights):
    """Half the squared norm."""
    return weights.clone(), weights.square().sum(1) / 2


def test_each_step_has_its_rate():
    weights = torch.ones(1, 1)
    taken, tried = descend(weights, torch.ones(1), math.inf, torch.tensor([0.5, 0.1, 0.25]), bowl)
    assert weights.tolist() == [[pytest.approx(0.5 * 0.9 * 0.75)]]
    assert taken.tolist() == tried.tolist() == [3]


def test_who_is_out_stays_there_while_others_go_on():
    weights, seen = torch.zeros(2, 1), []
    slopes = torch.tensor([[-1.0], [-0.4]])
    taken, tried = descend(
        weights,
        torch.zeros(1),
        0.9,
        torch.full((4,), 0.5),
        lambda at: (slopes, (slopes * at).sum(1)),
        lambda away: seen.append(away.tolist()),
    )
    assert weights.flatten().tolist() == pytest.approx([1.0, 0.8])  # the step that leads out is still taken
    assert taken.tolist() == tried.tolist() == [2, 4]
    assert seen[1] == pytest.approx([1.0, 0.4])


def test_when_all_are_out_nothing_more_is_computed():
    weights, seen = torch.zeros(1, 1), []
    slope = torch.tensor([[-1.0]])
    rate = torch.full((100,), 0.5)
    taken, tried = descend(weights, torch.zeros(1), 5.9, rate, lambda at: (slope, -at[:, 0]), lambda _: seen.append(1))
    assert taken.tolist() == tried.tolist() == [12]
    assert len(seen) == 20


def test_a_step_that_does_not_lower_the_loss_is_not_taken_and_halves_the_later_ones():
    weights, seen = torch.tensor([[1.0], [1.0]]), []
    steep = torch.tensor([1.0, 10.0])  # of two parabolas; a step of 0.3 leads the second from 1 to -2

    def gradient(at):
        return steep[:, None] * at, steep * at[:, 0].square() / 2

    rate = torch.full((4,), 0.3)
    taken, tried = descend(weights, torch.zeros(1), math.inf, rate, gradient, lambda _: seen.append(weights[1].item()))
    assert seen == pytest.approx([1.0, -0.5, 0.25, -0.125])  # 0.15 from the second on
    assert weights[0].item() == pytest.approx(0.7**4)
    assert (taken.tolist(), tried.tolist()) == ([4, 3], [4, 4])


def test_a_plain_descent_takes_every_step_until_it_is_out():
    weights, rate = torch.tensor([[1.0]]), torch.full((4,), 0.3)

    def steep(at):
        return 10 * at, 5 * at[:, 0].square()

    taken, tried = descend(weights, torch.zeros(1), 3.0, rate, steep, descent="plain")
    assert weights.tolist() == [[pytest.approx(4.0)]]  # 1, -2, 4, which is out
    assert taken.tolist() == tried.tolist() == [2]


def test_a_plain_descent_does_not_go_where_the_loss_is_no_number():
    weights, rate = torch.tensor([[1.0]]), torch.full((2,), 0.8)

    def cliff(at):
        return torch.ones_like(at), torch.where(at[:, 0] < 0.5, math.nan, at[:, 0])

    taken, tried = descend(weights, torch.zeros(1), math.inf, rate, cliff, descent="plain")
    assert weights.tolist() == [[pytest.approx(0.6)]]  # not 0.2; half of the rate is what leads there
    assert (taken.tolist(), tried.tolist()) == ([1], [2])


def test_a_loss_that_is_no_number_is_not_lower():
    weights = torch.ones(1, 1)
    rate = torch.full((3,), 0.1)
    taken, tried = descend(
        weights, torch.ones(1), math.inf, rate, lambda at: (at, torch.where(at < 1, math.nan, at)[:, 0])
    )
    assert weights.tolist() == [[1.0]]
    assert (taken.tolist(), tried.tolist()) == ([0], [3])


def test_no_steps_move_nothing():
    weights = torch.ones(1, 1)
    assert [steps.tolist() for steps in descend(weights, torch.ones(1), 1.0, torch.zeros(0), bowl)] == [[0], [0]]
    assert weights.tolist() == [[1.0]]
