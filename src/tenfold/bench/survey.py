"""What became of drafts in some requests, kept so that the gain in others like them can be forecast.

A step of a sequence is told by who was asked for a draft, whose draft was checked and how many tokens of it.
Steps that are alike in that are one `Situation`, with the product-limit estimate of how far such drafts stand
(Kaplan and Meier, 1958): a draft that was cut off by the end of its answer says nothing of what came behind.
So the forecast for the machine that the survey was made on is what the controller did there, at the cost of
steps as it is measured today; on another machine `acceptance_forecast` makes less of the same drafts where
that is better.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from tenfold.bench.recording import Recorder, judged_of
from tenfold.speculate.acceptance_forecast import AskingCost, Situation, forecast
from tenfold.speculate.base import DraftSequence, Outcome, Speculator
from tenfold.speculate.cost_curve import CostCurve
from tenfold.traffic.repetition import repetitive
from tenfold.traffic.running import Done

EVIDENCE = "evidence.json"
"""In a drafter's folder: what it was made of and what it is worth, a `Survey` among it."""
SURVEYED = 20
"""Most requests of a class that are surveyed."""
FEWEST = 5
"""With fewer answers of a class nothing is forecast for it."""
LEAST = 0.001
"""Survival of tokens that never stood: they were checked, and their rows cost time."""


class Sort(NamedTuple):
    """Requests that drafts fare alike in: what the target draws with noise is harder to guess."""

    kind: str
    """The class of traffic."""
    sampled: bool
    """At a temperature above 0."""

    @property
    def name(self) -> str:
        """In the evidence."""
        return f"{self.kind}, {'sampled' if self.sampled else 'greedy'}"


class ClassSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """One sort of traffic, but for answers that go in circles."""

    answers: int
    decode_tokens: int
    """Those after an answer's first."""
    situations: tuple[Situation, ...]


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """Of requests that were computed one after another."""

    classes: dict[str, ClassSurvey] = {}
    """By the name of the sort, and all of a class by that of the class, for a class that is too small to be
    parted: those of which anything is known."""
    costs: dict[str, AskingCost] = {}
    """By drafter."""
    deciding_ms: float = 0.0
    """Of the speculator in a step, beyond the drafters' time."""
    overhead_ms: float = 0.0
    """Of a step, beyond all that: with speculation and without."""

    def forecast(
        self, curve: CostCurve, requests: Mapping[Sort, int], sequences: int = 1
    ) -> dict[str, float]:
        """The speed-up of decoding by class, where steps cost what ``curve`` says and ``sequences`` decode
        together; and of all ``requests`` (how many of each sort) as ``overall``. Of a class that has requests
        of an unknown sort nothing is forecast, nor then of all."""
        curve = CostCurve(curve.rows, tuple(ms + self.overhead_ms for ms in curve.ms))
        tokens: dict[str, float] = {}
        spent: dict[str, float] = {}
        unknown = set()
        for sort, count in requests.items():
            known = self.classes.get(sort.name, self.classes.get(sort.kind))
            if known is None:
                unknown.add(sort.kind)
                continue
            found = forecast(
                curve, known.situations, self.costs, sequences=sequences, deciding_ms=self.deciding_ms
            )
            expected = count * known.decode_tokens / known.answers
            tokens[sort.kind] = tokens.get(sort.kind, 0.0) + expected
            spent[sort.kind] = spent.get(sort.kind, 0.0) + expected / found.speedup
        speedups = {kind: tokens[kind] / spent[kind] for kind in tokens if kind not in unknown}
        if speedups and not unknown:
            speedups["overall"] = sum(tokens.values()) / sum(spent.values())
        return speedups

    @classmethod
    def merged(cls, surveys: Sequence[Survey]) -> Survey:
        """Several of the same machine, of different sorts of requests; their costs are averaged."""
        count = max(1, len(surveys))
        costs: dict[str, AskingCost] = {}
        for name in dict.fromkeys(name for survey in surveys for name in survey.costs):
            every = [survey.costs[name] for survey in surveys if name in survey.costs]
            costs[name] = AskingCost(
                call_ms=sum(one.call_ms for one in every) / len(every),
                each_ms=sum(one.each_ms for one in every) / len(every),
            )
        return cls(
            classes={sort: known for survey in surveys for sort, known in survey.classes.items()},
            costs=costs,
            deciding_ms=sum(survey.deciding_ms for survey in surveys) / count,
            overhead_ms=sum(survey.overhead_ms for survey in surveys) / count,
        )


class Step(NamedTuple):
    """Of one sequence."""

    asked: frozenset[str]
    """Drafters."""
    chosen: str | None
    """Whose draft was checked, ..."""
    drafted: int
    """... how many tokens of it, ..."""
    judged: int
    """... how many of those the target judged, ..."""
    accepted: int
    """... and how many stood."""
    step_ms: float


