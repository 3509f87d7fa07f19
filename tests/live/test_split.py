"""Which answers judge a head."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch")

from tenfold.live.decide import LEAST_CONVERSATIONS
from tenfold.live.training import split_live


def test_no_conversation_is_in_two_parts_and_the_newest_are_held_out() -> None:
    """Every answer is in one part; whatever a conversation that is held out said last came after all that the
    others said."""
    dice = random.Random(1)
    names = [f"c{dice.randrange(i // 5, i // 5 + 8)}" for i in range(400)]
    parts = split_live(names)
    assert parts is not None
    assert sorted(index for part in parts for index in part) == list(range(400))
    training, validation, held_out = ({names[i] for i in part} for part in parts)
    assert not (training & validation or training & held_out or validation & held_out)
    assert len(held_out) >= LEAST_CONVERSATIONS
    assert len(training) > len(held_out) > len(validation)
    last = {name: index for index, name in enumerate(names)}
    ends = [sorted(last[name] for name in part) for part in (training, validation, held_out)]
    assert ends[0][-1] < ends[1][0] and ends[1][-1] < ends[2][0]


def test_too_few_conversations_are_not_split() -> None:
    """However many answers they have."""
    assert split_live([str(i % 24) for i in range(500)]) is None
    assert split_live([]) is None
    assert split_live([str(i) for i in range(28)]) is not None
