"""Speculation without a model: texts whose drafts fail where a known process says so, drafters that cost
simulated time, steps that take what a known curve says, and a loop that plays them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tenfold._native import LiveCurve
from tenfold.protocol import SamplingParams
from tenfold.speculate.base import (
    NO_DRAFT,
    Draft,
    Drafter,
    DraftSequence,
    Outcome,
    SpeculationReport,
    Speculator,
)
from tenfold.speculate.controller import Controller
from tenfold.speculate.cost_curve import CostCurve

WRONG = -1
PROMPT = 4
MAX_DRAFT = 8

Points = tuple[tuple[int, float], ...]
FLAT: Points = ((1, 1.0), (2, 1.07), (4, 1.22), (8, 1.81), (16, 3.7), (32, 7.5))
"""V(rows) of the native core."""
STEEP: Points = ((1, 1.0), (2, 1.46), (4, 2.07), (8, 2.87), (16, 5.0), (32, 9.4))
"""V(rows) of llama.cpp."""


def curve_of(points: Points, one_row_ms: float = 4.5, token_ms: float = 0.0) -> CostCurve:
    """The curve with these V(rows), of a sequence of no tokens."""
    return CostCurve(
        tuple(rows for rows, _ in points), tuple(v * one_row_ms for _, v in points), token_ms=token_ms
    )


def live_curve_of(points: Points) -> LiveCurve:
    """The curve that steps keep true, starting with these V(rows)."""
    curve = curve_of(points)
    return LiveCurve(curve.rows, curve.ms)


@dataclass(frozen=True)
class Kind:
    """A circumstance of a guess: what the drafter says of it, and what is true."""

    weight: float
    """How often texts are in it."""
    stands: tuple[float, ...] = ()
    """True chance of each position given those before it (the last one for all beyond); empty: no draft."""
    claims: float | None = None
    """What the drafter claims for each position; None: the truth."""
    quality: int = 0


@dataclass(frozen=True)
class Process:
    """How a drafter fares along a text: it stays in a kind for ``run`` tokens on average."""

    kinds: tuple[Kind, ...]
    run: float = 1.0

    def play(self, length: int, rng: np.random.Generator) -> list[tuple[Kind, int]]:
        """For each position of the text: the kind, and how many tokens of a draft made there stand."""
        weights = np.array([kind.weight for kind in self.kinds])
        kinds = rng.choice(len(weights), length, p=weights / weights.sum())
        stay = rng.random(length) < 1.0 - 1.0 / self.run
        luck = rng.random((length, MAX_DRAFT * 2))
        played: list[tuple[Kind, int]] = []
        at = kinds[0]
        for p in range(length):
            at = at if stay[p] and p else kinds[p]
            kind = self.kinds[at]
            stood = 0
            if kind.stands:
                last = len(kind.stands) - 1
                while stood < luck.shape[1] and luck[p, stood] < kind.stands[min(stood, last)]:
                    stood += 1
            played.append((kind, stood))
        return played


Class = Sequence[tuple[int, tuple[Process, ...]]]
"""Of texts: from which token on (output tokens of all texts so far) which process per drafter."""


class Clock:
    """Simulated seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class SimSequence:
    """A text under way; its token at index i is i."""

    id: str
    length: int
    fates: list[list[tuple[Kind, int]]]
    namespace: str = ""
    prompt_length: int = PROMPT
    tokens: list[int] = field(init=False)
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    features: None = None

    def __post_init__(self) -> None:
        self.tokens = list(range(self.prompt_length))

    @property
    def left(self) -> int:
        """Tokens still to come."""
        return self.prompt_length + self.length - len(self.tokens)


class SimDrafter:
    """Guesses as a sequence's fate says. A call takes ``call_ms`` and ``each_ms`` for every sequence, both
    times the longest length where ``unrolled``."""

    def __init__(
        self,
        name: str,
        index: int,
        clock: Clock,
        call_ms: float = 0.0,
        each_ms: float = 0.02,
        unrolled: bool = False,
        qualities: int = 4,
    ) -> None:
        self.name = name
        self.qualities = qualities
        self.sequences_asked = 0
        self._index, self._clock = index, clock
        self._call_ms, self._each_ms, self._unrolled = call_ms, each_ms, unrolled

    def begin(self, sequence: DraftSequence) -> None: ...

    def end(self, sequence: DraftSequence, learn: bool) -> None: ...

    def close(self) -> None: ...

    def propose(self, sequences: Sequence[DraftSequence], lengths: Sequence[int]) -> list[Draft]:
        self.sequences_asked += len(sequences)
        times = max(lengths) if self._unrolled else 1
        self._clock.now += (self._call_ms + self._each_ms * len(sequences)) * times / 1e3
        return [self._draft(s, k) for s, k in zip(sequences, lengths, strict=True)]

    def _draft(self, sequence: DraftSequence, length: int) -> Draft:
        assert isinstance(sequence, SimSequence)
        start = len(sequence.tokens)
        kind, stood = sequence.fates[self._index][start - sequence.prompt_length]
        if not kind.stands:
            return NO_DRAFT
        tokens = [start + j if j < stood else WRONG for j in range(length)]
        survival, chance, last = [], 1.0, len(kind.stands) - 1
        for j in range(length):
            chance *= kind.stands[min(j, last)] if kind.claims is None else kind.claims
            survival.append(chance)
        return Draft(tokens, survival, kind.quality)