class Surveyor(Recorder):
    """A `Recorder` that keeps every step. For one sequence at a time: then what is new in the speculator's
    report is of that sequence."""

    def __init__(self, speculator: Speculator, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(speculator)
        self._clock = clock
        self._first = self._before = speculator.report()
        self._steps: list[Step] = []
        self._kept: dict[str, list[tuple[Done, list[Step]]]] = {}
        self._all: list[tuple[Done, list[Step]]] = []
        self._calls_s = self._noting_s = 0.0

    def begin(self, sequence: DraftSequence) -> None:
        """As the other."""
        with self._timed():
            super().begin(sequence)

    def end(self, sequence: DraftSequence, learn: bool) -> None:
        """As the other."""
        with self._timed():
            super().end(sequence, learn)

    def propose(
        self, sequences: Sequence[DraftSequence], rows: int, limits: Sequence[int]
    ) -> list[Sequence[int]]:
        """As the other."""
        with self._timed():
            return super().propose(sequences, rows, limits)

    def observe(self, outcomes: Sequence[Outcome], rows: int, step_ms: float) -> None:
        """Notes the step."""
        with self._timed():
            super().observe(outcomes, rows, step_ms)
        began = self._clock()
        self._note(outcomes, step_ms)
        self._noting_s += self._clock() - began

    def _note(self, outcomes: Sequence[Outcome], step_ms: float) -> None:
        (outcome,) = outcomes
        before = {drafter.name: drafter for drafter in self._before.drafters}
        self._before = self.report()
        asked, chosen = set(), None
        for drafter in self._before.drafters:
            if drafter.asks > before[drafter.name].asks:
                asked.add(drafter.name)
            if drafter.drafts > before[drafter.name].drafts:
                chosen = drafter.name
        self._steps.append(
            Step(frozenset(asked), chosen, outcome.drafted, judged_of(outcome), outcome.accepted, step_ms)
        )

    def forget(self) -> None:
        """The steps since the last call of `keep` were of no request that counts."""
        self._steps, self._calls_s, self._noting_s = [], 0.0, 0.0
        self._first = self._before

    def keep(self, kind: str, done: Done) -> None:
        """The steps since the last call were those of this request."""
        self.take(done.job.id)
        for name in (kind, Sort(kind, done.job.params.temperature > 0).name):
            self._kept.setdefault(name, []).append((done, self._steps))
        self._all.append((done, self._steps))
        self._steps = []

    def survey(self) -> Survey:
        """What was found in all that was kept."""
        names = [drafter.name for drafter in self._before.drafters]
        every = self._all
        costs, asking_ms = self._costs()
        count = max(1, sum(len(steps) for _, steps in every))
        calls_ms = 1e3 * self._calls_s
        rest_ms = 1e3 * sum(done.ended - done.first for done, _ in every)
        rest_ms -= calls_ms + 1e3 * self._noting_s
        rest_ms -= sum(step.step_ms for _, steps in every for step in steps)
        classes = {}
        for kind, kept in self._kept.items():
            varied = [(done, steps) for done, steps in kept if not repetitive(done.tokens)]
            if len(varied) >= FEWEST and any(steps for _, steps in varied):
                classes[kind] = ClassSurvey(
                    answers=len(varied),
                    decode_tokens=sum(len(done.tokens) - done.first_count for done, _ in varied),
                    situations=situations_of([step for _, steps in varied for step in steps], names),
                )
        return Survey(
            classes=classes,
            costs=costs,
            deciding_ms=max(0.0, calls_ms - asking_ms) / count,
            overhead_ms=max(0.0, rest_ms) / count,
        )

    def _costs(self) -> tuple[dict[str, AskingCost], float]:
        """By drafter, and the time of all."""
        before = {drafter.name: drafter for drafter in self._first.drafters}
        costs, all_ms = {}, 0.0
        for drafter in self._before.drafters:
            asks = drafter.asks - before[drafter.name].asks
            ms = drafter.asking_ms - before[drafter.name].asking_ms
            all_ms += ms
            if asks:
                # How much of it is for the call whatever the sequences, one sequence cannot tell.
                costs[drafter.name] = AskingCost(call_ms=ms / asks / 2, each_ms=ms / asks / 2)
        return costs, all_ms

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            self._calls_s += self._clock() - began


def situations_of(steps: Sequence[Step], names: Iterable[str]) -> tuple[Situation, ...]:
    """Steps of a class, alike ones together; ``names`` are those of all drafters."""
    groups: dict[tuple[frozenset[str], str, int], list[Step]] = {}
    for step in steps:
        groups.setdefault((step.asked, step.chosen or "", step.drafted), []).append(step)
    found = []
    for asked, chosen, drafted in sorted(groups, key=lambda key: (sorted(key[0]), *key[1:])):
        group = groups[asked, chosen, drafted]
        survival, standing = [], 1.0
        for position in range(drafted):
            judged = sum(step.judged > position for step in group)
            standing *= sum(step.accepted > position for step in group) / judged if judged else 0.0
            survival.append(max(standing, LEAST))
        found.append(
            Situation(
                len(group) / len(steps),
                {chosen: survival} if chosen and drafted else {},
                tuple(name for name in names if name not in asked),
            )
        )
    return tuple(found)


def read_survey(folder: Path) -> Survey:
    """Of the drafter in ``folder``; an empty one if it has no evidence. Raises OSError, ValueError for a file
    that cannot be read."""
    path = folder / EVIDENCE
    if not path.exists():
        return Survey()
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Evidence).survey
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}; train the drafter again, or remove the file") from None


class _Evidence(msgspec.Struct, frozen=True):
    survey: Survey = Survey()


def forecast_line(found: Mapping[str, float]) -> str:
    """For people, before a run."""
    if not found:
        return "No forecast: nothing is known of this traffic yet."
    return "Forecast of the speed-up: " + ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in found.items())
