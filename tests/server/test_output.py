"""From chunks to what is shown and counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tenfold.protocol import Chunk, TokenLogprob
from tenfold.server.output import Output, Piece
from tests.helpers.fake_text import FakeStream, piece_of


def run(ids: list[int], cuts: list[int], stop: tuple[str, ...], ended: bool) -> tuple[Output, Piece]:
    """All of ``ids`` through an Output, in chunks of the given sizes; ``ended``: the last is a stop token."""
    output = Output(FakeStream(stop))
    whole = Piece()
    start = turn = 0
    while start < len(ids) and output.finish is None:
        size = cuts[turn % len(cuts)]
        part = tuple(ids[start : start + size])
        start, turn = start + size, turn + 1
        last = start >= len(ids)
        chunk = Chunk(
            id="a",
            tokens=part,
            logprobs=tuple(TokenLogprob(-float(id)) for id in part),
            finish=("stop" if ended else "length") if last else None,
            stop_token=part[-1] if last and ended else None,
        )
        piece = output.push([chunk])
        whole.text += piece.text
        whole.tokens += piece.tokens
        whole.logprobs += piece.logprobs
    return output, whole


@given(
    st.lists(st.integers(66, 69), min_size=1, max_size=30),
    st.lists(st.integers(1, 7), min_size=1),
    st.lists(st.text("abcd", min_size=1, max_size=3), max_size=2).map(tuple),
    st.booleans(),
)
def test_any_chunking_gives_the_same_answer(
    ids: list[int], cuts: list[int], stop: tuple[str, ...], ended: bool
) -> None:
    """Text, counts and finish do not depend on how the tokens come; nothing after a stop is shown."""
    output, whole = run(ids, cuts, stop, ended)
    single, expected = run(ids, [1], stop, ended)
    assert (whole.text, whole.tokens) == (expected.text, expected.tokens)
    assert (output.finish, output.completion_tokens) == (single.finish, single.completion_tokens)
    assert not any(text in whole.text for text in stop)
    assert [-entry.logprob for entry in whole.logprobs] == whole.tokens


def test_the_token_that_ends_an_answer_counts_but_is_not_shown() -> None:
    """Neither its text nor its log-probability."""
    output, whole = run([66, 67, 68], [3], (), True)
    assert (whole.text, whole.tokens, len(whole.logprobs)) == (piece_of(66) + piece_of(67), [66, 67], 2)
    assert (output.completion_tokens, output.finish) == (3, "stop")


def test_tokens_behind_a_stop_string_do_not_count() -> None:
    """Even when they came in the same chunk as the stop string, and the engine said length."""
    output, whole = run([66, 67, 68, 69], [4], (piece_of(67) + piece_of(68),), False)
    assert (whole.text, output.finish, output.completion_tokens) == (piece_of(66), "stop", 3)


def test_text_held_back_for_a_stop_comes_at_the_end() -> None:
    """Half a stop string is text after all when nothing follows."""
    output, whole = run([66, 67], [1], (piece_of(67) + piece_of(68),), False)
    assert (whole.text, output.finish) == (piece_of(66) + piece_of(67), "length")


def test_a_resumed_request_reports_the_cache_of_its_first_run() -> None:
    """What the second worker found in its cache is no news for the client."""
    output = Output(FakeStream(()))
    output.push([Chunk(id="a", tokens=(1,), cached_tokens=16)])
    output.push([Chunk(id="a", tokens=(2,), cached_tokens=32)])
    assert output.cached_tokens == 16
