"""How much text a number of tokens can hold: what a too long prompt is refused by before it is tokenized."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.checkpoint.tokenizer import Tokenizer


@pytest.fixture(params=["byte_level_tokenizer", "sentence_piece_tokenizer"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def test_no_text_has_fewer_tokens_than_its_bytes_need(tokenizer: Tokenizer, strings: list[str]) -> None:
    """So a text that is refused for its bytes would have been refused for its tokens."""
    longest = tokenizer.longest_token_bytes

    @given(st.text() | st.sampled_from(strings) | st.text(" \nab", max_size=400))
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(text.encode()) <= len(ids) * longest

    check()


def test_the_longest_token_is_found(tokenizer: Tokenizer) -> None:
    """It alone reaches the bound."""
    sizes = [len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)]
    assert tokenizer.longest_token_bytes == max(sizes)
