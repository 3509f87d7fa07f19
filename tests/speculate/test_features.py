"""A feature set's parts fit together, and what repeats itself is known."""

from __future__ import annotations

import numpy as np
import pytest

from tenfold.speculate.features import FeatureSet, distinct_share
from tests.helpers.toy_drafting import toy_answers, toy_target


def test_selected_answers_keep_their_features() -> None:
    """A split by answers takes each answer's rows with it."""
    whole = toy_answers(toy_target(), 4, seed=0, length=6)
    part = whole.select([3, 1])
    assert part.answers == (whole.answers[3], whole.answers[1])
    assert part.starts == (18, 6)
    assert part.token_count == 12
    assert part.features is whole.features


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"starts": [0, 20]}, "6 tokens from row 20 is not within the 24 rows"),
        ({"starts": [-1, 0]}, "from row -1"),
        ({"starts": [0]}, "2 answers, but 1 starts"),
        ({"features": np.zeros((24, 5), np.uint16)}, "not 192 wide"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    """Features of the wrong rows would be learnt in silence."""
    whole = toy_answers(toy_target(), 4, seed=0, length=6).select([0, 1])
    parts = {"source": whole.source, "answers": whole.answers, "starts": whole.starts}
    with pytest.raises(ValueError, match=message):
        FeatureSet("f", **{**parts, "features": whole.features, **change})  # type: ignore[arg-type]


def test_repetition_lowers_the_share_of_distinct_grams() -> None:
    """A loop of period p has p distinct 4-grams; a text that repeats nothing has share 1."""
    assert distinct_share(list(range(50))) == 1
    assert distinct_share([1, 2] * 20) == 2 / 37
    assert distinct_share([1, 2, 3]) == 1
