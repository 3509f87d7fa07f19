"""The draft vocabulary has what the answers use most, and always what must be in it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.speculate.draft_vocab import choose_tokens, coverage

ANSWERS = st.lists(st.lists(st.integers(0, 30), max_size=20), max_size=8)


@given(answers=ANSWERS, size=st.integers(2, 12), always=st.sets(st.integers(0, 40), max_size=2))
def test_no_other_choice_covers_more(answers: list[list[int]], size: int, always: set[int]) -> None:
    """Ascending, each once, within the size; a token that was left out is used no more often than any that
    was chosen for its use."""
    tokens = choose_tokens(answers, size, always)
    counts = Counter(token for answer in answers for token in answer)
    assert list(tokens) == sorted(set(tokens))
    assert always <= set(tokens)
    assert len(tokens) == min(size, len(set(counts) | always))
    chosen = [counts[token] for token in tokens if token not in always]
    left_out = [count for token, count in counts.items() if token not in tokens]
    assert not chosen or not left_out or min(chosen) >= max(left_out)
    total = sum(counts.values())
    assert coverage(answers, tokens) == (sum(counts[t] for t in tokens) / total if total else 0)


def test_equal_use_is_settled_by_id() -> None:
    """The same answers always give the same tokens."""
    assert choose_tokens([[5, 3, 9, 7]], 2) == (3, 5)
    assert choose_tokens([[9, 7], [5, 3]], 2, [40]) == (3, 40)


def test_too_little_room_is_an_error() -> None:
    """Tokens that must be in it are never dropped in silence."""
    with pytest.raises(ValueError, match="3 tokens are always drafted, but there is room for 2"):
        choose_tokens([], 2, [1, 2, 3])


def test_the_rest_fills_what_room_is_left() -> None:
    """Lower ids first, and never in the place of a token that the answers use."""
    assert choose_tokens([[7, 7, 9]], 4, always=(0,), rest=(30, 20, 9, 40)) == (0, 7, 9, 20)
    assert choose_tokens([[7, 7, 9]], 3, always=(0,), rest=(1, 2)) == (0, 7, 9)
    assert choose_tokens([[7]], 10, rest=(3,)) == (3, 7)
