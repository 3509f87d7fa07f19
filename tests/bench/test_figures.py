"""Medians, spreads and ratios."""

from __future__ import annotations

import numpy as np
import pytest

from tenfold.bench.figures import compare, figure, paired_ratio, table, total_ratio


def test_a_figure_is_median_and_deciles() -> None:
    """The spread is the 10th and the 90th percentile, and the count is told."""
    found = figure([float(n) for n in range(101)][::-1])
    assert (found.p10, found.median, found.p90, found.count) == (10, 50, 90, 101)
    with pytest.raises(ValueError, match="no measurements"):
        figure([])


def test_what_drifts_on_both_sides_cancels() -> None:
    """Sides that differ by 2 % on a machine whose speed changes fivefold are told apart."""
    rng = np.random.default_rng(1)
    machine = rng.uniform(1, 5, 15)
    first = machine * 1.02 * rng.normal(1, 0.003, 15)
    second = machine * rng.normal(1, 0.003, 15)
    ratio = paired_ratio(first.tolist(), second.tolist())
    assert ratio.conclusive
    assert 1.01 < ratio.low < ratio.median < ratio.high < 1.03


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Two equal sides are called different in few of 200 sittings of 11 noisy rounds."""
    rng = np.random.default_rng(2)
    wrong = 0
    for _ in range(200):
        first, second = rng.lognormal(0, 0.1, (2, 11))
        wrong += paired_ratio(first.tolist(), second.tolist()).conclusive
    assert wrong / 200 < 0.1


def test_no_verdict_without_evidence() -> None:
    """When the interval holds 1 the table says so instead of a ratio; with under five rounds there is no
    interval at all."""
    comparison = compare({"a": [1.0, 1.2, 0.9, 1.1, 1.0], "b": [1.0] * 5})
    assert comparison.cells()[-1].startswith("undecided")
    assert comparison.to_json()["ratio"]["conclusive"] is False
    with pytest.raises(ValueError, match="at least 5"):
        paired_ratio([1.0] * 4, [1.0] * 4)
    with pytest.raises(ValueError, match="5 rounds of one side and 6"):
        paired_ratio([1.0] * 5, [1.0] * 6)


def test_columns_are_aligned() -> None:
    """Every line of a table has its bars at the same places."""
    lines = table(("a", "long head"), [("longer cell", "1"), ("2", "3")]).splitlines()
    assert len({tuple(i for i, char in enumerate(line) if char == "|") for line in lines}) == 1


def test_a_ratio_of_totals_is_of_all_the_work_and_its_interval_of_the_groups() -> None:
    """A long piece weighs as it should; pieces of one group rise and fall together."""
    found = total_ratio([10, 1], [5, 1], ["a", "b"])
    assert found.ratio == pytest.approx(11 / 6)
    assert (found.low, found.groups) == (None, 2)
    assert "no interval" in found.text()
    rng = np.random.default_rng(1)
    second = rng.uniform(1, 2, 400)
    speed = np.repeat(rng.uniform(1.5, 2.5, 20), 20)
    groups = np.repeat(np.arange(20), 20).tolist()
    alone = total_ratio((speed * second).tolist(), second.tolist(), range(400))
    together = total_ratio((speed * second).tolist(), second.tolist(), groups)
    assert alone.ratio == together.ratio
    for one in (alone, together):
        assert one.low is not None and one.high is not None and one.low < one.ratio < one.high
    assert alone.low is not None and alone.high is not None
    assert together.low is not None and together.high is not None
    assert together.high - together.low > 2 * (alone.high - alone.low)
    with pytest.raises(ValueError, match="nothing to compare"):
        total_ratio([], [], [])
    with pytest.raises(ValueError, match="2 pieces"):
        total_ratio([1, 2], [1], ["a"])
