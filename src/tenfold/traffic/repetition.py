"""Answers that go in circles."""

from __future__ import annotations

from collections.abc import Sequence

from tenfold.speculate.features import distinct_share

LEAST_DISTINCT = 0.6


def repetitive(tokens: Sequence[int]) -> bool:
    """Whether the answer is a loop more than a text. A small model decoding greedily loops, and loops are
    easy to guess: they flatter every drafter, and teach it nothing."""
    return distinct_share(tokens) < LEAST_DISTINCT
