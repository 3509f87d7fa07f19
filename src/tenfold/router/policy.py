"""How one worker is chosen of those that take requests."""

from __future__ import annotations

import random

import numpy as np

from tenfold.router.books import Books, Bools, Ints
from tenfold.router.cost import Costs
from tenfold.router.policies import Policy


class Chooser:
    """A policy and what it remembers. Where several workers are equally good, the one that was sent the
    fewest requests so far is taken, and of those the one that came first."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self._policy = policy
        self._random = random.Random(seed)
        self._turn = -1

    def choose(self, books: Books, priced: Costs, overlap: Ints, among: Bools) -> int:
        """A slot ``among`` these; at least one of them must be usable."""
        usable = np.flatnonzero(books.usable & among)
        if self._policy == "random":
            return int(usable[self._random.randrange(len(usable))])
        if self._policy == "round-robin":
            after = usable[usable > self._turn]
            self._turn = int(after[0] if len(after) else usable[0])
            return self._turn
        if self._policy == "least-loaded":
            score = books.prefills[usable] + books.decodes[usable]
        elif self._policy == "prefix-only":
            score = -overlap[usable].astype(np.float64)
        else:
            score = priced.total[usable]
        least = score.min()
        best = usable[score <= least + 1e-9 * abs(least)]
        return int(best[np.argmin(books.routed[best])])
