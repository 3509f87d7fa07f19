"""Calibration of what drafters claim."""

from __future__ import annotations

import numpy as np
import pytest

from tenfold._native import Blend, Calibration, Odds, shifted


def teach(calibration: Calibration, cell: int, chance: float, trials: int, seed: int = 0) -> None:
    for luck in np.random.default_rng(seed).random(trials):
        calibration.add(cell, bool(luck < chance))


@pytest.mark.parametrize("claim", [0.05, 0.3, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("truth", [0.02, 0.5, 0.97])
def test_claims_are_replaced_by_what_happens(claim: float, truth: float) -> None:
    """After 300 trials the estimate is the truth within 0.12, whatever was claimed, and is not above it by
    more than 0.08 when lowered by caution."""
    calibration = Calibration(3)
    cell = calibration.cell(1, 0, claim)
    teach(calibration, cell, truth, 300)
    assert abs(calibration.mean(cell) - truth) < 0.12
    assert calibration.low(cell) < truth + 0.08


def test_a_liar_is_known_in_cells_not_seen_yet() -> None:
    """Where a class of claims turned out false, other qualities and positions with such claims are doubted
    too; claims of another class are not."""
    calibration = Calibration(4)
    fresh, other = calibration.cell(3, 2, 0.9), calibration.cell(3, 2, 0.5)
    before = calibration.mean(fresh), calibration.mean(other)
    teach(calibration, calibration.cell(0, 0, 0.9), 0.02, 60)
    assert calibration.mean(fresh) < 0.2 < before[0]
    assert calibration.mean(other) == before[1]


def test_little_evidence_is_doubted_more() -> None:
    """Caution takes off much at the start and little once there are many trials."""
    calibration = Calibration(1)
    cell = calibration.cell(0, 0, 0.7)
    at_first = calibration.mean(cell) - calibration.low(cell)
    teach(calibration, cell, 0.6, 500)
    assert at_first > 2 * (calibration.mean(cell) - calibration.low(cell)) > 0


def test_a_change_is_followed() -> None:
    """A cell that held for 2000 trials and then fails is below a third of what it was after 200 more."""
    calibration = Calibration(1)
    cell = calibration.cell(0, 0, 0.9)
    teach(calibration, cell, 0.9, 2000)
    teach(calibration, cell, 0.05, 200, seed=1)
    assert calibration.mean(cell) < 0.3


def test_odds_learn_and_fade() -> None:
    """A sequence whose drafts fail gets lower odds within ten trials, one whose drafts stand higher ones,
    and without trials both return to what is expected."""
    bad, good = Odds(12, 2), Odds(12, 2)
    for _ in range(10):
        bad.add(0.5, False)
        good.add(0.5, True)
    assert shifted(0.5, bad.factor) < 0.2
    assert shifted(0.5, good.factor) > 0.8
    for odds in (bad, good):
        odds.fade(0.01)
        assert odds.factor == pytest.approx(1, abs=0.1)


def test_odds_are_neutral_where_things_go_as_expected() -> None:
    """If drafts stand as often as expected, the factor stays around 1."""
    odds = Odds(64, 4)
    factors = []
    for luck in np.random.default_rng(3).random(2000):
        odds.add(0.3, bool(luck < 0.3))
        factors.append(odds.factor)
    assert 0.8 < float(np.median(factors)) < 1.25


@pytest.mark.parametrize(("chances", "low", "high"), [((0.5,), 0.0, 0.3), ((0.05, 0.95), 0.7, 1.0)])
def test_sequences_are_told_apart_where_they_differ(
    chances: tuple[float, ...], low: float, high: float
) -> None:
    """Where all sequences are alike, their own odds come to count little; where half are hopeless and half
    are sure, much."""
    rng = np.random.default_rng(5)
    blend = Blend(400, 0.7, 1.0)
    common = sum(chances) / len(chances)
    for sequence in range(60):
        odds = Odds(20, 2.5)
        for luck in rng.random(30):
            stood = bool(luck < chances[sequence % len(chances)])
            blend.add(common, shifted(common, odds.factor), stood)
            odds.add(common, stood)
    assert low <= blend.share <= high
