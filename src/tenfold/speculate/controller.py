"""The speculator that drafts where it was measured to pay.

Every step it looks for the drafts that bring the most tokens per second over the whole batch: it maximises
``expected tokens - rate * time``, where ``rate`` is the rate achieved lately (W. Dinkelbach, "On nonlinear
fractional programming", 1967). Expected tokens come from `Calibration` and `Odds`, time from `LiveCurve`.

Nothing is explored by verifying on trust. Since a text does not depend on who drafted what, every draft that
was asked for, verified or not, is held against the text as it comes (`Shadow`). Three things cannot be
learnt for nothing, and each has an allowance, a small share of the time spent in steps: asking drafters that
do not seem to pay, timing steps of more rows where the curve says that they do not pay, and timing plain
steps where everything is drafted (one in 500, or a few in 50 when times have changed).

Step by step:

1. The price of a row in tokens: what the next rows cost at this batch, times the rate. At one or more, no
   draft can pay ("load").
2. Drafters are asked in the order of their cost, one call each, for the sequences where their gain of late is
   above their cost, and for others as the allowance goes.
3. A sequence takes the draft of which some length brings most: chances that its tokens stand, less the
   rows.
4. Tokens of all sequences are admitted by falling chance, as many as maximise the objective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tenfold.speculate.base import (
    Drafter,
    DrafterReport,
    DraftSequence,
    Outcome,
    SpeculationReport,
)
from tenfold.speculate.controller_admission import admit, more_to_time
from tenfold.speculate.controller_asking import Asker, Terms, Weighed
from tenfold.speculate.controller_state import Namespace, Run
from tenfold.speculate.cost_curve import CostCurve
from tenfold.speculate.cost_curve_live import LiveCurve

# Share of the time of steps that may go into timing, the plain steps it may take at the start, and the most
# that is saved up, so that it is not spent all at once.
_TIMING = 0.004
_FIRST_TIMING_STEPS = 3.0
_MOST_SAVED_STEPS = 2.0
# Most rows beyond one a sequence that a step is searched for.
_MOST_ROWS = 64
_MOST_NAMESPACES = 512
# Steps that the achieved rate goes back, and what it starts with.
_RATE_MEMORY = 64.0
_RATE_PRIOR = 8.0
# A step that took so many times what it should says nothing of the rate.
_OUTLIER = 4.0

_NOTHING: tuple[int, ...] = ()


class Controller:
    """Chooses per sequence and step among drafters, and how many tokens; see the head of the file.

    ``curve`` is where the live one starts. ``max_draft``: most tokens of a draft. ``wants_features``:
    whether one of them reads the target's hidden states. ``clock`` times the
    drafters, in seconds. ``observe``'s ``step_ms`` must not contain the time of ``propose``. What a drafter
    raises passes through `propose`.
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
        self._curve = LiveCurve(curve)
        self._asker = Asker(drafters, max_draft, curve.at(1), clock)
        self._sources = self._asker.sources
        self._max_draft = max_draft
        self._wants_features = wants_features
        self._runs: dict[str, Run] = {}
        self._namespaces: dict[str, Namespace] = {}
        # The step under way: what was asked about, by id.
        self._open: dict[str, Run] = {}
        # Rows of the last step that were no decodes: a long prompt is computed in several steps on end.
        self._other_rows = 0
        # By the batch's size, roughly: tokens a sequence and time in units of a plain step, both decayed.
        self._tokens = [_RATE_PRIOR] * 32
        self._time = [_RATE_PRIOR] * 32
        self._timing_ms = _FIRST_TIMING_STEPS * curve.at(1)
        # Not 0: the step under way is made to be timed, and this is the rate that it should have had.
        self._timing_rate = 0.0
        self._sequence_steps = self._committed = 0
        self._idle: dict[str, int] = {}

    @property
    def wants_features(self) -> bool:
        """Whether one of the drafters reads the target's hidden states."""
        return self._wants_features

    def begin(self, sequence: DraftSequence) -> None:
        """The sequence starts or is resumed."""
        for source in self._sources:
            source.drafter.begin(sequence)
        self._run(sequence)

    def end(self, sequence: DraftSequence, learn: bool) -> None:
        """The sequence leaves; its own statistics are forgotten."""
        for source in self._sources:
            source.drafter.end(sequence, learn)
        self._runs.pop(sequence.id, None)

    def propose(
        self, sequences: Sequence[DraftSequence], rows: int, limits: Sequence[int]
    ) -> list[Sequence[int]]:
        """See `Speculator.propose`."""
        self._asker.begin_step()
        self._timing_rate = 0.0
        runs = [self._run(sequence) for sequence in sequences]
        self._open = {}
        for sequence, run in zip(sequences, runs, strict=True):
            self._open[sequence.id] = run
            run.length = len(sequence.tokens)
            if run.fresh or run.chosen >= 0:
                # A step that was never observed: it failed.
                run.fresh, run.chosen = [], -1
        n = len(runs)
        free = [i for i in range(n) if limits[i] > 0] if rows > 0 else []
        if not free:
            for limit in limits:
                self._count("load" if limit > 0 else "limit")
            return [_NOTHING] * n

        curve = self._curve
        plain_ms = curve.at(n)
        speedup = self._speedup(n)
        rate = speedup * n / plain_ms
        if not self._other_rows and curve.doubtful(n):
            for limit in limits:
                self._count("probe" if limit > 0 else "limit")
            return [_NOTHING] * n

        most = min(rows, len(free) * self._max_draft, _MOST_ROWS)
        added = [ms * rate for ms in curve.beyond(n + self._other_rows, most)]
        price = min([cost / k for k, cost in enumerate(added[1 : self._max_draft + 1], 1)])
        best = self._asker.ask(sequences, runs, limits, free, Terms(added, price, rate, plain_ms))
        counts, surplus = admit(best, added)
        self._asker.admitted(best, counts, surplus)
        if not self._other_rows:
            more = more_to_time(best, counts, added, curve, self._timing_ms * rate)
            if more is not None:
                counts, self._timing_rate = more, rate
        return self._choose(runs, limits, best, counts, price)

    def observe(self, outcomes: Sequence[Outcome], rows: int, step_ms: float) -> None:
        """See `Speculator.observe`."""
        curve = self._curve
        drafted = committed = 0
        for outcome in outcomes:
            drawn = outcome.drawn
            drafted += outcome.drafted
            committed += len(drawn)
            run = self._open.pop(outcome.sequence.id, None)
            if run is None:
                continue
            if run.chosen >= 0:
                source = self._sources[run.chosen]
                source.drafts += outcome.drafted > 0
                source.drafted += outcome.drafted
                source.accepted += outcome.accepted
                run.chosen = -1
            if run.fresh or any(run.older):
                self._asker.score(run, drawn, len(outcome.sequence.tokens) - len(drawn))
        n = len(outcomes)
        self._sequence_steps += n
        self._committed += committed
        self._other_rows = max(0, rows - n - drafted)
        if n and not self._other_rows:
            self._learn_times(n, rows, committed, step_ms)
        most = _MOST_SAVED_STEPS * curve.at(max(n, 1))
        self._timing_ms = min(self._timing_ms + _TIMING * step_ms, most)
        self._asker.grant(step_ms, n, most)

    def report(self) -> SpeculationReport:
        """Counts so far. Reasons for nothing drafted: "limit" (the sequence is about to end), "load" (would
        pay alone, or no rows left), "asleep" (no drafter brought enough lately to be asked), "no draft", "not
        worth it", "probe" (a plain step, to time it)."""
        return SpeculationReport(
            steps=self._sequence_steps,
            committed_tokens=self._committed,
            drafters=tuple(
                DrafterReport(
                    source.drafter.name,
                    source.drafts,
                    source.drafted,
                    source.accepted,
                    source.asks,
                    source.asking_ms,
                )
                for source in self._sources
            ),
            idle=dict(self._idle),
        )

    def close(self) -> None:
        """Closes the drafters."""
        for source in self._sources:
            source.drafter.close()

    def _run(self, sequence: DraftSequence) -> Run:
        run = self._runs.get(sequence.id)
        if run is None:
            name = sequence.namespace
            namespace = self._namespaces.get(name)
            if namespace is None:
                if len(self._namespaces) >= _MOST_NAMESPACES:
                    del self._namespaces[next(iter(self._namespaces))]
                namespace = self._namespaces[name] = Namespace(len(self._sources))
            run = self._runs[sequence.id] = Run(namespace)
        return run

    def _count(self, why: str) -> None:
        self._idle[why] = self._idle.get(why, 0) + 1

    def _speedup(self, n: int) -> float:
        b = n.bit_length()
        return max(1.0, self._tokens[b] / self._time[b])

    def _learn_times(self, n: int, rows: int, committed: int, step_ms: float) -> None:
        """A step of decodes alone; the rows of a prompt take another time."""
        curve = self._curve
        most = _OUTLIER * curve.at(rows)
        b, keep = n.bit_length(), 1.0 - 1.0 / _RATE_MEMORY
        self._tokens[b] = self._tokens[b] * keep + committed / n
        self._time[b] = self._time[b] * keep + min(step_ms + self._asker.spent_ms, most) / curve.at(n)
        if self._timing_rate > 0.0:
            # The price of timing is what was lost against the rate.
            self._timing_ms -= max(0.0, min(step_ms, most) - committed / self._timing_rate)
            self._timing_ms = max(self._timing_ms, -_MOST_SAVED_STEPS * curve.at(n))
            self._timing_rate = 0.0
        curve.observe(rows, step_ms)

    def _choose(
        self,
        runs: list[Run],
        limits: Sequence[int],
        best: list[Weighed | None],
        counts: list[int],
        price: float,
    ) -> list[Sequence[int]]:
        """The tokens, and why there are none where there are none."""
        chosen: list[Sequence[int]] = []
        alone = 2.0
        for i, run in enumerate(runs):
            draft = best[i]
            if counts[i] and draft is not None:
                run.chosen = draft.source
                chosen.append(draft.tokens[: counts[i]])
                continue
            chosen.append(_NOTHING)
            if limits[i] <= 0:
                why = "limit"
            else:
                if alone > 1.0:
                    alone = self._price_alone()
                if draft is not None:
                    why = "load" if draft.chances[0] > alone else "not worth it"
                elif len(runs) > 1 and price >= 1.0 > alone:
                    why = "load"
                else:
                    why = "no draft" if self._asker.step in run.asked else "asleep"
            self._count(why)
        return chosen

    def _price_alone(self) -> float:
        """What a row costs a sequence that decodes alone."""
        first = self._curve.at(1)
        return self._speedup(1) * (self._curve.at(2) - first) / first
