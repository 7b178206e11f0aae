"""Descent within a ball: by hand."""

import math

import pytest
import torch

from fedveil.surrogates.descent import descend, rates


def test_rates_fall_to_nothing_along_half_a_cosine():
    assert rates(0.2, 4).tolist() == pytest.approx([0.1 * (1 + math.cos(math.pi * t / 4)) for t in range(4)])
    assert rates(0.2, 1).tolist() == pytest.approx([0.2])


def test_each_step_has_its_rate():
    weights = torch.ones(1, 1)
    taken = descend(weights, torch.ones(1), math.inf, torch.tensor([0.5, 0.1, 0.25]), lambda: weights.clone())
    assert weights.tolist() == [[pytest.approx(0.5 * 0.9 * 0.75)]]
    assert taken.tolist() == [3]


def test_who_is_out_stays_there_while_others_go_on():
    weights, seen = torch.zeros(2, 1), []
    slopes = torch.tensor([[-1.0], [-0.4]])
    taken = descend(
        weights, torch.zeros(1), 0.9, torch.full((4,), 0.5), lambda: slopes, lambda away: seen.append(away.tolist())
    )
    assert weights.flatten().tolist() == pytest.approx([1.0, 0.8])  # the step that leads out is still taken
    assert taken.tolist() == [2, 4]
    assert seen[1] == pytest.approx([1.0, 0.4])


def test_no_steps_move_nothing():
    weights = torch.ones(1, 1)
    assert descend(weights, torch.ones(1), 1.0, torch.zeros(0), lambda: weights).tolist() == [0]
    assert weights.tolist() == [[1.0]]
