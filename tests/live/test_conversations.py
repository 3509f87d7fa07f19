"""Turns of a conversation are found by their prompts."""

from __future__ import annotations

import random

from tenfold.live.conversations import Conversations


def test_a_prompt_that_goes_on_from_another_is_of_its_conversation() -> None:
    """Also several turns later and when the conversation forks; a prompt that only has a start in common with
    others is of another one."""
    system, known = [1, 2, 3, 4], Conversations()
    first = known.name([*system, 10, 5])
    other = known.name([*system, 11, 5])
    assert first != other
    assert known.name([*system, 10, 5, 20, 21, 12, 5]) == first
    assert known.name([*system, 10, 5, 20, 21, 12, 5, 22, 13, 5]) == first
    assert known.name([*system, 10, 5, 30, 14, 5]) == first
    assert known.name([*system, 11, 5]) == other
    assert known.name(system) not in (first, other)


def test_against_looking_at_every_prompt() -> None:
    """The longest earlier prompt that it begins with decides, over random prompts of two tokens."""
    dice, known = random.Random(3), Conversations()
    names: dict[tuple[int, ...], str] = {}
    for _ in range(400):
        prompt = tuple(dice.randrange(2) for _ in range(dice.randrange(12)))
        fits = [one for one in names if prompt[: len(one)] == one]
        found = known.name(prompt)
        if fits:
            assert found == names[max(fits, key=len)]
        else:
            assert found not in names.values()
        names[prompt] = found


def test_the_oldest_is_forgotten() -> None:
    """So memory is bounded, and lengths that are gone are not looked for."""
    known = Conversations(most=10)
    first = known.name([1])
    for i in range(20):
        known.name([2, 3, i])
    assert len(known._names) == 10
    assert known._lengths == {3: 10}
    assert known.name([1]) == first  # its name is its prompt's own
