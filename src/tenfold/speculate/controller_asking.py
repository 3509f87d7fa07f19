"""Asking drafters, and learning from the text how far their drafts come true."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from tenfold.speculate.acceptance import shifted
from tenfold.speculate.base import Draft, Drafter, DraftSequence
from tenfold.speculate.controller_state import Run, Shadow, Source, context_of

# Share of the time of steps that may go into asking a drafter that does not seem to pay.
_ASKING = 0.0025
# What is left of it for a drafter that has brought nothing for long, and in how many steps it halves.
_LEAST_ASKING = 0.001
_HALVING_STEPS = 1000.0
# The time, in plain steps, that a drafter is trusted with at the start, and the calls it may make whatever
# the first of them took: one that was held up says nothing of the next.
_TRUST_STEPS = 2.0
_TRUSTED_CALLS = 3
# Gains are estimates: asking must bring so much more than it costs.
_MARGIN = 1.1
_GAIN_RATE = 0.05
# What is known of a sequence fades when a drafter is not asked, in so many steps to a half, after so many.
_FADING_STEPS = 64.0
_SOON = 8
_LEAST_CHANCE = 0.02
_LEAST_ROOM = 0.02
_TOGETHER_MEMORY = 64.0
_SORTED_EVERY = 16
_TOGETHER_PRIOR = 2.0


class Weighed(NamedTuple):
    """A draft that can be verified."""

    source: int
    tokens: Sequence[int]
    chances: list[float]
    """That the first 1, 2 ... stand, with caution; falls."""
    gains: list[float]
    """Tokens that each position would bring beyond its rows, were it the only draft in the step."""
    value: float
    """Their sum."""


class Terms(NamedTuple):
    """What time is worth in a step."""

    added: Sequence[float]
    """What 0, 1, 2 ... rows more cost, in tokens."""
    price: float
    """Of a row at its cheapest, in tokens."""
    rate: float
    """Tokens per millisecond."""
    plain_ms: float
    """A step without drafts."""

    @property
    def room(self) -> float:
        """What gains shrink by as the price rises from 0 to 1: those of chances that are spread evenly do so
        with its square. Gains are learnt and used in this unit, so that they hold when the load changes."""
        return max(_LEAST_ROOM, (1.0 - self.price) ** 2) if self.price < 1.0 else 0.0


class Asker:
    """The drafters, with what is known of them."""

    def __init__(
        self, drafters: Sequence[Drafter], max_draft: int, one_row_ms: float, clock: Callable[[], float]
    ) -> None:
        self.sources = [
            Source(i, drafter, max_draft, _TRUST_STEPS * one_row_ms) for i, drafter in enumerate(drafters)
        ]
        self._by_cost = list(self.sources)
        self.step = 0
        self.spent_ms = 0.0
        """In drafters, in this step."""
        self._clock = clock
        # By the batch's size, roughly: what drafts brought in steps that all sequences were asked for, and
        # what they would have brought one by one, in tokens, decayed. The cheapest rows are shared.
        self._together = [_TOGETHER_PRIOR] * 32
        self._alone = [_TOGETHER_PRIOR] * 32
        self._asked_all = False
        # In this step: source, sequences, length, room.
        self._calls: list[tuple[Source, int, int, float]] = []

    def begin_step(self) -> None:
        """Before anything is asked in a step."""
        self.step += 1
        self.spent_ms = 0.0
        self._asked_all = False
        self._calls.clear()

    def admitted(self, best: Sequence[Weighed | None], counts: Sequence[int], surplus: float) -> None:
        """How many tokens of each draft were admitted, and what they bring, all together, beyond their
        rows."""
        alone = sum(draft.value for draft in best if draft is not None)
        if self._asked_all and alone > 0.0:
            b, keep = len(best).bit_length(), 1.0 - 1.0 / _TOGETHER_MEMORY
            self._together[b] = self._together[b] * keep + surplus
            self._alone[b] = self._alone[b] * keep + alone
        for source, asked, length, room in self._calls:
            gains = [0.0] * length
            for draft, count in zip(best, counts, strict=True):
                if count and draft is not None and draft.source == source.index:
                    for j in range(count):
                        gains[j] += draft.gains[j] / room
            source.learn_profile(gains, asked)

    def grant(self, step_ms: float, sequences: int, most_ms: float) -> None:
        """A step went by: allowances grow, up to ``most_ms`` or one call."""
        for source in self.sources:
            share = _ASKING * 0.5 ** ((self.step - source.paid_step) / _HALVING_STEPS)
            source.credit_ms = min(
                source.credit_ms + max(share, _LEAST_ASKING) * step_ms,
                max(most_ms, source.cost_ms(sequences)),
            )

    def ask(
        self,
        sequences: Sequence[DraftSequence],
        runs: list[Run],
        limits: Sequence[int],
        free: list[int],
        terms: Terms,
    ) -> list[Weighed | None]:
        """The best draft of each sequence, of those that are ``free`` to have one: one call of each drafter
        at most, cheapest first, so that a costly one is asked where the others found nothing."""
        best: list[Weighed | None] = [None] * len(runs)
        values = [0.0] * len(runs)
        room = terms.room
        if self.step % _SORTED_EVERY == 1:
            self._by_cost.sort(key=lambda source: source.cost_ms(1))
        for source in self._by_cost:
            asked = self._whom(source, runs, values, free, terms)
            if not asked:
                continue
            length = source.length(terms.rate / room if room else inf, terms.plain_ms, len(asked))
            began = self._clock()
            lengths = [min(length, limits[i]) for i in asked]
            self._asked_all = self._asked_all or len(asked) == len(free)
            drafts = source.drafter.propose([sequences[i] for i in asked], lengths)
            for i, most, draft in zip(asked, lengths, drafts, strict=True):
                found, value = self._weigh(source, runs[i], draft, most, terms)
                self._learn_gain(source, runs[i], values[i], value, room)
                if found is not None and (best[i] is None or value > values[i]):
                    best[i], values[i] = found, value
            took = (self._clock() - began) * 1e3
            self.spent_ms += took
            source.took(len(asked), length, took)
            if room:
                self._calls.append((source, len(asked), length, room))
        return best

    def _whom(
        self, source: Source, runs: list[Run], values: list[float], free: list[int], terms: Terms
    ) -> list[int]:
        """The sequences to ask a drafter about."""
        index = source.index
        each = _MARGIN * source.each_ms * terms.rate
        asked: list[int] = []
        room = terms.room
        if room:
            b = len(runs).bit_length()
            scale = room * self._together[b] / self._alone[b]
            surplus = -_MARGIN * source.call_ms * terms.rate
            for i in free:
                gain = runs[i].gains[index][context_of(values[i])] * scale
                if gain > each:
                    asked.append(i)
                    surplus += gain - each
            if surplus <= 0.0:
                asked = []
        if len(asked) == len(free):
            return asked
        asleep = len(free) - len(asked)
        trusted = source.calls < _TRUSTED_CALLS
        if source.credit_ms < source.cost_ms(min(asleep, 4)) and not trusted:
            return asked
        left = [i for i in free if i not in asked] if asked else list(free)
        if source.each_ms > 0.0:
            paid = int((source.credit_ms - (0.0 if asked else source.call_ms)) / source.each_ms)
            paid = max(paid, int(trusted))
            if paid < asleep:
                left.sort(key=lambda i: runs[i].asked[index])
                left = left[:paid]
        spent = source.cost_ms(len(left)) - (source.call_ms if asked else 0.0)
        source.credit_ms -= min(spent, max(source.credit_ms, 0.0)) if trusted else spent
        return sorted(asked + left)

    def _weigh(
        self, source: Source, run: Run, draft: Draft, most: int, terms: Terms
    ) -> tuple[Weighed | None, float]:
        """Calibrates a draft of which ``most`` tokens are of use, and keeps it as a shadow: the draft with
        its chances, and its net gain in tokens."""
        odds = run.odds[source.index]
        gap = self.step - run.asked[source.index]
        if gap > _SOON:
            odds.fade(0.5 ** (gap / _FADING_STEPS))
        tokens, survival, quality = draft
        if not tokens:
            return None, 0.0
        low, cell = source.calibration.low, source.calibration.cell
        common = run.namespace.odds[source.index].factor
        own, share = odds.factor * common, run.namespace.blends[source.index].share
        # Beyond that a token will not be verified, so it need not be looked at.
        least = max(_LEAST_CHANCE, 0.25 * min(terms.price, 1.0))
        added = terms.added
        value = expected = 0.0
        chance = claimed = 1.0
        chances: list[float] = []
        cells: list[int] = []
        gains: list[float] = []
        for j in range(min(len(tokens), most, len(added) - 1)):
            c = cell(quality, j, survival[j] / claimed if claimed > 0.0 else 0.0)
            claimed = survival[j]
            p = low[c]
            here = p * common / (1.0 - p + p * common)
            chance *= here + share * (p * own / (1.0 - p + p * own) - here)
            cells.append(c)
            chances.append(chance)
            expected += chance
            gain = expected - added[j + 1] - value
            gains.append(max(gain, 0.0))
            if gain > 0.0:
                value += gain
            elif chance < least:
                break
        run.fresh.append(Shadow(source.index, tokens, cells, 0, run.length))
        return Weighed(source.index, tokens, chances, gains, value), value

    def _learn_gain(self, source: Source, run: Run, before: float, value: float, room: float) -> None:
        """Asking found a draft of this value, where drafters before had found one of value ``before``."""
        gain = max(0.0, value - before)
        if gain > 0.0:
            source.paid_step = self.step
        if room:
            # Where no draft can pay, nothing is learnt of how much one would.
            context = context_of(before)
            gains = run.gains[source.index]
            gap = self.step - run.asked[source.index]
            gains[context] += (gain / room - gains[context]) * min(0.5, _GAIN_RATE * gap)
            run.namespace.learn_gain(source.index, context, gain / room)
        run.asked[source.index] = self.step

    def score(self, run: Run, drawn: Sequence[int], index: int) -> None:
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
        calibration = self.sources[source].calibration
        namespace, odds, blend = run.namespace.odds[source], run.odds[source], run.namespace.blends[source]
        for token in drawn:
            cell = cells[position]
            stood = tokens[position] == token
            mean = calibration.mean[cell]
            here = shifted(mean, namespace.factor)
            blend.add(here, shifted(here, odds.factor), stood)
            odds.add(here, stood)
            namespace.add(mean, stood)
            calibration.add(cell, stood)
            position += 1
            if not stood or position == len(cells):
                return None
        return Shadow(source, tokens, cells, position, at + len(drawn)) if drawn else None
