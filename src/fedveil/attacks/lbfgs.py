"""L-BFGS over a stack of points, each with its own history, with the steps of `torch.optim.LBFGS`: no line search."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

HISTORY = 100
CURVED = 1e-8  # cosine of a step and the turn of its slope below which it tells nothing of the curvature


class Lbfgs:
    """A step for `point` [B, D], in place (Nocedal and Wright 2006, algorithm 7.4).

    slopes: the losses [B] and their slopes [B, D] at the present point
    best:   the point of lowest loss so far [B, D]; a row whose loss is no number goes on from there without a history
    """

    def __init__(self, point: Tensor, best: Tensor, slopes: Callable[[], tuple[Tensor, Tensor]], lr: float) -> None:
        self._point, self._best, self._slopes, self._lr = point, best, slopes, lr
        self._moves, self._turns = (point.new_zeros(HISTORY, *point.shape) for _ in range(2))  # s and y
        self._weights = point.new_zeros(HISTORY, len(point), 1)  # 1 / sᵀy, and 0 of a step that tells nothing
        self._before, self._move = torch.zeros_like(point), torch.zeros_like(point)
        self._scale = point.new_zeros(len(point), 1)  # of the first guess of the inverse Hessian; 0 without a history
        self._newest = torch.zeros(1, dtype=torch.int64, device=point.device)
        self._taken = 0

    def __call__(self) -> None:
        loss, slope = self._slopes()
        lost = ~(loss.isfinite() & slope.isfinite().all(1))[:, None]
        slope = slope.nan_to_num(0, 0, 0)
        self._remember(slope, lost)
        self._before.copy_(slope)
        direction = self._direction(slope)
        fresh = self._scale == 0
        first = (1 / slope.abs().sum(1, keepdim=True).clamp(min=1e-12)).clamp(max=1)
        self._move.copy_(self._lr * torch.where(fresh, -first * slope, direction))
        self._move.masked_fill_(lost, 0)
        self._point.copy_(torch.where(lost, self._best, self._point) + self._move)
        self._taken += 1

    def _remember(self, slope: Tensor, lost: Tensor) -> None:
        """Enter the last step; forget all of a row that is lost."""
        turn = slope - self._before
        curve = (turn * self._move).sum(1, keepdim=True)
        sizes = turn.square().sum(1, keepdim=True) * self._move.square().sum(1, keepdim=True)
        told = (curve > CURVED * sizes.sqrt()) & ~lost
        self._newest.copy_((self._newest + 1) % HISTORY)
        self._moves.index_copy_(0, self._newest, torch.where(told, self._move, 0)[None])
        self._turns.index_copy_(0, self._newest, torch.where(told, turn, 0)[None])
        self._weights.index_copy_(0, self._newest, torch.where(told, 1 / curve, 0)[None])
        width = curve / turn.square().sum(1, keepdim=True).clamp(min=1e-30)
        self._scale.copy_(torch.where(told, width, self._scale).masked_fill(lost, 0))
        self._weights.masked_fill_(lost, 0)

    def _direction(self, slope: Tensor) -> Tensor:
        """Minus the inverse Hessian times the slope, by two loops over the history."""
        known = HISTORY if self._point.is_cuda else min(self._taken, HISTORY)  # a graph does the same in each step
        steps = [self._at((self._newest - k) % HISTORY) for k in range(known)]
        rest, shares = -slope, []
        for move, turn, weight in steps:
            share = weight * torch.linalg.vecdot(move, rest)[:, None]
            rest.addcmul_(share, turn, value=-1)
            shares.append(share)
        rest *= self._scale
        for (move, turn, weight), share in zip(reversed(steps), reversed(shares), strict=True):
            rest.addcmul_(share - weight * torch.linalg.vecdot(turn, rest)[:, None], move)
        return rest

    def _at(self, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The move, the turn and the weight at a place [1] of the history."""
        if self._point.is_cuda:  # where the host must not wait for the number
            move, turn, weight = (kept.index_select(0, place)[0] for kept in (self._moves, self._turns, self._weights))
            return move, turn, weight
        return self._moves[int(place)], self._turns[int(place)], self._weights[int(place)]
