"""Who gets rows in the next step.

Decode rows come first, then drafts, then prompts in order of arrival, each as far as the budget of rows
goes. Drafts may take half of what the decodes leave, or all of it where no prompt waits; as each of their
rows needs logits, they leave a row of those for every sequence that may draw in the step. A request is
admitted, first come first served, when there are pages for all its tokens and one more for every sequence
that runs (so that those need not be thrown out at once). When a decode needs a page and there is none, the
sequence that arrived last goes back to the head of the queue; its finished pages stay in the cache until
someone needs them. So ``running``, then ``waiting``, is in order of arrival, and the first in it always gets
on: nobody starves.

A sequence that was handed over has waited for its turn elsewhere, and has a page of rows to compute at most:
it goes before those that wait (but for who has run already, and for a head that waits for pages, which others
must not take for ever), and prompts under way leave rows for it.

Drafts get their pages last, and only free ones: for a draft nobody is put back or kept out, and nothing is
evicted. So what is admitted, and what is found in the cache, is the same with drafts and without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sized
from typing import NamedTuple, Protocol

from tenfold.backends.base import PAGE_ROWS
from tenfold.engine.sequence import Sequence
from tenfold.kv.cache import KVCache
from tenfold.kv.pages import IntegrityError

FULL = "the KV memory is full with this request alone; give the engine more KV pages, or lower max_tokens"


class Work(NamedTuple):
    """The next ``rows`` pending tokens of a sequence, and guesses of the tokens after them."""

    sequence: Sequence
    rows: int
    draft: Sized[int] = ()
    """Not empty only where ``rows`` is 1 and nothing else is pending."""


class Plan(NamedTuple):
    """A step, and the sequences that can go no further, with the reason; the engine must drop those."""

    work: list[Work]
    failed: list[tuple[Sequence, str]]
    asked: int = 0
    """Of how many first sequences of ``work`` drafts were asked: those that decode."""


Guess = Callable[[list[Sequence], int], list[Sized[int]]]
"""Drafts for sequences that decode, of at most so many tokens in all."""


class Gate(Protocol):
    """Who may hold the head of the queue back while pages of its prompt are on their way."""

    def ready(self, id: str, tokens: Sized[int], namespace: str, reserve: int) -> bool: ...

    def forget(self, id: str) -> None:
        """It was admitted, or is gone."""
        ...


class Scheduler:
    """The queue and the running sequences. ``max_running`` must not be more than ``max_rows`` or
    ``max_logit_rows``."""

    def __init__(self, cache: KVCache, max_rows: int, max_logit_rows: int, max_running: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._cache = cache
        self._max_rows = max_rows
        self._max_logit_rows = max_logit_rows
        self._max_running = max_running
        # The head of the queue if it did not fit: no use to try again before pages are given back.
        self._blocked: Sequence | None = None
        self.gates: list[Gate] = []

    def queue(self, sequence: Sequence) -> None:
        """A sequence has come, and waits."""
        at = len(self.waiting)
        if sequence.handed_over:
            others = (n for n, one in enumerate(self.waiting) if not self._keeps_its_place(one))
            at = next(others, at)
        self.waiting.insert(at, sequence)

    def _keeps_its_place(self, sequence: Sequence) -> bool:
        return sequence.handed_over or sequence.admitted or sequence is self._blocked

    def unblock(self) -> None:
        """Pages were given back, by others than sequences."""
        self._blocked = None

    def plan(self, guess: Guess | None = None) -> Plan:
        """Decides a step and takes the pages for it. ``guess`` is asked for drafts if anything decodes."""
        plan = Plan([], [])
        self._decodes(plan)
        budget = self._max_rows - len(plan.work)
        drafts: list[Sized[int]] = []
        if guess is not None and plan.work:
            drafts = guess([work.sequence for work in plan.work], self._draft_rows(budget))
            budget -= sum(map(len, drafts))
        prompts = self._prompts(plan)
        kept = self._kept_rows(budget)
        while budget and (sequence := next(prompts, None)) is not None:
            if sequence.handed_over:
                kept = max(0, kept - PAGE_ROWS)
            if (rows := min(sequence.pending, budget - kept)) > 0:
                plan.work.append(Work(sequence, rows))
                budget -= rows
        for index, draft in enumerate(drafts):
            if draft:
                self._draft(plan, index, draft)
        return plan._replace(asked=len(drafts))

    def drop(self, sequence: Sequence) -> None:
        """The sequence leaves, running or waiting."""
        if sequence.table is None:
            self.waiting.remove(sequence)
            self._forget(sequence)
        else:
            self.running.remove(sequence)
            self._give_back(sequence)

    def _decodes(self, plan: Plan) -> None:
        for sequence in list(self.running):
            if sequence.prefills or sequence.table is None:
                continue
            # At the latest the sequence itself goes; if it needs more than all pages, it fails in the queue.
            while not self._cache.extend(sequence.table, len(sequence.tokens)):
                if self._preempt() is sequence:
                    break
            else:
                plan.work.append(Work(sequence, 1))

    def _admits(self) -> bool:
        """Whether the head of the queue may be tried."""
        return (
            len(self.waiting) > 0
            and len(self.running) < self._max_running
            and self.waiting[0] is not self._blocked
        )

    def _kept_rows(self, budget: int) -> int:
        """How many of ``budget`` rows prompts leave to those that were handed over and wait."""
        if not self._admits():
            return 0
        return min(PAGE_ROWS * sum(one.handed_over for one in self.waiting), budget // 2)

    def _draft_rows(self, budget: int) -> int:
        """How many of the ``budget`` rows that decodes leave may be drafts."""
        prompts = self._admits() or any(sequence.prefills for sequence in self.running)
        drawing = min(len(self.running) + len(self.waiting), self._max_running)
        return min(budget // 2 if prompts else budget, self._max_logit_rows - drawing)

    def _draft(self, plan: Plan, index: int, draft: Sized[int]) -> None:
        sequence = plan.work[index].sequence
        assert sequence.table is not None
        rows = len(sequence.tokens)
        room = self._cache.stretch(sequence.table, rows + len(draft)) - rows
        plan.work[index] = plan.work[index]._replace(draft=draft[:room])

    def _prompts(self, plan: Plan) -> Iterator[Sequence]:
        yield from [sequence for sequence in self.running if sequence.prefills]
        while self._admits():
            sequence = self.waiting[0]
            if self._cache.can_never_hold(len(sequence.tokens)):
                plan.failed.append((sequence, FULL))
                return
            if sequence.reusable and not all(
                gate.ready(sequence.id, sequence.tokens, sequence.namespace, len(self.running))
                for gate in self.gates
            ):
                return
            try:
                opened = self._cache.open(
                    sequence.tokens, len(self.running), sequence.namespace, sequence.reusable
                )
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
            self._forget(sequence)
            yield sequence

    def _forget(self, sequence: Sequence) -> None:
        for gate in self.gates:
            gate.forget(sequence.id)

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
