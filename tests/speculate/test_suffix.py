"""The suffix drafter: whose traffic is seen, when it is learnt, and what a draft says of itself."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.backends.base import Floats
from tenfold.protocol import SamplingParams
from tenfold.speculate import suffix
from tenfold.speculate.base import NO_DRAFT, Draft
from tenfold.speculate.suffix import SuffixDrafter

SAMPLED, GREEDY = SamplingParams(), SamplingParams(temperature=0)


@dataclass
class Grown:
    """A `DraftSequence`."""

    id: str
    tokens: list[int]
    namespace: str = "a"
    prompt_length: int = 1
    params: SamplingParams = SAMPLED
    seed: int = 0
    features: Floats | None = None


def draft(drafter: SuffixDrafter, sequence: Grown, length: int = 8) -> Draft:
    (found,) = drafter.propose([sequence], [length])
    return found


def learn(drafter: SuffixDrafter, tokens: list[int], namespace: str = "a") -> None:
    sequence = Grown("learnt", tokens, namespace)
    drafter.begin(sequence)
    drafter.end(sequence, learn=True)


texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)
# (namespace, prompt, output, whether it is learnt)
requests = st.lists(st.tuples(st.sampled_from("ab"), texts, texts, st.booleans()), max_size=8)


def serve(drafter: SuffixDrafter, request: tuple[str, list[int], list[int], bool]) -> list[Draft]:
    """All drafts on the way of a request."""
    namespace, prompt, output, ended = request
    sequence = Grown("served", list(prompt), namespace)
    drafter.begin(sequence)
    drafts = []
    for token in output:
        drafts.append(draft(drafter, sequence))
        sequence.tokens.append(token)
    drafter.end(sequence, learn=ended)
    return drafts


@given(requests)
def test_a_namespace_sees_its_own_traffic_alone(many: list[tuple[str, list[int], list[int], bool]]) -> None:
    """Every draft, chances included, is that of a drafter that never met the other namespace, nor a request
    that was not to be learnt."""
    shared, apart = SuffixDrafter(1 << 16), {name: SuffixDrafter(1 << 16) for name in "ab"}
    for namespace, prompt, output, ended in many:
        expected = serve(apart[namespace], (namespace, prompt, output, True)) if ended else None
        found = serve(shared, (namespace, prompt, output, ended))
        assert expected is None or found == expected
    for name in "ab":
        assert shared.counts(name, SAMPLED) == apart[name].counts(name, SAMPLED)


@given(texts, texts, st.integers(0, 60))
def test_a_resumed_sequence_is_as_new(prompt: list[int], output: list[int], cut: int) -> None:
    """After another `begin`, with more or fewer tokens than before, nothing of the first life is left."""
    drafter, fresh = SuffixDrafter(1 << 12), SuffixDrafter(1 << 12)
    for each in (drafter, fresh):
        learn(each, output + prompt)
    sequence = Grown("resumed", list(prompt))
    drafter.begin(sequence)
    for token in output:
        draft(drafter, sequence)
        sequence.tokens.append(token)
    resumed = Grown("resumed", (prompt + output)[: max(1, cut)])
    for each in (drafter, fresh):
        each.begin(resumed)
    assert draft(drafter, resumed) == draft(fresh, resumed)


def test_requests_learn_from_each_other_once_they_have_ended() -> None:
    """Two of one namespace at work together: neither sees the other's tokens before its end, both then."""
    drafter = SuffixDrafter(1 << 12)
    first, second = Grown("1", [1, 2, 3, 4, 5, 6, 7]), Grown("2", [9, 1, 2, 3])
    for each in (first, second):
        drafter.begin(each)
    drafts = drafter.propose([first, second], [8, 8])
    assert drafts == [NO_DRAFT, NO_DRAFT]
    drafter.end(first, learn=True)
    assert list(draft(drafter, second).tokens)[:3] == [4, 5, 6]
    assert draft(drafter, Grown("2", second.tokens, "b")) == NO_DRAFT


@given(texts, texts, st.lists(st.integers(0, 12), min_size=1, max_size=10))
def test_a_draft_is_as_the_seam_says(known: list[int], text: list[int], lengths: list[int]) -> None:
    """No longer than asked for, a survival for each token that never rises, a quality within its range and 0
    without a draft; and asking twice for the same gives the same."""
    drafter = SuffixDrafter(1 << 12)
    learn(drafter, known)
    sequences = [Grown(str(i), text) for i in range(len(lengths))]
    for sequence in sequences:
        drafter.begin(sequence)
    drafts = drafter.propose(sequences, lengths)
    assert drafts == drafter.propose(sequences, lengths)
    for found, length in zip(drafts, lengths, strict=True):
        assert len(found.tokens) == len(found.survival) <= length
        assert all(0 < p <= 1 for p in found.survival)
        assert list(found.survival) == sorted(found.survival, reverse=True)
        assert 0 <= found.quality < drafter.qualities
        assert (found.quality == 0) == (not found.tokens)


def test_guesses_that_fail_are_trusted_less_and_that_is_remembered() -> None:
    """Where matches mislead, survival falls while the text runs; the namespace keeps it, for
    requests that draw alike."""
    drafter = SuffixDrafter(1 << 12)
    sequence = Grown("1", [1, 2, 3, 4])
    drafter.begin(sequence)
    chances = list[float]()
    for last in range(10, 60):
        sequence.tokens += [1, 2, 3]
        chances.append(draft(drafter, sequence).survival[0])
        sequence.tokens.append(last)  # never what followed before
    assert chances[-1] < chances[0] / 3
    drafter.end(sequence, learn=True)
    tokens = [91, 92, 93, 94, 91, 92, 93]  # not in the traffic: what matters is what is known of such guesses
    later = [Grown("2", tokens), Grown("3", tokens, params=GREEDY), Grown("4", tokens, "b")]
    for each in later:
        drafter.begin(each)
    again, greedy, elsewhere = (each.survival[0] for each in drafter.propose(later, [8] * 3))
    assert again < greedy / 2 and greedy == elsewhere == chances[0]


def test_old_counts_fade() -> None:
    """What a namespace knows of its guesses never weighs so much that new traffic could not change it: beyond
    4,096 guesses of a kind counts shrink, and their share stays."""
    drafter = SuffixDrafter(1 << 12)
    for _ in range(12):
        sequence = Grown("1", [5] * 100)
        drafter.begin(sequence)
        for _ in range(500):
            draft(drafter, sequence)
            sequence.tokens.append(5)
        drafter.end(sequence, learn=True)
    right, seen = max(drafter.counts("a", SAMPLED), key=lambda each: each[1])
    assert 2048 <= seen <= 4096
    assert right == pytest.approx(seen)


def test_namespaces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anyone may name a namespace: the one that was learnt from longest ago is forgotten, and starts anew."""
    monkeypatch.setattr(suffix, "MAX_NAMESPACES", 3)
    drafter = SuffixDrafter(1 << 12)
    for name in ("a", "b", "c", "a", "d"):
        learn(drafter, [1, 2, 3, 4, 5], name)
    for name, known in (("a", True), ("b", False), ("c", True), ("d", True)):
        sequence = Grown("asks", [1, 2, 3], name)
        drafter.begin(sequence)
        assert (draft(drafter, sequence) != NO_DRAFT) == known


def test_an_index_without_room_is_refused() -> None:
    """The error names the argument."""
    with pytest.raises(ValueError, match="max_tokens is 0"):
        SuffixDrafter(0)
