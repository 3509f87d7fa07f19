"""The speculator that drafts where it was measured to pay.

Every step it looks for the drafts that bring the most tokens per second over the whole batch: it maximises
``expected tokens - rate * time``, where ``rate`` is the rate achieved lately (W. Dinkelbach, "On nonlinear
fractional programming", 1967). Expected tokens come from `Calibration` and `Odds`, time from `LiveCurve`.

Nothing is explored by verifying on trust. Since a text does not depend on who drafted what, every draft that
was asked for, verified or not, is held against the text as it comes (`Shadow`). Three things cannot be
learnt for nothing, and each has an allowance, a small share of the time spent in steps: asking drafters that
do not seem to pay, timing steps of more rows where the curve says that they do not pay, and timing plain
steps where everything is drafted.

Step by step:

1. The price of a row in tokens: what the next rows cost at this batch, times the rate. At one or more, no
   draft can pay ("load").
2. Drafters are asked in the order of their cost, one call each, for the sequences where their gain of late is
   above their cost, and for others as the allowance goes.
3. A sequence takes the draft with the largest sum of (chance that a token stands - price).
4. Tokens of all sequences are admitted by falling chance, as many as maximise the objective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tenfold.speculate.acceptance import shifted
from tenfold.speculate.base import (
    Draft,
    Drafter,
    DrafterReport,
    DraftSequence,
    Outcome,
    SpeculationReport,
)
from tenfold.speculate.controller_state import Namespace, Run, Shadow, Source, context_of
from tenfold.speculate.cost_curve import CostCurve
from tenfold.speculate.cost_curve_live import LiveCurve

# Shares of the time of steps.
_ASKING = 0.0025
# What is left of it for a drafter that has brought nothing for long, and in how many steps it halves.
_LEAST_ASKING = 0.001
_HALVING_STEPS = 1000.0
_TIMING = 0.004
# Gains are estimates: asking must bring so much more than it costs.
_MARGIN = 1.2
# The time, in plain steps, that a drafter is trusted with at the start.
_TRUST_STEPS = 2.0
# And the time for steps that are made to be timed.
_FIRST_TIMING_STEPS = 3.0
# Most rows beyond one a sequence that a step is searched for.
_MOST_ROWS = 64
_MOST_NAMESPACES = 512
# Steps that the achieved rate goes back, and what it starts with.
_RATE_MEMORY = 64.0
_RATE_PRIOR = 8.0
# A step that took so many times what it should says nothing of the rate.
_OUTLIER = 4.0
_GAIN_RATE = 0.08
# What is known of a sequence fades when a drafter is not asked, in so many steps to a half, after so many.
_FADING_STEPS = 64.0
_SOON = 8
_LEAST_CHANCE = 0.02
# Drafts are timed for the curve's sake only if their tokens stand with such a chance on average.
_WORTH_TIMING = 0.2

_NOTHING: tuple[int, ...] = ()


class _Weighed(NamedTuple):
    """A draft that can be verified."""

    source: int
    tokens: Sequence[int]
    chances: list[float]
    """That the first 1, 2 ... stand, with caution; falls."""


class Controller:
    """Chooses per sequence and step among drafters, and how many tokens; see the head of the file.

    ``curve`` is where the live one starts. ``max_draft``: most tokens of a draft. ``clock`` times the
    drafters, in seconds. ``observe``'s ``step_ms`` must not contain the time of ``propose``. What a drafter
    raises passes through `propose`.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        curve: CostCurve,
        *,
        max_draft: int = 8,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._curve = LiveCurve(curve)
        self._sources = [
            Source(i, drafter, max_draft, _TRUST_STEPS * curve.at(1)) for i, drafter in enumerate(drafters)
        ]
        self._max_draft = max_draft
        self._clock = clock
        self._runs: dict[str, Run] = {}
        self._namespaces: dict[str, Namespace] = {}
        # The step under way: runs that were asked about, by id, and the time that asking took.
        self._open: dict[str, Run] = {}
        self._asking_ms = 0.0
        # Rows of the last step that were no decodes: a long prompt is computed in several steps on end.
        self._other_rows = 0
        # By the batch's size, roughly: tokens a sequence and time in units of a plain step, both decayed.
        self._tokens = [_RATE_PRIOR] * 32
        self._time = [_RATE_PRIOR] * 32
        self._timing_ms = _FIRST_TIMING_STEPS * curve.at(1)
        # Not 0: the step under way is made to be timed, and this is the rate that it should have had.
        self._timing_rate = 0.0
        self._step = 0
        self._sequence_steps = self._committed = 0
        self._idle: dict[str, int] = {}

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
        self._step += 1
        self._asking_ms = 0.0
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
        if not self._other_rows and curve.doubtful(n) and self._timing_ms >= (speedup - 1.0) * plain_ms:
            self._timing_rate = rate
            for limit in limits:
                self._count("probe" if limit > 0 else "limit")
            return [_NOTHING] * n

        most = min(rows, len(free) * self._max_draft, _MOST_ROWS)
        added = [ms * rate for ms in curve.beyond(n + self._other_rows, most)]
        price = min([added[k] / k for k in range(1, min(most, self._max_draft) + 1)])
        best = self._ask(sequences, runs, limits, free, price, rate, plain_ms)
        counts = self._admit(best, free, added)
        if not self._other_rows and not any(counts):
            counts = self._time_rows(best, free, n, most, added, rate)
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
                self._score(run, drawn, len(outcome.sequence.tokens) - len(drawn))
        n = len(outcomes)
        self._sequence_steps += n
        self._committed += committed
        self._other_rows = max(0, rows - n - drafted)
        if n and not self._other_rows:
            self._learn_times(n, rows, committed, step_ms)
        # What is saved up is spent at once at most on a step or so.
        most = 2.0 * curve.at(max(n, 1))
        self._timing_ms = min(self._timing_ms + _TIMING * step_ms, most)
        for source in self._sources:
            share = _ASKING * 0.5 ** ((self._step - source.paid_step) / _HALVING_STEPS)
            source.credit_ms = min(
                source.credit_ms + max(share, _LEAST_ASKING) * step_ms, max(most, source.cost_ms(n))
            )

    def report(self) -> SpeculationReport:
        """Counts so far. Reasons for nothing drafted: "limit" (the sequence is about to end), "load" (would
        pay alone, or no rows left), "asleep" (no drafter brought enough lately to be asked), "no draft", "not
        worth it", "probe" (a plain step, to time it)."""
        return SpeculationReport(
            steps=self._sequence_steps,
            committed_tokens=self._committed,
            drafters=tuple(
                DrafterReport(source.drafter.name, source.drafts, source.drafted, source.accepted)
                for source in self._sources
            ),
            idle=dict(self._idle),
        )

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
        self._time[b] = self._time[b] * keep + min(step_ms + self._asking_ms, most) / curve.at(n)
        if self._timing_rate > 0.0:
            # The price of timing is what was lost against the rate.
            self._timing_ms -= max(0.0, min(step_ms, most) - committed / self._timing_rate)
            self._timing_rate = 0.0
        curve.observe(rows, step_ms)

    def _ask(
        self,
        sequences: Sequence[DraftSequence],
        runs: list[Run],
        limits: Sequence[int],
        free: list[int],
        price: float,
        rate: float,
        plain_ms: float,
    ) -> list[_Weighed | None]:
        """The best draft of each sequence."""
        best: list[_Weighed | None] = [None] * len(runs)
        values = [0.0] * len(runs)
        sources = self._sources
        if len(sources) > 1:
            sources = sorted(sources, key=lambda source: source.cost_ms(1))
        for source in sources:
            asked = self._whom(source, runs, values, free, price, rate)
            if not asked:
                continue
            length = source.length(rate, plain_ms, len(asked))
            began = self._clock()
            lengths = [min(length, limits[i]) for i in asked]
            drafts = source.drafter.propose([sequences[i] for i in asked], lengths)
            profile = [0.0] * length
            for i, most, draft in zip(asked, lengths, drafts, strict=True):
                found, value = self._weigh(source, runs[i], draft, most, price, profile)
                self._learn_gain(source, runs[i], values[i], value)
                if found is not None and (best[i] is None or value > values[i]):
                    best[i], values[i] = found, value
            took = (self._clock() - began) * 1e3
            self._asking_ms += took
            source.took(len(asked), length, took)
            source.learn_profile(profile, len(asked))
        return best

    def _whom(
        self, source: Source, runs: list[Run], values: list[float], free: list[int], price: float, rate: float
    ) -> list[int]:
        """The sequences to ask a drafter about."""
        index = source.index
        each = _MARGIN * source.each_ms * rate
        asked: list[int] = []
        if price < 1.0:
            surplus = -_MARGIN * source.call_ms * rate
            for i in free:
                gain = runs[i].gains[index][context_of(values[i])]
                if gain > each:
                    asked.append(i)
                    surplus += gain - each
            if surplus <= 0.0:
                asked = []
        if len(asked) == len(free):
            return asked
        asleep = len(free) - len(asked)
        if source.credit_ms < source.cost_ms(min(asleep, 4)):
            return asked
        left = [i for i in free if i not in asked] if asked else list(free)
        if source.each_ms > 0.0:
            paid = int((source.credit_ms - (0.0 if asked else source.call_ms)) / source.each_ms)
            if paid < asleep:
                left.sort(key=lambda i: runs[i].asked[index])
                left = left[:paid]
        source.credit_ms -= source.cost_ms(len(left)) - (source.call_ms if asked else 0.0)
        return sorted(asked + left)

    def _weigh(
        self, source: Source, run: Run, draft: Draft, most: int, price: float, profile: list[float]
    ) -> tuple[_Weighed | None, float]:
        """Calibrates a draft of which ``most`` tokens are of use, and keeps it as a shadow: the draft with
        its chances, and its net gain in tokens, which is also added to ``profile`` by position."""
        odds = run.odds[source.index]
        gap = self._step - run.asked[source.index]
        if gap > _SOON:
            odds.fade(0.5 ** (gap / _FADING_STEPS))
        tokens, survival, quality = draft
        if not tokens:
            return None, 0.0
        low, cell = source.calibration.low, source.calibration.cell
        factor = odds.factor * run.namespace.odds[source.index].factor
        # Beyond that a token will not be verified, so it need not be looked at.
        least = max(_LEAST_CHANCE, 0.25 * min(price, 1.0))
        value = 0.0
        chance = claimed = 1.0
        chances: list[float] = []
        cells: list[int] = []
        for j in range(min(len(tokens), most)):
            c = cell(quality, j, survival[j] / claimed if claimed > 0.0 else 0.0)
            claimed = survival[j]
            p = low[c] * factor
            chance *= p / (1.0 - low[c] + p)
            cells.append(c)
            chances.append(chance)
            if chance > price:
                value += chance - price
                profile[j] += chance - price
            elif chance < least:
                break
        run.fresh.append(Shadow(source.index, tokens, cells, 0, run.length))
        return _Weighed(source.index, tokens, chances), value

    def _learn_gain(self, source: Source, run: Run, before: float, value: float) -> None:
        """Asking found a draft of this value, where drafters before had found one of value ``before``."""
        gain = max(0.0, value - before)
        if gain > 0.0:
            source.paid_step = self._step
        context = context_of(before)
        gains = run.gains[source.index]
        gap = self._step - run.asked[source.index]
        gains[context] += (gain - gains[context]) * min(0.5, _GAIN_RATE * gap)
        run.namespace.learn_gain(source.index, context, gain)
        run.asked[source.index] = self._step

    def _admit(self, best: list[_Weighed | None], free: list[int], added: list[float]) -> list[int]:
        """How many tokens of each sequence's best draft maximise the objective. ``added[k]``: tokens that k
        rows cost."""
        counts = [0] * len(best)
        candidates = [
            (-chance, i) for i in free if (draft := best[i]) is not None for chance in draft.chances
        ]
        if not candidates:
            return counts
        if len(free) > 1:
            # Chances of a draft fall, so a token never comes before the one it follows; ties go by sequence.
            candidates.sort()
        gain = most = 0.0
        chosen = 0
        for k in range(min(len(candidates), len(added) - 1)):
            gain -= candidates[k][0]
            if gain - added[k + 1] > most:
                most = gain - added[k + 1]
                chosen = k + 1
        for k in range(chosen):
            counts[candidates[k][1]] += 1
        return counts

    def _time_rows(
        self,
        best: list[_Weighed | None],
        free: list[int],
        n: int,
        most: int,
        added: list[float],
        rate: float,
    ) -> list[int]:
        """Nothing pays by the curve: rows for a step that times it where it has not been seen for long, if
        the drafts are good enough for the curve to matter and the allowance pays."""
        counts = [0] * len(best)
        candidates = sorted(
            (-chance, i) for i in free if (draft := best[i]) is not None for chance in draft.chances
        )[:most]
        while candidates and added[len(candidates)] > self._timing_ms * rate:
            candidates.pop()
        wanted = self._curve.stale_between(n, n + len(candidates))
        if wanted is None:
            return counts
        candidates = candidates[: wanted - n]
        gain = -sum(chance for chance, _ in candidates)
        if gain < _WORTH_TIMING * len(candidates):
            return counts
        self._timing_rate = rate
        for _, i in candidates:
            counts[i] += 1
        return counts

    def _choose(
        self,
        runs: list[Run],
        limits: Sequence[int],
        best: list[_Weighed | None],
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
                    why = "no draft" if self._step in run.asked else "asleep"
            self._count(why)
        return chosen

    def _price_alone(self) -> float:
        """What a row costs a sequence that decodes alone."""
        first = self._curve.at(1)
        return self._speedup(1) * (self._curve.at(2) - first) / first

    def _score(self, run: Run, drawn: Sequence[int], index: int) -> None:
        """Holds drafts against ``drawn``, the tokens from ``index`` on."""
        fresh, run.fresh = run.fresh, []
        for k, shadow in enumerate(run.older):
            if shadow is not None:
                run.older[k] = self._compare(run, shadow, drawn) if shadow.at == index else None
        for shadow in fresh:
            left = self._compare(run, shadow, drawn)
            # One at a time is followed further, so that a long draft is judged by its start only once.
            if left is not None and run.older[shadow.source] is None:
                run.older[shadow.source] = left

    def _compare(self, run: Run, shadow: Shadow, drawn: Sequence[int]) -> Shadow | None:
        """What is left of the draft to compare; None once it failed or came true to its end."""
        source, tokens, cells, position, at = shadow
        calibration = self._sources[source].calibration
        namespace, odds = run.namespace.odds[source], run.odds[source]
        for token in drawn:
            cell = cells[position]
            stood = tokens[position] == token
            mean = calibration.mean[cell]
            here = shifted(mean, namespace.factor)
            odds.add(here, stood)
            namespace.add(mean, stood)
            calibration.add(cell, stood)
            position += 1
            if not stood or position == len(cells):
                return None
        return Shadow(source, tokens, cells, position, at + len(drawn)) if drawn else None
