from __future__ import annotations

import codecs
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tenfold.checkpoint.text_stream import TextStream
from tenfold.checkpoint.tokenizer import Tokenizer
from tenfold.checkpoint.tokenizer_base import TokenizerParts


class NoEncoder:
    def encode(self, text: str, parse_special: bool) -> list[int]:
        raise NotImplementedError


def tokenizer_of(pieces: list[bytes]) -> Tokenizer:
    """Token 0 is special, token i > 0 says ``pieces[i - 1]``."""
    return Tokenizer(TokenizerParts(NoEncoder(), [b"<eos>", *pieces], frozenset([0])))


@dataclass
class Ended:
    text: str
    stopped: str | None
    tokens_used: int


def by_the_book(tokenizer: Tokenizer, tokens: list[int], stops: tuple[str, ...]) -> Ended:
    """The law: of the whole text, what comes before the stop string that is complete first."""
    whole = tokenizer.decode(tokens)
    ends = [(whole.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in whole]
    if not ends:
        return Ended(whole, None, len(tokens))
    end, _, stop = min(ends)
    # A character is there once no further byte can change it: with the token that follows, if it is broken.
    used = next(
        (
            count
            for count in range(1, len(tokens) + 1)
            if len(complete_text(tokenizer, tokens[:count])) >= end
        ),
        len(tokens),
    )
    return Ended(whole[: end - len(stop)], stop, used)


def complete_text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The characters of ``tokens`` that no further byte can change."""
    data = b"".join(tokenizer.token_bytes(token, skip_special_tokens=True) for token in tokens)
    return codecs.utf_8_decode(data, "replace", False)[0]


BYTES = st.one_of(
    st.binary(min_size=0, max_size=3),
    st.text("ab\n é漢😀", min_size=1, max_size=4).map(str.encode),
    st.sampled_from([b"\xf0", b"\x9f\x98", b"\x80", b"\xe6\xbc", b"\xa2", b"\xff", b"\xed\xa0\x80"]),
)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[bytes], list[int], tuple[str, ...], list[int]]:
    pieces = draw(st.lists(BYTES, min_size=1, max_size=6))
    tokens = draw(st.lists(st.integers(0, len(pieces)), max_size=30))
    whole = b"".join(pieces[token - 1] for token in tokens if token).decode("utf-8", "replace")
    parts = st.tuples(st.integers(0, max(len(whole) - 1, 0)), st.integers(1, 12)).map(
        lambda cut: whole[cut[0] : cut[0] + cut[1]] or "x"
    )
    stops = draw(st.lists(st.one_of(parts, st.text("ab\n é漢", min_size=1, max_size=4)), max_size=4))
    cuts = draw(st.lists(st.integers(0, len(tokens)), max_size=8).map(sorted))
    return pieces, tokens, tuple(stops), cuts


@settings(max_examples=600, deadline=None)
@given(streams())
@example(([b"ab", b"abc"], [1, 2], ("abc", "bab"), [1]))
@example(([b"\xe6\xbc", b"\xa2"], [1, 2, 1], ("漢",), [1]))
def test_any_cutting_sends_the_same(case: tuple[list[bytes], list[int], tuple[str, ...], list[int]]) -> None:
    """However tokens arrive, the text, the stop string and the count of tokens are those of the whole; what
    was sent so far is always the beginning of the answer; and only whole characters of it are sent."""
    pieces, tokens, stops, cuts = case
    tokenizer = tokenizer_of(pieces)
    expected = by_the_book(tokenizer, tokens, stops)
    for edges in ([0, *cuts, len(tokens)], [0, len(tokens)], list(range(len(tokens) + 1))):
        stream = TextStream(tokenizer, stops)
        sent = ""
        for start, end in pairwise(edges):
            sent += stream.push(tokens[start:end])
            assert expected.text.startswith(sent)
        sent += stream.finish()
        assert Ended(sent, stream.stopped, stream.tokens_used) == expected


@settings(max_examples=200, deadline=None)
@given(streams())
def test_all_that_is_safe_is_sent(case: tuple[list[bytes], list[int], tuple[str, ...], list[int]]) -> None:
    """What is held back is the longest end of the text that begins a stop string, and no character more."""
    pieces, tokens, stops, _ = case
    tokenizer = tokenizer_of(pieces)
    stream, sent = TextStream(tokenizer, stops), ""
    for count, token in enumerate(tokens, start=1):
        sent += stream.push([token])
        if stream.stopped is not None:
            break
        text = complete_text(tokenizer, tokens[:count])
        held = max(
            (size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])), default=0
        )
        assert sent == text[: len(text) - held]


def test_a_prompt_that_ends_inside_a_character_does_not_leak() -> None:
    """An answer that begins with the rest of a character begins with U+FFFD and holds no byte of the
    prompt."""
    stream = TextStream(tokenizer_of([b"\x98\x80", b"a"]))
    assert stream.push([1, 2]) + stream.finish() == "\ufffd\ufffda"


def test_special_tokens_are_text_only_if_asked_for() -> None:
    """A skipped token neither appears nor parts a stop string; a shown one can be a stop string itself."""
    tokenizer = tokenizer_of([b"ST", b"OP"])
    skipping = TextStream(tokenizer, ("STOP",))
    assert skipping.push([1, 0, 2]) == ""
    assert (skipping.stopped, skipping.tokens_used) == ("STOP", 3)
    showing = TextStream(tokenizer, ("<eos>",), skip_special_tokens=False)
    assert showing.push([1, 0, 2]) == "ST"
    assert (showing.stopped, showing.tokens_used) == ("<eos>", 2)


def test_the_stream_of_a_model_s_tokens_is_their_decoding(
    byte_level_tokenizer: Tokenizer, sentence_piece_tokenizer: Tokenizer, strings: list[str]
) -> None:
    """With real vocabularies, byte tokens and leading spaces included, streaming equals decode."""
    for tokenizer in (byte_level_tokenizer, sentence_piece_tokenizer):
        for text in strings[:150]:
            tokens = tokenizer.encode(text, add_special_tokens=True)
            stream = TextStream(tokenizer, ("never in there",))
            assert "".join(stream.push([token]) for token in tokens) + stream.finish() == tokenizer.decode(
                tokens
            )


def test_misuse_is_refused() -> None:
    """An empty stop string would stop everything; tokens behind the end would be lost."""
    tokenizer = tokenizer_of([b"a"])
    with pytest.raises(ValueError, match="empty"):
        TextStream(tokenizer, ("a", ""))
    stream = TextStream(tokenizer)
    stream.finish()
    with pytest.raises(ValueError, match="finished"):
        stream.push([1])
