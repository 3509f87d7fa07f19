"""Decisions about heads: the better one is taken, the equal one is not, and a worse one is found out."""

from __future__ import annotations

import numpy as np
import pytest

from tenfold.live.decide import LEAST_CONVERSATIONS, LOOKS, Scores, Watch, compare, share
from tenfold.speculate.trained_head import Pace


def replayed(rng: np.random.Generator, conversations: int, gain: float) -> tuple[list[str], Pace, Pace]:
    """Answers of 60 tokens, 1 to 3 a conversation; how fast one goes depends on its conversation."""
    groups: list[str] = []
    old, new = [], []
    for name in range(conversations):
        kind = rng.normal(1.8, 0.3)
        for _ in range(rng.integers(1, 4)):
            groups.append(str(name))
            luck = rng.normal(0, 0.05, 2)
            old.append(max(1, round(60 / max(1.0, kind + luck[0]))))
            new.append(max(1, round(60 / max(1.0, kind + gain + luck[1]))))
    tokens = np.full(len(groups), 60)
    return groups, Pace(tokens, np.array(old)), Pace(tokens, np.array(new))


def promotions(gain: float, times: int = 200) -> int:
    rng = np.random.default_rng(5)
    found = [compare(*replayed(rng, 20, gain), draws=500) for _ in range(times)]
    return sum(one is not None and one.better for one in found)


def test_a_head_that_is_better_is_promoted_and_others_are_not() -> None:
    """Of 200 heads that are as good few pass, of those that are worse none, and of those that bring a tenth
    of a token a step nearly all."""
    assert promotions(0.0) <= 14  # 2.5 % of 200 are 5, and the bootstrap is a little bold
    assert promotions(-0.1) == 0
    assert promotions(0.1) >= 190


def test_the_numbers_are_those_of_all_answers() -> None:
    """Tokens by steps over everything, and an interval around their difference."""
    groups = [str(i) for i in range(20)]
    tokens = np.arange(20, 40)
    found = compare(groups, Pace(tokens, tokens), Pace(tokens, tokens // 2))
    assert found is not None and found.conversations == 20
    assert found.old == 1
    assert found.new == pytest.approx(tokens.sum() / (tokens // 2).sum())
    assert found.low <= found.new - found.old <= found.high


def test_too_few_conversations_decide_nothing() -> None:
    """However many answers they have, and however clear it looks."""
    groups = [str(i % (LEAST_CONVERSATIONS - 1)) for i in range(200)]
    tokens = np.full(200, 60)
    assert compare(groups, Pace(tokens, tokens), Pace(tokens, tokens // 3)) is None


def test_answers_of_one_token_do_no_harm() -> None:
    """They have no steps."""
    nothing = np.zeros(20, np.int64)
    assert compare([str(i) for i in range(20)], Pace(nothing, nothing), Pace(nothing, nothing)) is None


def served(rng: np.random.Generator, count: int, mean: float) -> list[Scores]:
    """Requests of 5 to 60 drafts, each with an acceptance of its own."""
    found = []
    for _ in range(count):
        scored = int(rng.integers(5, 60))
        chance = float(np.clip(rng.normal(mean, 0.15), 0, 1))
        found.append(Scores(scored, int(rng.binomial(scored, chance))))
    return found


def watched(rng: np.random.Generator, old: float, new: float, before: int = 320) -> str:
    watch = Watch(served(rng, before, old))
    after = served(rng, LOOKS[-1], new)
    for count in range(0, LOOKS[-1] + 1, 7):
        if (found := watch.look(after[:count])) != "open":
            return found
    return watch.look(after)


def test_a_head_that_is_worse_is_rolled_back_and_one_as_good_stays() -> None:
    """Of heads that are as good one in a hundred is, and twice that at most here; of those with 0.1 less of
    acceptance nearly all, also where little is known of the old one."""
    rng = np.random.default_rng(7)
    assert sum(watched(rng, 0.5, 0.5) == "worse" for _ in range(150)) <= 5
    assert all(watched(rng, 0.5, 0.6) == "stays" for _ in range(30))
    assert sum(watched(rng, 0.5, 0.4) == "worse" for _ in range(60)) >= 58
    assert sum(watched(rng, 0.6, 0.4, before=20) == "worse" for _ in range(60)) >= 50


def test_a_head_that_never_stands_is_found_out_at_the_first_look() -> None:
    """Equal requests have no spread, and are no reason to wait or to divide by nothing."""
    watch = Watch([Scores(20, 10)] * 40)
    assert watch.look([Scores(20, 0)] * (LOOKS[0] - 1)) == "open"
    assert watch.look([Scores(20, 0)] * LOOKS[0]) == "worse"
    assert watch.new is not None and watch.new.mean == 0


def test_without_an_old_head_to_compare_with_the_new_one_stays() -> None:
    """From a few requests nothing is known of it; requests without a draft are none."""
    assert share([Scores(10, 5)] * 9 + [Scores(0, 0)] * 50) is None
    assert Watch([Scores(10, 5)] * 9).look([]) == "stays"
