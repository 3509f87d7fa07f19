"""Who gets rows in the next step.

Decode rows come first, then prompts in order of arrival, each as far as the budget of rows goes. A request
is admitted, first come first served, when there are pages for all its tokens and one more for every sequence
that runs (so that those need not be thrown out at once). When a decode needs a page and there is none, the
sequence that arrived last goes back to the head of the queue; its finished pages stay in the cache until
someone needs them. So ``running``, then ``waiting``, is always in order of arrival, and the first in it
always gets on: nobody starves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from tenfold.engine.sequence import Sequence
from tenfold.kv.cache import KVCache
from tenfold.kv.pages import IntegrityError

FULL = "the KV memory is full with this request alone; give the engine more KV pages, or lower max_tokens"


class Work(NamedTuple):
    """The next ``rows`` pending tokens of a sequence."""

    sequence: Sequence
    rows: int


class Plan(NamedTuple):
    """A step, and the sequences that can go no further, with the reason; the engine must drop those."""

    work: list[Work]
    failed: list[tuple[Sequence, str]]


class Scheduler:
    """The queue and the running sequences. ``max_running`` must not be more than ``max_rows``."""

    def __init__(self, cache: KVCache, max_rows: int, max_running: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._cache = cache
        self._max_rows = max_rows
        self._max_running = max_running
        # The head of the queue if it did not fit: no use to try again before pages are given back.
        self._blocked: Sequence | None = None

    def plan(self) -> Plan:
        """Decides a step and takes the pages for it."""
        plan = Plan([], [])
        self._decodes(plan)
        budget = self._max_rows - len(plan.work)
        prompts = self._prompts(plan)
        while budget and (sequence := next(prompts, None)) is not None:
            rows = min(sequence.pending, budget)
            plan.work.append(Work(sequence, rows))
            budget -= rows
        return plan

    def drop(self, sequence: Sequence) -> None:
        """The sequence leaves, running or waiting."""
        if sequence.table is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._give_back(sequence)

    def _decodes(self, plan: Plan) -> None:
        for sequence in list(self.running):
            if sequence.pending != 1 or sequence.table is None:
                continue
            # At the latest the sequence itself goes; if it needs more than all pages, it fails in the queue.
            while not self._cache.extend(sequence.table, len(sequence.tokens)):
                if self._preempt() is sequence:
                    break
            else:
                plan.work.append(Work(sequence, 1))

    def _prompts(self, plan: Plan) -> Iterator[Sequence]:
        yield from [sequence for sequence in self.running if sequence.pending > 1]
        while self.waiting and len(self.running) < self._max_running and self.waiting[0] is not self._blocked:
            sequence = self.waiting[0]
            if self._cache.can_never_hold(len(sequence.tokens)):
                plan.failed.append((sequence, FULL))
                return
            try:
                opened = self._cache.open(sequence.tokens, reserve=len(self.running))
            except IntegrityError:
                raise
            except Exception as error:
                plan.failed.append((sequence, f"cached rows could not be copied: {error}"))
                return
            if opened is None:
                self._blocked = sequence
                return
            self.running.append(self.waiting.popleft())
            sequence.admit(*opened)
            yield sequence

    def _preempt(self) -> Sequence:
        sequence = self.running.pop()
        self._give_back(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1
        return sequence

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.table is not None:
            self._cache.close(sequence.table)
        sequence.table = None
        sequence.computed = 0
        self._blocked = None
