"""What holds for the controller whatever happens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.speculate.base import NO_DRAFT, Draft, DraftSequence, Outcome
from tenfold.speculate.controller import Controller
from tests.helpers.speculation import FLAT, STEEP, Clock, SimSequence, curve_of, live_curve_of


class Arbitrary:
    """Drafts whatever it is told; its call takes any time."""

    qualities = 3

    def __init__(self, name: str, data: st.DataObject, clock: Clock) -> None:
        self.name = name
        self._data, self._clock = data, clock

    def begin(self, sequence: DraftSequence) -> None: ...

    def end(self, sequence: DraftSequence, learn: bool) -> None: ...

    def close(self) -> None: ...

    def propose(self, sequences: Sequence[DraftSequence], lengths: Sequence[int]) -> list[Draft]:
        assert len(sequences) == len(lengths) > 0
        assert all(1 <= length <= 5 for length in lengths)
        self._clock.now += self._data.draw(st.sampled_from([0.0, 1e-5, 1e-3, 1.0]))
        return [self._draft(len(sequence.tokens), k) for sequence, k in zip(sequences, lengths, strict=True)]

    def _draft(self, start: int, most: int) -> Draft:
        length = self._data.draw(st.integers(0, most))
        if not length:
            return NO_DRAFT
        wrong_from = self._data.draw(st.integers(0, length))
        tokens = [start + j if j < wrong_from else -1 for j in range(length)]
        claims = self._data.draw(st.lists(st.floats(0, 1), min_size=length, max_size=length))
        return Draft(tokens, sorted(claims, reverse=True), self._data.draw(st.integers(0, 2)))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_limits_hold_and_nothing_breaks(data: st.DataObject) -> None:
    """Never more tokens than a sequence's limit, none for a limit of 0, never more rows than allowed, only
    tokens that a drafter proposed for that sequence; whatever the drafters claim and cost, in whatever order
    outcomes come, for sequences that end before or after they are observed, steps that fail (never observed),
    engines that verify less than was proposed, and steps with prompts. The counts agree."""
    clock = Clock()
    names = data.draw(st.sampled_from([[], ["a"], ["a", "b"]]))
    controller = Controller(
        [Arbitrary(name, data, clock) for name in names],
        curve_of(data.draw(st.sampled_from([FLAT, STEEP]))),
        max_draft=5,
        clock=clock,
    )
    running: list[SimSequence] = []
    steps = committed = drafted = born = 0
    for _ in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0, 3))):
            running.append(SimSequence(f"s{born}", 1000, [], namespace=data.draw(st.sampled_from("xy"))))
            controller.begin(running[-1])
            born += 1
        if not running:
            continue
        rows = data.draw(st.sampled_from([0, 1, 2, 7, 400]))
        limits = [data.draw(st.sampled_from([0, 1, 3, 500])) for _ in running]
        drafts = controller.propose(running, rows, limits)
        assert len(drafts) == len(running)
        assert sum(map(len, drafts)) <= rows
        for draft, limit, sequence in zip(drafts, limits, running, strict=True):
            assert len(draft) <= min(limit, 5)
            allowed = range(len(sequence.tokens), len(sequence.tokens) + len(draft))
            assert all(token in (-1, right) for token, right in zip(draft, allowed, strict=True))
        if data.draw(st.integers(0, 9)) == 0:
            continue
        outcomes = []
        for sequence, draft, limit in zip(running, drafts, limits, strict=True):
            verified = data.draw(st.integers(0, len(draft))) if data.draw(st.booleans()) else len(draft)
            accepted = 0
            while accepted < verified and draft[accepted] == len(sequence.tokens) + accepted:
                accepted += 1
            drawn = list(range(len(sequence.tokens), len(sequence.tokens) + accepted + 1))
            if not limit:
                drawn = drawn[: data.draw(st.integers(0, 1))]
            sequence.tokens.extend(drawn)
            outcomes.append(Outcome(sequence, verified, min(accepted, len(drawn)), drawn))
            steps, committed, drafted = steps + 1, committed + len(drawn), drafted + verified
        gone = [sequence for sequence in running if data.draw(st.integers(0, 4)) == 0]
        if early := data.draw(st.booleans()):
            for sequence in gone:
                controller.end(sequence, learn=True)
        others = data.draw(st.sampled_from([0, 0, 300]))
        step_rows = len(outcomes) + sum(outcome.drafted for outcome in outcomes) + others
        step_ms = data.draw(st.sampled_from([0.0, 0.01, 4.5, 1000.0]))
        controller.observe(data.draw(st.permutations(outcomes)), step_rows, step_ms)
        if not early:
            for sequence in gone:
                controller.end(sequence, learn=False)
        running = [sequence for sequence in running if sequence not in gone]
    report = controller.report()
    assert (report.steps, report.committed_tokens) == (steps, committed)
    assert [drafter.name for drafter in report.drafters] == names
    assert sum(drafter.drafted_tokens for drafter in report.drafters) == drafted
    assert all(d.drafts <= d.drafted_tokens >= d.accepted_tokens for d in report.drafters)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 90), st.floats(0.001, 1e5)), max_size=60))
def test_the_live_curve_stays_a_curve(steps: list[tuple[int, float]]) -> None:
    """After any steps, every time is positive and finite, and more rows never cost less than nothing."""
    live = live_curve_of(FLAT)
    for rows, ms in steps:
        live.observe(rows, ms)
    assert all(0 < live.at(rows) < math.inf for rows in range(1, 100))
    added = live.beyond(3, 60)
    assert added[0] == 0 and added == sorted(added)
