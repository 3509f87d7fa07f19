"""How soon the controller notices that something has changed, in simulated time."""

from __future__ import annotations

import pytest

from tests.helpers.speculation import (
    FLAT,
    HEAD_NARROW,
    HEAD_RANDOM,
    NARROW,
    NOTHING,
    RANDOM,
    STEEP,
    SUFFIX_BROKEN,
    SUFFIX_NARROW,
    Class,
    Played,
    Points,
    Scenario,
    play_controller,
    play_plain,
)

LINEAR: Points = tuple((rows, float(rows)) for rows in (1, 2, 4, 8, 16, 32))
"""V(rows) of a machine without room: no draft ever pays much."""


def speedups(played: Scenario, seed: int, start: Points | None, *parts: tuple[float, float]) -> list[float]:
    """Over plain decoding in some parts of the tokens."""
    plain, (controlled, _) = play_plain(played, seed), play_controller(played, seed, start)
    return [controlled.rate_between(*part) / plain.rate_between(*part) for part in parts]


def steps_until(played: Played, tokens: int, wanted: float) -> int:
    """Steps after so many tokens until 20 steps on end bring ``wanted`` tokens a step."""
    done = [t for t, _ in played.trace]
    first = next(i for i, t in enumerate(done) if t >= tokens)
    for i in range(first, len(done) - 20):
        if (done[i + 20] - done[i]) / 20 >= wanted:
            return i - first
    return len(done)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("good", "limit"),
    [((SUFFIX_NARROW, HEAD_RANDOM), 40), ((NOTHING, HEAD_NARROW), 250)],
    ids=["suffix", "head"],
)
def test_comes_back_by_itself(good: tuple[object, ...], limit: int, seed: int) -> None:
    """After 1200 tokens that nobody could guess, drafting is on again within 40 steps for a cheap drafter and
    250 for a costly one, which is asked about once in 50 while it is off."""
    texts: Class = [(0, RANDOM[0][1]), (1200, good)]  # type: ignore[list-item]
    played, _ = play_controller(Scenario(texts, 2600, length=100), seed)
    # Texts that began before the change go on for up to 100 tokens.
    assert steps_until(played, 1300, 1.4) <= limit


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_stops_when_a_drafter_breaks(seed: int) -> None:
    """A drafter that loses its touch and goes on claiming is left alone: the first 400 tokens cost at most
    six percent, and what follows at most two."""
    texts: Class = [(0, (SUFFIX_NARROW, HEAD_RANDOM)), (1500, (SUFFIX_BROKEN, HEAD_RANDOM))]
    played = Scenario(texts, 3000, length=100)
    # Texts that began before the change go on for up to 100 tokens.
    first, later = speedups(played, seed, None, (1600 / 3000, 2000 / 3000), (2000 / 3000, 1.0))
    assert first >= 0.94
    assert later >= 0.98


@pytest.mark.parametrize("seed", [0, 1])
def test_off_under_load_and_on_again(seed: int) -> None:
    """At batch 16 next to nothing is drafted (some for timing), and drafting is back as soon as the load is
    gone: the last quarter is as fast as the first one."""
    played = Scenario(NARROW, 8000, batch=lambda done: 16 if 0.3 < done < 0.7 else 1)
    first, busy, last = speedups(played, seed, None, (0.1, 0.3), (0.35, 0.65), (0.72, 1.0))
    controlled, report = play_controller(played, seed)
    assert report.idle["load"] > 100
    assert busy >= 0.98
    assert last >= 0.93 * first
    assert first >= 1.7
    busy_steps = [
        drafted
        for drafted, (tokens, _) in zip(controlled.drafted, controlled.trace, strict=True)
        if 0.35 < tokens / 8000 < 0.65
    ]
    assert sum(busy_steps) <= 0.02 * 16 * len(busy_steps)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("start", "truth", "least"),
    [(STEEP, FLAT, 1.7), (LINEAR, FLAT, 1.6), (FLAT, STEEP, 1.25), (FLAT, LINEAR, 0.98)],
    ids=["too steep", "far too steep", "too flat", "far too flat"],
)
def test_a_wrong_curve_is_healed(start: Points, truth: Points, least: float, seed: int) -> None:
    """A start-up measurement that was wrong by up to a factor of four is corrected by the steps themselves:
    from a third of 3600 tokens on, speed is what the true curve allows."""
    played = Scenario(NARROW, 3600, curve=lambda done: truth)
    assert speedups(played, seed, start, (0.35, 1.0))[0] >= least


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("before", "after", "least"), [(FLAT, LINEAR, 0.98), (LINEAR, FLAT, 1.7)], ids=["worse", "better"]
)
def test_a_curve_that_changes_is_followed(before: Points, after: Points, least: float, seed: int) -> None:
    """A machine that loses or gains its room in mid-run: 600 tokens later, speed is what it now allows."""
    played = Scenario(NARROW, 4000, curve=lambda done: before if done < 0.4 else after)
    whole, late = speedups(played, seed, None, (0.01, 1.0), (0.55, 1.0))
    assert whole >= 0.98
    assert late >= least