class Fixed:
    """Verifies ``k`` tokens of one drafter, always; without a drafter, nothing."""

    def __init__(self, drafter: Drafter | None, k: int) -> None:
        self._drafter, self._k = drafter, k

    @property
    def wants_features(self) -> bool:
        return False

    def begin(self, sequence: DraftSequence) -> None: ...

    def end(self, sequence: DraftSequence, learn: bool) -> None: ...

    def close(self) -> None: ...

    def propose(
        self, sequences: Sequence[DraftSequence], rows: int, limits: Sequence[int]
    ) -> list[Sequence[int]]:
        if self._drafter is None:
            return [()] * len(sequences)
        asked = [i for i, limit in enumerate(limits) if limit > 0]
        found: list[Sequence[int]] = [()] * len(sequences)
        if asked:
            lengths = [min(self._k, limits[i]) for i in asked]
            drafts = self._drafter.propose([sequences[i] for i in asked], lengths)
            for i, draft in zip(asked, drafts, strict=True):
                found[i] = draft.tokens
        return found

    def observe(self, outcomes: Sequence[Outcome], rows: int, step_ms: float) -> None: ...

    def report(self) -> SpeculationReport:
        return SpeculationReport(0, 0, (), {})


NOTHING = Process((Kind(1.0),))
SUFFIX_NARROW = Process(
    (Kind(0.25), Kind(0.35, (0.42, 0.5), 0.6), Kind(0.4, (0.85, 0.88, 0.9), 0.9, 2)), run=2
)
SUFFIX_CHAT = Process((Kind(0.4), Kind(0.4, (0.3, 0.35), 0.5), Kind(0.2, (0.75, 0.8), 0.9, 2)), run=2)
SUFFIX_RANDOM = Process((Kind(0.3), Kind(0.7, (0.01,), 0.5)))
SUFFIX_LIES = Process((Kind(1.0, (0.02,), 0.95, 3),))
SUFFIX_BROKEN = Process((Kind(0.25), Kind(0.35, (0.02,), 0.6), Kind(0.4, (0.03,), 0.9, 2)), run=2)
SUFFIX_COPIES = Process((Kind(0.2, (0.3,), 0.5), Kind(0.8, (0.95,), 0.9, 3)), run=20)
SUFFIX_BIMODAL = Process((Kind(0.6, (0.02,), 0.5, 1), Kind(0.4, (0.8, 0.85), 0.5, 1)), run=300)
HEAD_NARROW = Process((Kind(0.3, (0.8,)), Kind(0.7, (0.35, 0.5))))
HEAD_CHAT = Process((Kind(0.2, (0.7,)), Kind(0.8, (0.2, 0.4))))
HEAD_RANDOM = Process((Kind(1.0, (0.02,), 0.4),))

RANDOM: Class = [(0, (SUFFIX_RANDOM, HEAD_RANDOM))]
"""Text that nobody can guess."""
NARROW: Class = [(0, (SUFFIX_NARROW, HEAD_NARROW))]
CHAT: Class = [(0, (SUFFIX_CHAT, HEAD_CHAT))]
HEAD_ONLY: Class = [(0, (NOTHING, HEAD_NARROW))]


@dataclass(frozen=True)
class Scenario:
    """What is played. ``curve`` and ``batch`` are functions of the share of the tokens that is done."""

    texts: Class
    tokens: int = 3000
    length: int = 200
    batch: Callable[[float], int] = lambda done: 1
    curve: Callable[[float], Points] = lambda done: FLAT
    others: Callable[[int], int] = lambda step: 0
    """Rows of prompts in a step."""
    noise: float = 0.03
    one_row_ms: float = 4.5
    prompt: Callable[[int], int] = lambda text: PROMPT
    """Tokens of a text's prompt."""
    token_ms: float = 0.0
    """What each token of a sequence adds to a plain step; with more rows, as much more as V says."""
    namespaces: int = 1


