"""Figures with their spread, and ratios of two sides that took turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

RESAMPLES = 10_000


class Figure(msgspec.Struct, frozen=True):
    """A measured figure: median, 10th and 90th percentile, and of how many measurements."""

    median: float
    p10: float
    p90: float
    count: int

    def text(self, digits: int = 1) -> str:
        """For a table."""
        return f"{self.median:.{digits}f} ({self.p10:.{digits}f} to {self.p90:.{digits}f})"

    def scaled(self, factor: float) -> Figure:
        """The same in another unit."""
        return Figure(self.median * factor, self.p10 * factor, self.p90 * factor, self.count)


def figure(values: Sequence[float]) -> Figure:
    """Of at least one value. Raises ValueError for none."""
    if not values:
        raise ValueError("there are no measurements to summarize")
    p10, median, p90 = np.percentile(np.asarray(values, np.float64), (10, 50, 90)).tolist()
    return Figure(median, p10, p90, len(values))


class Ratio(msgspec.Struct, frozen=True):
    """How the first of two sides compares with the second: above 1 it is larger."""

    median: float
    """Of the rounds' own ratios."""
    low: float
    high: float
    """The 95 % interval of that median."""
    rounds: int

    @property
    def conclusive(self) -> bool:
        """Whether the interval leaves 1 out, so that one side may be called larger."""
        return self.low > 1 or self.high < 1

    def text(self) -> str:
        """For a table: the ratio, or that there is none to be told."""
        interval = f"{self.low:.3f} to {self.high:.3f}"
        return f"{self.median:.3f} ({interval})" if self.conclusive else f"undecided ({interval})"

    def to_json(self) -> dict[str, float | bool]:
        """For machines."""
        return {
            "median": self.median,
            "low": self.low,
            "high": self.high,
            "rounds": self.rounds,
            "conclusive": self.conclusive,
        }


def paired_ratio(first: Sequence[float], second: Sequence[float]) -> Ratio:
    """The ratio of two sides measured in turns, ``first[i]`` beside ``second[i]``.

    A round's two figures are taken seconds apart, so what the machine does from minute to minute cancels in
    their ratio. The interval is the percentile bootstrap (Efron 1979) of the median over rounds, with a fixed
    seed. Raises ValueError for fewer than five rounds, which carry no 95 % interval, or unequal lengths.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} rounds of one side and {len(second)} of the other")
    if len(first) < 5:
        raise ValueError(f"{len(first)} rounds are too few for an interval; measure at least 5")
    ratios = np.asarray(first, np.float64) / np.asarray(second, np.float64)
    picks = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[picks], axis=1), (2.5, 97.5)).tolist()
    return Ratio(float(np.median(ratios)), low, high, len(ratios))


class TotalRatio(msgspec.Struct, frozen=True):
    """How the totals of two sides compare that did the same work in turns: above 1 the first is larger."""

    ratio: float
    low: float | None
    high: float | None
    """The 95 % interval; None where the groups are too few for one."""
    groups: int

    def text(self) -> str:
        """For a table."""
        interval = "no interval" if self.low is None else f"{self.low:.2f} to {self.high:.2f}"
        return f"{self.ratio:.2f} ({interval})"


def total_ratio(first: Sequence[float], second: Sequence[float], groups: Sequence[Any]) -> TotalRatio:
    """The ratio of the two sums, ``first[i]`` and ``second[i]`` of the same piece of work.

    Pieces of one of the ``groups`` are alike (requests of one conversation), so groups are what the
    percentile bootstrap draws, with a fixed seed; below five of them there is no interval. Raises ValueError
    for unequal lengths and where there is nothing to compare.
    """
    if not len(first) == len(second) == len(groups):
        raise ValueError(f"{len(first)} pieces of one side, {len(second)} of the other, {len(groups)} groups")
    _, numbers = np.unique(np.asarray([str(group) for group in groups]), return_inverse=True)
    count = int(numbers.max()) + 1 if len(numbers) else 0
    above = np.bincount(numbers, np.asarray(first, np.float64), count) if count else np.zeros(0)
    below = np.bincount(numbers, np.asarray(second, np.float64), count) if count else np.zeros(0)
    if below.sum() <= 0:
        raise ValueError("there is nothing to compare: the second side is zero in all")
    ratio = float(above.sum() / below.sum())
    if count < 5:
        return TotalRatio(ratio, None, None, count)
    picks = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
    totals = below[picks].sum(axis=1)
    ratios = above[picks].sum(axis=1)[totals > 0] / totals[totals > 0]
    low, high = np.percentile(ratios, (2.5, 97.5)).tolist()
    return TotalRatio(ratio, low, high, count)


class Comparison(msgspec.Struct, frozen=True):
    """Two sides that took turns."""

    rounds: dict[str, list[float]]
    """What each of the two found, round by round; the first is compared with the second."""
    ratio: Ratio

    def cells(self, digits: int = 1) -> list[str]:
        """For a table: the first side, the second, and their ratio."""
        return [*(figure(values).text(digits) for values in self.rounds.values()), self.ratio.text()]

    def to_json(self) -> dict[str, Any]:
        """For machines: a figure for each side, the ratio, and the rounds."""
        figures = {name: msgspec.to_builtins(figure(values)) for name, values in self.rounds.items()}
        return {**figures, "ratio": self.ratio.to_json(), "rounds": self.rounds}


def compare(rounds: dict[str, list[float]]) -> Comparison:
    """Compares the first of two sides with the second; see `paired_ratio`."""
    first, second = rounds.values()
    return Comparison(rounds, paired_ratio(first, second))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )
