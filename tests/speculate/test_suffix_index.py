"""The index behind the suffix drafter: what it finds, what it forgets, and what it costs on hostile texts."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold._native import SuffixRecord, SuffixText, SuffixTraffic
from tenfold.speculate.suffix_prior import prior
from tests.helpers.slow_suffix import SlowText, SlowTraffic

PRIOR = prior()
texts = st.integers(1, 4).flatmap(lambda symbols: st.lists(st.integers(0, symbols), max_size=30))
scopes = st.integers(1, 2)


@given(st.lists(st.tuples(texts, scopes), max_size=12), texts, st.integers(0, 20))
def test_what_is_found_is_what_comparing_everything_finds(
    learnt: list[tuple[list[int], int]], context: list[int], room: int
) -> None:
    """The places after the longest contexts, newest first, of the scope alone; what no longer fits into the
    ring is forgotten, however much was learnt."""
    fast, slow = SuffixTraffic(64, PRIOR), SlowTraffic(64)
    for text, scope in learnt:
        assert fast.learn(text, scope) == len(text)
        slow.learn(text, scope)
    for scope in (1, 2, 3):
        expected = [(n, slow.window.tokens[at]) for n, at in slow.window.find(context, scope, room)]
        assert fast.find(context, scope, room) == expected


@given(
    st.lists(st.tuples(texts, scopes), max_size=6),
    st.lists(st.tuples(texts, st.integers(0, 8), st.booleans()), max_size=8),
)
def test_drafts_and_their_chances_are_those_of_the_slow_drafter(
    learnt: list[tuple[list[int], int]], steps: list[tuple[list[int], int, bool]]
) -> None:
    """Every draft, step after step, with its survival to the last bit: matches, votes, the choice between the
    text itself and other texts, drafting on behind the text's own end, and the counts of what was right."""
    fast, slow = SuffixTraffic(64, PRIOR), SlowTraffic(64)
    for text, scope in learnt:
        fast.learn(text, scope)
        slow.learn(text, scope)
    mine, model = SuffixText(16, 1 << 12), SlowText(PRIOR)
    shared, counts = SuffixRecord(), np.zeros((len(PRIOR), 2), np.float32)
    length = 0
    for tokens, count, ended in steps:
        tokens = tokens[: 31 - length]  # beyond that the model would have to know how far chains are followed
        length += len(tokens)
        mine.extend(tokens)
        model.extend(tokens)
        assert mine.record().counts() == [tuple(each) for each in model.counts.tolist()]
        drafted, survival = mine.propose(fast, 1, shared, count, 0.05)
        assert (drafted, survival) == model.propose(slow, 1, counts, count, 0.05)
        if ended:
            shared.add(mine.record())
            counts += model.counts
            model.counts[:] = 0


@given(
    st.lists(st.integers(0, 3), max_size=400), st.lists(st.integers(0, 400), max_size=5), st.integers(1, 500)
)
def test_a_text_is_indexed_alike_in_whatever_pieces_it_comes(
    text: list[int], cuts: list[int], expected: int
) -> None:
    """Neither how many tokens come at once nor how often the index had to grow changes a draft."""
    traffic = SuffixTraffic(64, PRIOR)
    whole, pieces = SuffixText(1024, 1024), SuffixText(expected, 1024)
    whole.extend(text)
    for first, last in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True):
        pieces.extend(text[first:last])
    assert pieces.propose(traffic, 0, None, 8, 0.0) == whole.propose(traffic, 0, None, 8, 0.0)


def test_a_beginning_is_learnt_once_and_again_before_it_is_forgotten() -> None:
    """Requests that share a prompt do not fill the ring with it; one that keeps coming stays in it; and
    another scope's beginning counts for nothing."""
    traffic = SuffixTraffic(1024, PRIOR)
    prompt = list(range(100))
    assert traffic.learn(prompt, 1) == 100
    assert traffic.learn(prompt, 1) == 4  # three blocks are known
    assert traffic.learn([*prompt, 500], 1) == 5
    assert traffic.learn([7, *prompt], 1) == 101
    assert traffic.learn(prompt, 2) == 100
    assert traffic.find(prompt[:96], 1, 1) == [(32, 96)]
    for first in range(1000, 6000, 50):
        traffic.learn(list(range(first, first + 50)), 1)
        traffic.learn([*prompt, first], 1)
        assert (32, 50) in traffic.find(prompt[:50], 1, 8)


def test_a_busy_scope_does_not_stand_in_the_way_of_another() -> None:
    """However often others used the same phrases since, a scope finds its own place."""
    traffic = SuffixTraffic(1 << 14, PRIOR)
    traffic.learn([1, 2, 3, 4], 1)
    for token in range(10, 1000):
        traffic.learn([1, 2, 3, token], 2)
    assert traffic.find([1, 2, 3], 1, 8) == [(3, 4)]


def test_memory_is_bounded_whatever_comes() -> None:
    """49 bytes a token of the bound for traffic, 48 for a text's own index; neither grows beyond."""
    traffic, text = SuffixTraffic(1 << 12, PRIOR), SuffixText(1, 1 << 12)
    assert traffic.bytes() <= 50 << 12
    before = traffic.bytes()
    rng = np.random.default_rng(0)
    for _ in range(20):
        tokens = rng.integers(0, 50_000, 3000).tolist()
        traffic.learn(tokens, 1)
        text.extend(tokens)
        assert traffic.bytes() == before and text.bytes() <= 48 << 12
    # What is newest is there, what is older than the bound is not.
    assert traffic.find(tokens[-9:-1], 1, 1) == [(8, tokens[-1])]
    assert traffic.find(tokens[:8], 1, 1)[0][0] == 8
    first = np.random.default_rng(0).integers(0, 50_000, 3000).tolist()
    assert all(length < 3 for length, _ in traffic.find(first[:32], 1, 8))


def fibonacci(length: int) -> list[int]:
    before, word = [0], [0, 1]
    while len(word) < length:
        before, word = word, word + before
    return word[:length]


@pytest.mark.parametrize(
    "make",
    [
        lambda n: [5] * n,
        lambda n: [i % 2 for i in range(n)],
        lambda n: [i % 33 for i in range(n)],
        fibonacci,
        lambda n: list(range(n)),
        lambda n: [i if i % 8 == 0 else 5 for i in range(n)],
        lambda n: np.random.default_rng(0).integers(0, 2, n).tolist(),
    ],
)
def test_no_text_is_expensive(make: Callable[[int], list[int]]) -> None:
    """A prompt of 100,000 tokens that repeats itself in the worst ways, beside traffic of the same: indexing
    it and drafting at its end take time for its length, not for its square (which would be minutes)."""
    text = make(100_000)
    start = time.process_time()
    traffic = SuffixTraffic(1 << 17, PRIOR)
    traffic.learn(text, 1)
    running = SuffixText(len(text), 1 << 17)
    running.extend(text[:-1000])
    for at in range(99_000, 100_000):
        running.propose(traffic, 1, None, 8, 0.0)
        running.extend(text[at : at + 1])
    assert time.process_time() - start < 2


def test_what_cannot_be_indexed_is_refused() -> None:
    """A negative token stands for the end of a text inside; a prior of the wrong size would be read
    beyond."""
    with pytest.raises(ValueError, match="negative"):
        SuffixText(1, 64).extend([1, -1])
    with pytest.raises(ValueError, match="negative"):
        SuffixTraffic(64, PRIOR).learn([1, -1], 1)
    with pytest.raises(ValueError, match="prior"):
        SuffixTraffic(64, PRIOR[:-1])
    with pytest.raises(ValueError, match="tokens"):
        SuffixTraffic(0, PRIOR)
