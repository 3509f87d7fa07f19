"""The speculator that drafts where it was measured to pay.

What it decides, and how it learns, is told and done in ``native/speculation/controller.h``: which drafter is
asked about which sequences and for how many tokens, and which of the drafted tokens a step verifies. Here the
drafters are called. The decisions are native because a step takes a few milliseconds, and the same in Python
took a tenth of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tenfold._native import SpeculationController
from tenfold.speculate.base import (
    Drafter,
    DrafterReport,
    DraftSequence,
    Outcome,
    SpeculationReport,
)
from tenfold.speculate.cost_curve import CostCurve


class Controller:
    """Chooses per sequence and step among drafters, and how many tokens; see the head of the file.

    ``curve`` is where the live one starts. ``max_draft``: most tokens of a draft. ``wants_features``:
    whether one of them reads the target's hidden states. ``clock`` times the
    drafters, in seconds. ``observe``'s ``step_ms`` must not contain the time of ``propose``. What a drafter
    raises passes through `propose`, which raises ValueError for what is no answer of a drafter: another
    number of drafts than was asked for, a draft with fewer chances than tokens, a quality that there is not.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        curve: CostCurve,
        *,
        max_draft: int = 8,
        wants_features: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafters = list(drafters)
        qualities = [max(1, drafter.qualities) for drafter in drafters]
        self._core = SpeculationController(
            qualities, curve.rows, curve.ms, max_draft, curve.token_ms, curve.depth
        )
        self._wants_features = wants_features
        self._clock = clock
        # What the core knows sequences by: those that run, and those of the step under way.
        self._slots: dict[str, int] = {}
        self._open: dict[str, int] = {}

    @property
    def wants_features(self) -> bool:
        """Whether one of the drafters reads the target's hidden states."""
        return self._wants_features

    def begin(self, sequence: DraftSequence) -> None:
        """The sequence starts or is resumed."""
        for drafter in self._drafters:
            drafter.begin(sequence)
        self._slot(sequence)

    def end(self, sequence: DraftSequence, learn: bool) -> None:
        """The sequence leaves; its own statistics are forgotten."""
        for drafter in self._drafters:
            drafter.end(sequence, learn)
        slot = self._slots.pop(sequence.id, None)
        if slot is not None:
            self._core.end(slot)

    def propose(
        self, sequences: Sequence[DraftSequence], rows: int, limits: Sequence[int]
    ) -> list[Sequence[int]]:
        """See `Speculator.propose`. A number that is no token is -1."""
        slots = [self._slot(sequence) for sequence in sequences]
        self._open = {sequence.id: slot for sequence, slot in zip(sequences, slots, strict=True)}
        core, clock = self._core, self._clock
        question = core.propose(slots, [len(sequence.tokens) for sequence in sequences], rows, limits)
        while question is not None:
            source, asked, lengths = question
            began = clock()
            drafts = self._drafters[source].propose([sequences[i] for i in asked], lengths)
            question = core.answer(drafts, (clock() - began) * 1e3)
        return core.drafts()

    def observe(self, outcomes: Sequence[Outcome], rows: int, step_ms: float) -> None:
        """See `Speculator.observe`."""
        left = self._open.pop
        self._core.observe([left(outcome.sequence.id, -1) for outcome in outcomes], outcomes, rows, step_ms)

    def report(self) -> SpeculationReport:
        """Counts so far. Reasons for nothing drafted: "limit" (the sequence is about to end), "load" (would
        pay alone, or no rows left), "asleep" (no drafter brought enough lately to be asked), "no draft", "not
        worth it", "probe" (a plain step, to time it)."""
        steps, committed, drafters, idle = self._core.counts()
        return SpeculationReport(
            steps=steps,
            committed_tokens=committed,
            drafters=tuple(
                DrafterReport(drafter.name, *counts)
                for drafter, counts in zip(self._drafters, drafters, strict=True)
            ),
            idle=idle,
        )

    def close(self) -> None:
        """Closes the drafters."""
        for drafter in self._drafters:
            drafter.close()

    def _slot(self, sequence: DraftSequence) -> int:
        slot = self._slots.get(sequence.id)
        if slot is None:
            slot = self._slots[sequence.id] = self._core.begin(sequence.namespace)
        return slot
