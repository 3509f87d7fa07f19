from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.checkpoint.tokenizer_spm import SentencePieceEncoder, TokenSplitter

SPACE = "▁"


def merged_by_the_book(text: str, scores: dict[str, float]) -> list[str]:
    """The law itself: while two neighbours form a token, merge the pair of the highest score, the
    leftmost."""
    symbols = list(text)
    while True:
        pairs = [
            (-scores[symbols[at] + symbols[at + 1]], at)
            for at in range(len(symbols) - 1)
            if symbols[at] + symbols[at + 1] in scores
        ]
        if not pairs:
            return symbols
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


pieces = st.lists(st.text("ab" + SPACE, min_size=2, max_size=5), unique=True, max_size=12)


@settings(max_examples=400, deadline=None)
@given(
    pieces=pieces,
    scores=st.lists(st.integers(0, 5), min_size=15, max_size=15),
    text=st.text("ab c", max_size=30),
)
def test_merging_is_by_the_book(pieces: list[str], scores: list[int], text: str) -> None:
    """Queue, cuts at spaces and cache change nothing, also with equal scores and with tokens that hold
    spaces."""
    vocabulary = ["a", "b", SPACE, *pieces]
    ids = {piece: token for token, piece in enumerate(vocabulary)}
    by_piece = {piece: float(score) for piece, score in zip(vocabulary, scores, strict=False)}
    encoder = SentencePieceEncoder(
        ids, by_piece, special={}, user_defined={}, byte_ids=None, unknown_id=99, space_prefix=False
    )
    expected = [ids.get(symbol, 99) for symbol in merged_by_the_book(text.replace(" ", SPACE), by_piece)]
    assert encoder.encode(text, True) == expected
    assert encoder.encode(text, True) == expected


def test_a_character_in_no_token_is_its_bytes() -> None:
    """With byte tokens every text has tokens, and the bytes are those of UTF-8, in order."""
    encoder = SentencePieceEncoder(
        {"a": 300},
        {"a": 0.0},
        special={},
        user_defined={},
        byte_ids=list(range(256)),
        unknown_id=None,
        space_prefix=False,
    )
    assert encoder.encode("aé😀", True) == [300, *"é😀".encode()]


def test_a_space_prefix_stands_before_the_text_and_after_special_tokens() -> None:
    """Llama 2's models were trained with it: each stretch of text begins with a space, a user's token's
    too."""
    ids = {SPACE: 0, "a": 1, SPACE + "a": 2}
    scores = {piece: -float(token) for piece, token in ids.items()}
    encoder = SentencePieceEncoder(
        ids,
        scores,
        special={"<s>": 7},
        user_defined={"<t>": 8},
        byte_ids=None,
        unknown_id=9,
        space_prefix=True,
    )
    assert encoder.encode("a<s>a<t>a a", True) == [2, 7, 2, 8, 2, 2]
    assert encoder.encode("", True) == []


texts = st.text("ab<>", max_size=20)


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.text("ab<>", min_size=1, max_size=4), unique=True, max_size=6), text=texts)
def test_splitting_takes_the_leftmost_and_there_the_longest(tokens: list[str], text: str) -> None:
    """As a regular expression with the longest alternative first, which is slow for thousands of tokens."""
    ids = {token: at for at, token in enumerate(tokens)}
    expected: list[str | int] = []
    if tokens:
        alternatives = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))
        for part in re.split(f"({alternatives})", text):
            if part:
                expected.append(ids.get(part, part))
    elif text:
        expected = [text]
    assert list(TokenSplitter(ids).split(text)) == expected
