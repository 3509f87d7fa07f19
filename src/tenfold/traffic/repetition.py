"""Answers that go in circles."""

from __future__ import annotations

from collections.abc import Sequence

LENGTH = 4
LEAST_DISTINCT = 0.6


def distinct_share(tokens: Sequence[int]) -> float:
    """Of the 4-grams, those that are not a repetition of an earlier one; 1 where there are none."""
    grams = [tuple(tokens[at : at + LENGTH]) for at in range(len(tokens) - LENGTH + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def repetitive(tokens: Sequence[int]) -> bool:
    """Whether the answer is a loop more than a text. A small model decoding greedily loops, and loops are
    easy to guess: they flatter every drafter, and teach it nothing."""
    return distinct_share(tokens) < LEAST_DISTINCT
