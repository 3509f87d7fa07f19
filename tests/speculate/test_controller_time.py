"""What the controller itself costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from tenfold.speculate.base import Draft, Drafter, DraftSequence
from tenfold.speculate.controller import Controller
from tests.helpers.speculation import FLAT, NARROW, STEEP, Clock, Points, Scenario, curve_of, drafters, play


class Timed:
    """CPU time of calls, less that of calls to drafters inside."""

    def __init__(self) -> None:
        self.inside = 0.0
        self.taken: list[float] = []

    def drafter(self, drafter: Drafter) -> Drafter:
        propose = drafter.propose

        def timed(sequences: Sequence[DraftSequence], lengths: Sequence[int]) -> list[Draft]:
            began = time.process_time()
            drafts = propose(sequences, lengths)
            self.inside += time.process_time() - began
            return drafts

        drafter.propose = timed  # type: ignore[method-assign]
        return drafter

    def method(self, call: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            inside, began = self.inside, time.process_time()
            result = call(*arguments)
            self.taken.append(time.process_time() - began - (self.inside - inside))
            return result

        return timed


@pytest.mark.parametrize(("batch", "points", "limit_us"), [(1, FLAT, 20), (8, STEEP, 40)])
def test_time_of_a_step(batch: int, points: Points, limit_us: float) -> None:
    """`propose` and `observe` together, drafters left out, with two drafters on text that is drafted all the
    time: the mean step of the best of several rounds of 40."""
    clock, timed = Clock(), Timed()
    controller = Controller([timed.drafter(d) for d in drafters(clock)], curve_of(points), clock=clock)
    controller.propose = timed.method(controller.propose)  # type: ignore[method-assign]
    controller.observe = timed.method(controller.observe)  # type: ignore[method-assign]
    played = Scenario(NARROW, 1600 + 500 * batch, batch=lambda done: batch, curve=lambda done: points)
    play(played, controller, clock)
    steps = [sum(pair) for pair in zip(timed.taken[::2], timed.taken[1::2], strict=True)]
    rounds = [sum(steps[i : i + 40]) / 40 for i in range(0, len(steps) - 39, 40)]
    assert min(rounds) * 1e6 < limit_us
