"""Slopes that are differentially private for each record, made as in `methods/baffle/private.py`."""

from __future__ import annotations

import math
import secrets
from typing import Any

import numpy as np

from fedveil.core.seeds import Seed
from fedveil.methods.baffle.edge.model import Floats, Losses
from fedveil.methods.baffle.edge.probing import Probing
from fedveil.privacy import draws


class Private:
    """How slopes become private.

    rate:  with which each record is drawn, by itself
    batch: how many that are of the client with the most records
    """

    def __init__(self, probing: Probing, settings: dict[str, Any]) -> None:
        self._probing, self._shared = probing, settings["seeds"] == "shared"
        how = settings["privacy"]
        self._clip, self._sigma, self._rate, self._batch = how["clip"], how["sigma"], how["rate"], how["batch"]
        self._whole = how["mechanism"] == "skellam"

    def slopes(self, weights: Floats, key: int, count: int) -> Floats:
        """The private slopes of the mean loss, [count], rounded to float32 after the noise. The draw and the noise are
        the operating system's, new with every call."""
        secret, x = Seed(secrets.token_bytes(16)), self._probing.x
        drawn = draws.uniform(np, draws.words(secret.child("draw").key, len(x))) < self._rate
        return self.noised(self.clipped_sum(weights, key, count, drawn), secret.child("noise").key)

    def clipped_sum(self, weights: Floats, key: int, count: int, drawn: Any) -> Losses:
        """The sum over the records that are `drawn` of their clipped slopes, over √K and in units: float64 [count]."""
        probing, keys = self._probing, np.array([key], np.int64) if self._shared else self._probing.own(key)
        x, y = probing.x[drawn], probing.y[drawn]
        if not len(x):
            return np.zeros(count)
        each = np.stack(list(probing.each(weights, keys, count, x, y)), 1) / math.sqrt(count)  # [n, count]
        with np.errstate(invalid="ignore", over="ignore"):
            norms = np.linalg.norm(each, axis=1, keepdims=True)
        within = draws.WITHIN * self._clip
        factors = np.where(np.isfinite(norms), within / np.maximum(norms, within), 0)
        each[~np.isfinite(norms)[:, 0]] = 0  # or 0 times infinity would be in the sum
        each *= factors / self._unit
        total: Losses = (np.trunc(each) if self._whole else each).sum(0)
        return total

    def noised(self, total: Losses, secret: bytes) -> Floats:
        """Slopes from their sum, [count]."""
        count = len(total)
        if self._whole:
            noise = draws.whole_noise(secret, self._sigma, count).astype(np.float64)
        else:
            noise = draws.normal(np, draws.words(secret, draws.even(count)))[:count] * (self._sigma * self._clip)
        found: Floats = ((total + noise) * (self._unit * math.sqrt(count) / self._batch)).astype(np.float32)
        return found

    @property
    def _unit(self) -> float:
        return float(self._clip / draws.GRID) if self._whole else 1.0
