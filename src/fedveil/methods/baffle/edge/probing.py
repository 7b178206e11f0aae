"""Slopes: how the loss of this client's records changes along random directions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.core.directions import Directions, order, words
from fedveil.core.refused import Refused
from fedveil.core.seeds import is_weak
from fedveil.methods.baffle.edge.model import Floats, Losses, Model


class Probing:
    """One client's records x [n, *input] and y [n, …], and the directions along which its model is probed."""

    def __init__(self, model: Model, settings: dict[str, Any], client: int, x: NDArray[Any], y: NDArray[Any]) -> None:
        self._model, self._settings, self._client, self.x, self.y = model, settings, client, x, y
        self.directions = Directions.of(settings["law"], len(model.places), settings["directions"])
        weak = settings["weak"] is not None and is_weak(client, settings["share"])
        self._most: int = settings["weak"] if weak else settings["directions"]
        self._fewest = settings["directions"] if settings["weak"] is None else settings["weak"]

    def check(self, directions: int) -> None:
        """Refuse a question that is more work than the settings say."""
        if directions > (most := self._settings["directions"]):
            raise Refused("too large", f"{directions} directions are asked for, {most} are answered")

    def slopes(self, weights: Floats, key: int, count: int) -> Floats:
        """Slopes of the mean loss, [count], over as many records as a question takes."""
        x, y, batch = self.x, self.y, self._settings["batch"]
        if batch is not None and batch < len(x):
            chosen = order(np, self.own(key), len(x))[0, :batch]
            x, y = x[chosen], y[chosen]
        keys = self.own(key) if self._settings["seeds"] == "own" else np.array([key], np.int64)
        found = np.empty(count, np.float32)
        for k, each in enumerate(self.each(weights, keys, count, x, y)):
            found[k] = each.mean()
        return found

    def count(self, asked: int) -> int:
        """How many directions a question of a secure sum is answered along: a weak client's are fewer than asked."""
        return min(asked, self._most)

    def summand(self, slopes: Floats, asked: int) -> Floats:
        """Slopes [count] in the length of everyone's, with zeros behind them: they count for more clients' K."""
        return np.pad(slopes * np.float32(self._fewest / len(slopes)), (0, asked - len(slopes)))

    def each(self, weights: Floats, keys: NDArray[np.int64], count: int, x: NDArray[Any], y: NDArray[Any]) -> Any:
        """The slope of each record's loss along one direction after the other, [n] in float64."""
        sigma, central = self._settings["sigma"], self._settings["scheme"] == "central"
        before: Losses = np.zeros(0) if central else self._model.losses(weights, x, y)
        for k in range(count):
            z = self.directions.rows(np, keys, k, 1)[0, 0]
            if central:
                before = self._model.losses(self._moved(weights, z, -sigma), x, y)
            ahead = self._model.losses(self._moved(weights, z, sigma), x, y)
            yield (ahead - before) / (2 * sigma if central else sigma)

    def own(self, key: int) -> NDArray[np.int64]:
        """The key of this client's own directions and of its draw of records."""
        own: NDArray[np.int64] = words(np.array([key], np.int64), np.array([self._client], np.int64))
        return own

    def _moved(self, weights: Floats, z: Floats, step: float) -> Floats:
        """The weights moved along a direction, rounded once, as PyTorch does where the processor has such a product."""
        moved, places = weights.copy(), self._model.places
        moved[places] = weights[places].astype(np.float64) + float(np.float32(step)) * z.astype(np.float64)
        return moved
