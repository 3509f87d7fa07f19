"""The speculator that decides nothing."""

from __future__ import annotations

import pytest

from tenfold.engine.sequence import Sequence
from tenfold.speculate.base import DrafterReport, Outcome, SpeculationReport
from tenfold.speculate.fixed import FixedSpeculator
from tests.helpers.drafters import FunctionDrafter
from tests.helpers.requests import request


def sequences(count: int) -> list[Sequence]:
    """Sequences of two tokens."""
    return [Sequence(request(f"r{i}", [1, 2]), 0, 100) for i in range(count)]


def speculator(k: int, gives: int = 100) -> tuple[FixedSpeculator, FunctionDrafter]:
    """One whose drafter gives at most so many tokens, for sequences that have begun."""
    drafter = FunctionDrafter("sevens", lambda sequence, length: [7] * min(length, gives))
    found = FixedSpeculator(drafter, k)
    return found, drafter


@pytest.mark.parametrize(
    ("k", "rows", "limits", "lengths"),
    [
        (3, 100, [50, 50], [3, 3]),
        (3, 100, [50, 2, 0], [3, 2, 0]),
        (3, 5, [50, 50], [2, 2]),
        (3, 1, [50, 50], [0, 0]),
        (0, 100, [50], [0]),
        (8, 0, [50], [0]),
    ],
)
def test_as_many_for_each_as_wanted_or_possible(
    k: int, rows: int, limits: list[int], lengths: list[int]
) -> None:
    """K tokens, no more than a sequence can use, and alike for all where rows are short; the drafter is never
    asked for none."""
    found, _ = speculator(k)
    asked = sequences(len(limits))
    for one in asked:
        found.begin(one)
    assert [len(draft) for draft in found.propose(asked, rows, limits)] == lengths


def test_counts() -> None:
    """What was drafted and stood, per drafter, and why nothing was."""
    found, drafter = speculator(3, gives=2)
    asked = sequences(2)
    for one in asked:
        found.begin(one)
    found.propose(asked, 100, [5, 0])
    found.propose(asked, 1, [5, 5])
    found.observe([Outcome(asked[0], 2, 1, [7, 8]), Outcome(asked[1], 0, 0, [9])], 4, 1.0)
    assert found.report() == SpeculationReport(
        2, 3, (DrafterReport("sevens", 1, 2, 1),), {"last token": 1, "load": 2}
    )
    found.end(asked[0], True)
    assert drafter.ended == [("r0", True, [])]
    assert FixedSpeculator(drafter, 2, wants_features=True).wants_features


def test_a_negative_k_is_refused() -> None:
    """By name."""
    with pytest.raises(ValueError, match="k is -1"):
        speculator(-1)
