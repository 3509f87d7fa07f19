"""From the final hidden states of a prompt's rows to its embedding.

The embedding is a function of the states alone, and those of the prompt: rows are added in the order of their
positions, one by one, in float64, so neither the cut of the prompt into steps nor anything else shows. What
follows is IEEE arithmetic, element by element, and one sum that is rounded once (`math.fsum`): no library
chooses an order by the machine.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tenfold.backends.base import Floats
from tenfold.protocol import Pooling

NOT_NUMBERS = "the prompt has no embedding: the model's hidden states are not numbers"


class Pool:
    """The states of one prompt of ``length`` tokens, as far as they are known. It outlasts a preemption: rows
    that were counted are not counted again, so they may then come from the cache."""

    def __init__(self, pooling: Pooling, length: int) -> None:
        self._mean = pooling.kind == "mean"
        self._normalize = pooling.normalize
        self._length = length
        self._counted = 0
        """So many first rows are in the sum."""
        self._sum: npt.NDArray[np.float64] | None = None

    @property
    def reusable(self) -> int:
        """Most first rows whose states are not needed (any more): their KV may come from elsewhere."""
        return self._counted if self._mean else self._length - 1

    def wanted(self, first: int, end: int) -> range:
        """Of the rows from ``first`` up to ``end``, those whose states are needed."""
        return range(min(max(first, self.reusable), end), end)

    def take(self, states: Floats) -> None:
        """The states of all that were `wanted` of a step, ``[rows, width]``."""
        if self._sum is None:
            self._sum = np.zeros(states.shape[1], np.float64)
        for row in states:
            self._sum += row
        self._counted += len(states)

    def embedding(self) -> bytes | None:
        """The embedding, when all states are there: float32, little-endian. None: it is not made of numbers.
        States that are all zero stay so, normalized or not."""
        assert self._sum is not None, "no step had a wanted row"
        pooled = self._sum / self._counted
        if not np.isfinite(pooled).all():
            return None
        if self._normalize and (norm := math.sqrt(math.fsum((pooled * pooled).tolist()))):
            pooled /= norm
        return pooled.astype("<f4").tobytes()
