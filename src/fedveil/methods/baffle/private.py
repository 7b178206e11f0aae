"""Slopes that are differentially private for each record, from forward passes only.

As in DPZero (Zhang et al. 2024, algorithm 2) it is a record's loss differences that are clipped, here along K
directions at once: each record's K slopes, over √K, are clipped to norm C, noise of deviation σC is added to their sum,
once, and the sum is divided by the expected batch. Slopes over √K are about as long as the record's gradient, so a clip
of DP-SGD's fits. Records are drawn and noise is made as in DP-SGD (`privacy/dpsgd.py`), and so the price is the same.

Models run in float64. In float32, a loss is rounded by what depends on how many records are in a pass, and dividing by
the step of the difference makes that as large as a hundredth of a clip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedveil.core.seeds import Seed
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.methods.baffle.probing import Prober, forward_only
from fedveil.privacy.dpsgd import DpSgd, padded, poisson, shrinking


def validate(task: Task) -> None:
    """Raise a ValueError if the model does not run in float64."""
    x = task.x[:2].double() if task.x.is_floating_point() else task.x[:2]
    try:
        with forward_only(task.device):
            task.f(task.initial.double(), x)
    except Exception as error:  # whatever a layer may say that holds something in float32
        raise ValueError(
            f"method.privacy runs the model in float64, which it does not ({type(error).__name__}); make what it holds "
            "beside its weights float64 too, or leave method.privacy out"
        ) from error


def answer(how: DpSgd, prober: Prober, stack: ClientStack, w: Tensor, keys: Tensor, count: int, batch: int) -> Tensor:
    """The private slopes of each client's mean loss at `w` [d], along `count` directions: float32 [C, K].

    keys: int64 [1], the same for all clients, or [C]
    """
    task, secrets = stack.task, stack.secrets("slopes")
    index, mask = drawn(how, stack, batch, secrets)
    stack.reveal(records=[own[here > 0] for own, here in zip(index, mask, strict=True)])
    x, y, mask, keys = task.x[index], task.y[index], mask.to(task.device), keys.to(task.device)
    with forward_only(task.device):
        total = slopes(how, prober, w, keys, x, y, mask, count)
    return noised(how, total, secrets, batch)


def drawn(how: DpSgd, stack: ClientStack, batch: int, secrets: Sequence[Seed]) -> tuple[Tensor, Tensor]:
    """Records of each client, each drawn by itself at the rate of `how`: indices [C, B] and mask [C, B]."""
    rate, own = how.rate(stack.task, batch), stack.rows.indices
    rows = [poisson(secret.child("draw"), held, rate, 1) for secret, held in zip(secrets, own, strict=True)]
    index, mask = padded(rows, 1)
    return torch.from_numpy(index[0]), torch.from_numpy(mask[0])


def slopes(
    how: DpSgd, prober: Prober, w: Tensor, keys: Tensor, x: Tensor, y: Tensor, mask: Tensor, count: int
) -> Tensor:
    """The sum of each client's clipped slopes, over √K and in units of `how`: float64 [C, K].

    w [d], keys int64 [1 or C], x [C, B, …], y [C, B, …], mask [C, B]. With one key, all clients' records run through
    the same perturbed models.
    """
    wide = replace(prober, precision=torch.float64, losses=torch.float64)
    if len(keys) == 1:
        each = wide.each(w[None], keys, x.flatten(0, 1)[None], y.flatten(0, 1)[None], count)[0]
    else:
        each = wide.each(w.expand(len(keys), -1), keys, x, y, count).flatten(0, 1)
    each = each / math.sqrt(count)  # [C·B, K]
    factors = shrinking(each, how.clip)
    each.masked_fill_(factors == 0, 0)  # or 0 times infinity would be in the sum
    each.mul_(factors / how.unit)
    if how.grid:
        each.trunc_()
    return torch.einsum("cb,cbk->ck", mask.to(each), each.unflatten(0, mask.shape))


def noised(how: DpSgd, total: Tensor, secrets: Sequence[Seed], batch: int) -> Tensor:
    """Slopes of the mean loss over `batch` records, from the sums [C, K]: with noise, rounded to float32 after it."""
    count = total.shape[1]
    noise = [how.drawn(how.stream(secret.child("noise"), count).to(total.device), count) for secret in secrets]
    return ((total + torch.stack(noise)) * (how.unit * math.sqrt(count) / batch)).float()