@dataclass
class Played:
    """What came out: milliseconds, steps, and the tokens done and time spent after each step."""

    ms: float = 0.0
    steps: int = 0
    tokens: int = 0
    trace: list[tuple[int, float]] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.ms

    def rate_between(self, first: float, last: float) -> float:
        """Tokens per millisecond between two shares of all tokens."""
        span = [(t, ms) for t, ms in self.trace if first * self.tokens <= t <= last * self.tokens]
        return (span[-1][0] - span[0][0]) / (span[-1][1] - span[0][1])


def play(scenario: Scenario, speculator: Speculator, clock: Clock, seed: int = 0) -> Played:
    """Plays until the tokens are drawn; texts that end are followed by new ones. The texts depend on the
    seed, the scenario and nothing else."""
    noise = np.random.default_rng((seed, 1))
    result, running, count = Played(), list[SimSequence](), 0
    points: Points = ()
    curve = curve_of(FLAT)
    while result.tokens < scenario.tokens:
        done = result.tokens / scenario.tokens
        while len(running) < scenario.batch(done):
            rng = np.random.default_rng((seed, 2, count))
            since = max(first for first, _ in scenario.texts if first <= result.tokens)
            processes = dict(scenario.texts)[since]
            fates = [process.play(scenario.length, rng) for process in processes]
            # Ages are mixed from the start.
            length = (
                scenario.length if count >= scenario.batch(0.0) else int(rng.integers(20, scenario.length))
            )
            name = f"n{count % scenario.namespaces}"
            text = SimSequence(f"s{count}", length, fates, name, scenario.prompt(count))
            running.append(text)
            speculator.begin(text)
            count += 1
        if scenario.curve(done) != points:
            points = scenario.curve(done)
            curve = curve_of(points, scenario.one_row_ms)
        began = clock.now
        drafts = speculator.propose(running, 448, [text.left - 1 for text in running])
        drafted = sum(map(len, drafts))
        rows = len(running) + drafted + scenario.others(result.steps)
        depth = sum(len(text.tokens) for text in running)
        step_ms = curve.at(rows) * (1.0 + scenario.token_ms * depth / curve.at(len(running)))
        step_ms *= float(np.exp(scenario.noise * noise.standard_normal()))
        if noise.random() < 0.003:
            step_ms *= 3.0
        clock.now += step_ms / 1e3
        outcomes = []
        for text, draft in zip(running, drafts, strict=True):
            accepted = 0
            while accepted < len(draft) and draft[accepted] == len(text.tokens) + accepted:
                accepted += 1
            drawn = list(range(len(text.tokens), len(text.tokens) + accepted + 1))
            text.tokens.extend(drawn)
            outcomes.append(Outcome(text, len(draft), accepted, drawn))
            result.tokens += len(drawn)
        speculator.observe(outcomes, rows, step_ms)
        for text in [text for text in running if text.left <= 0]:
            speculator.end(text, learn=True)
            running.remove(text)
        while len(running) > scenario.batch(done):
            speculator.end(running.pop(), learn=False)
        result.steps += 1
        result.ms += (clock.now - began) * 1e3
        result.trace.append((result.tokens, result.ms))
        result.drafted.append(drafted)
    return result


def drafters(clock: Clock) -> tuple[SimDrafter, SimDrafter]:
    """One that costs 30 microseconds a sequence, and a head that costs 0.2 ms and 0.05 ms a sequence for
    every token it unrolls: 0.7 and 5.6 percent of a step of one row."""
    return (
        SimDrafter("suffix", 0, clock, each_ms=0.03),
        SimDrafter("head", 1, clock, call_ms=0.2, each_ms=0.05, unrolled=True),
    )


def play_controller(
    scenario: Scenario, seed: int = 0, start: Points | None = None
) -> tuple[Played, SpeculationReport]:
    """Plays with a controller that starts with the scenario's first curve, or a wrong one."""
    clock = Clock()
    curve = curve_of(start or scenario.curve(0.0), scenario.one_row_ms, scenario.token_ms)
    controller = Controller(drafters(clock), curve, max_draft=MAX_DRAFT, clock=clock)
    return play(scenario, controller, clock, seed), controller.report()


def play_plain(scenario: Scenario, seed: int = 0) -> Played:
    """Plays without drafts."""
    return play(scenario, Fixed(None, 0), Clock(), seed)


def play_fixed(scenario: Scenario, seed: int = 0) -> dict[str, Played]:
    """Plays with each drafter and several lengths, always the same: what could be chosen in hindsight."""
    played = {}
    for index in (0, 1):
        for k in (1, 2, 3, 4, 6):
            clock = Clock()
            drafter = drafters(clock)[index]
            played[f"{drafter.name} {k}"] = play(scenario, Fixed(drafter, k), clock, seed)
    return played
