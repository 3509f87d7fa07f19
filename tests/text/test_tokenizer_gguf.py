from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.tokenizer import Tokenizer
from tenfold.checkpoint.tokenizer_base import byte_level_alphabet


def byte_level_metadata(pre: str, merges: list[str], extra: list[str] | None = None) -> dict[str, Any]:
    """All bytes, what ``merges`` make, and control tokens."""
    made = [merge.replace(" ", "") for merge in merges]
    tokens = [*byte_level_alphabet(), *made, *(extra or [])]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (256 + len(made)) + [3] * len(extra or []),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def sentence_piece_metadata(**changes: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁a"],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -3.0, -4.0, -5.0, -1.0, -2.0],
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [tokenizer.decode([token]) for token in ids]


DIGITS = ["1 2", "12 3", "123 4", "1234 5", "12345 6", "Ġ 1"]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["x", "123456", " 1"]),
        ("smollm", ["x", "1", "2", "3", "4", "5", "6", " ", "1"]),
        ("llama-bpe", ["x", "123", "4", "5", "6", " ", "1"]),
        ("qwen2", ["x", "1", "2", "3", "4", "5", "6", " ", "1"]),
    ],
)
def test_digits_are_cut_as_each_pre_tokenizer_cuts_them(pre: str, expected: list[str]) -> None:
    """A model sees numbers cut as in its training: whole, in threes, or digit by digit."""
    tokenizer = Tokenizer.from_gguf_metadata(byte_level_metadata(pre, DIGITS))
    assert words(tokenizer, "x123456 1") == expected


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "X'S", ["X", "'", "S"]),
        ("qwen2", "X'S", ["X", "'S"]),
        ("gpt-2", "(a", ["(", "a"]),
        ("llama-bpe", "(a", ["(a"]),
        ("gpt-2", ".\n\n", [".", "\n\n"]),
        ("qwen2", ".\n\n", [".\n\n"]),
    ],
)
def test_words_are_cut_as_each_pre_tokenizer_cuts_them(pre: str, text: str, expected: list[str]) -> None:
    """Contractions, what a word may begin with and what newlines belong to differ between families."""
    tokenizer = Tokenizer.from_gguf_metadata(byte_level_metadata(pre, ["' S", "( a", "Ċ Ċ", ". ĊĊ"]))
    assert words(tokenizer, text) == expected


def test_text_survives(
    byte_level_tokenizer: Tokenizer, sentence_piece_tokenizer: Tokenizer, strings: list[str]
) -> None:
    """decode(encode(text)) is the text, whatever it is; SentencePiece alone reads U+2581 as a space."""
    for text in strings:
        ids = byte_level_tokenizer.encode(text, add_special_tokens=False)
        assert byte_level_tokenizer.decode(ids, skip_special_tokens=False) == text
        ids = sentence_piece_tokenizer.encode(text, add_special_tokens=False)
        assert sentence_piece_tokenizer.decode(ids, skip_special_tokens=False) == text.replace("▁", " ")


def test_special_tokens_in_a_text_are_tokens_only_where_wanted(
    byte_level_tokenizer: Tokenizer, sentence_piece_tokenizer: Tokenizer
) -> None:
    """Text of strangers cannot steer the model with parse_special off; user-defined tokens are text, and
    stay."""
    for tokenizer, name in ((byte_level_tokenizer, "<|im_end|>"), (sentence_piece_tokenizer, "</s>")):
        text = f"a{name}<tool_call>"
        parsed = tokenizer.encode(text, add_special_tokens=False)
        plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert len(tokenizer.special_ids & set(parsed)) == 1
        assert not tokenizer.special_ids & set(plain)
        assert parsed[-1] == plain[-1]
        assert tokenizer.decode(parsed) == "a<tool_call>"
        assert tokenizer.decode(parsed, skip_special_tokens=False) == tokenizer.decode(plain) == text


def test_merging_makes_no_control_or_byte_token() -> None:
    """Pieces of a text that spell a control or a byte token do not become it, though merging could join
    them."""
    tokens = ["<unk>", "<s", ">", "<", "s", "<s>", "<0", "x0A>", "<0x0A>", "0", "x", "A", "x0", "A>"]
    metadata = sentence_piece_metadata(
        tokens=tokens,
        token_type=[2, 1, 1, 1, 1, 3, 1, 1, 6, 1, 1, 1, 1, 1],
        scores=[-float(rank) for rank in range(len(tokens))],
        bos_token_id=5,
        eos_token_id=5,
        add_space_prefix=False,
    )
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    assert tokenizer.encode("<s>", add_special_tokens=False, parse_special=False) == [1, 2]
    assert tokenizer.encode("<0x0A>", add_special_tokens=False) == [6, 7]


def test_bytes_that_a_vocabulary_lacks_keep_their_neighbours_apart() -> None:
    """A byte without a token is dropped (as in llama.cpp), but its neighbours do not grow together."""
    metadata = byte_level_metadata("gpt-2", ["Ã b"])
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("©")] = "unused"  # é is the bytes of Ã and © in this alphabet
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    found = tokenizer.encode("aéb", add_special_tokens=False)
    assert [tokens[token] for token in found] == ["a", "Ã", "b"]


def test_end_tokens_are_found_by_key_and_by_name() -> None:
    """A file names one end token of several; an answer ends at each. A text token of such a name ends
    nothing."""
    metadata = byte_level_metadata("qwen2", ["a b"], extra=["<|im_end|>", "<|endoftext|>", "<|custom|>"])
    metadata["tokenizer.ggml.eos_token_id"] = 258
    metadata["tokenizer.ggml.eot_token_id"] = 259
    assert Tokenizer.from_gguf_metadata(metadata).eos_token_ids == (258, 259, 257)
    metadata["tokenizer.ggml.token_type"][257] = 4
    assert Tokenizer.from_gguf_metadata(metadata).eos_token_ids == (258, 259)


def test_bos_and_eos_surround_a_text_as_the_file_says() -> None:
    """Each model gets the surroundings it was trained with, and a caller who rendered a template gets
    none."""
    metadata = byte_level_metadata("qwen2", ["a b"])
    assert not Tokenizer.from_gguf_metadata(metadata).adds_bos
    metadata["tokenizer.ggml.pre"] = "llama-bpe"
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    assert tokenizer.adds_bos
    assert tokenizer.encode("ab", add_special_tokens=True) == [0, 256]
    assert tokenizer.encode("ab", add_special_tokens=False) == [256]
    metadata |= {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    assert Tokenizer.from_gguf_metadata(metadata).encode("ab", add_special_tokens=True) == [256, 1]


def test_token_bytes() -> None:
    """Every token has the bytes that it adds to a text; rows behind the vocabulary add none."""
    tokenizer = Tokenizer.from_gguf_metadata(byte_level_metadata("qwen2", ["Ġ a"], extra=["<|im_end|>"]))
    assert tokenizer.token_bytes(256) == b" a"
    assert tokenizer.token_bytes(257) == b"<|im_end|>"
    assert tokenizer.token_bytes(257, skip_special_tokens=True) == b""
    assert tokenizer.token_bytes(100_000) == b""
    with pytest.raises(ValueError, match="-1"):
        tokenizer.token_bytes(-1)


def test_a_lone_surrogate_is_refused(byte_level_tokenizer: Tokenizer) -> None:
    """A text that has no UTF-8 form is named, with the place, and not mangled."""
    with pytest.raises(ValueError, match=r"U\+D800.*character 2"):
        byte_level_tokenizer.encode("ab\ud800", add_special_tokens=False)


BYTES = list(byte_level_alphabet())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "rwkv"}, "'rwkv'"),
        ({"model": 3}, "tokenizer.ggml.model"),
        ({"pre": "tekken"}, "'tekken'"),
        ({"pre": None}, "tokenizer.ggml.pre"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokens": []}, "tokenizer.ggml.tokens"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens"),
        ({"tokens": [*BYTES, 7]}, "entry 256"),
        ({"tokens": [*BYTES, "a"]}, "'a' is there twice"),
        ({"tokens": [*BYTES, ""]}, "token 256 is empty"),
        ({"tokens": [*BYTES, "a\ud800"]}, "not UTF-8"),
        ({"token_type": [1] * 256}, "256 entries"),
        ({"token_type": [1] * 256 + [9]}, "token_type"),
        ({"token_type": [1] * 256 + ["x"]}, "token_type"),
        ({"token_type": [1] * 256 + [6]}, "byte token"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"merges": ["a b c"]}, "'a b c'"),
        ({"merges": ["ab"]}, "'ab'"),
        ({"merges": ["a b", "a b"]}, "twice"),
        ({"merges": ["a nosuchtoken"]}, "nosuchtoken"),
        ({"merges": ["x y"]}, "xy"),
        ({"eos_token_id": 257}, "eos_token_id is 257"),
        ({"eos_token_id": True}, "eos_token_id"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id is missing"),
        ({"add_bos_token": "yes"}, "add_bos_token"),
    ],
)
def test_metadata_that_lies_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    """A hostile or broken file is an error that says which key is wrong, never a crash or a wrong
    tokenizer."""
    metadata = byte_level_metadata("qwen2", ["a b"])
    for key, value in changes.items():
        if value is None:
            del metadata[f"tokenizer.ggml.{key}"]
        else:
            metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml") as caught:
        Tokenizer.from_gguf_metadata(metadata)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scores": [0.0]}, "scores has 1 entries"),
        ({"scores": [0.0] * 7 + [float("nan")]}, "NaN"),
        ({"scores": [0.0] * 7 + ["high"]}, "entry 7"),
        ({"unknown_token_id": -1}, "unknown_token_id"),
    ],
)
def test_scores_that_lie_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    """As for byte-level vocabularies."""
    Tokenizer.from_gguf_metadata(sentence_piece_metadata())
    with pytest.raises(CheckpointError, match=named):
        Tokenizer.from_gguf_metadata(sentence_piece_metadata(**changes))


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.text(max_size=3),
    st.lists(st.one_of(st.text(max_size=3), st.integers(-1, 9), st.floats()), max_size=6),
)
KEYS = ("model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "add_bos_token")


@settings(max_examples=150, deadline=None)
@given(
    base=st.sampled_from(["gpt2", "llama"]), changes=st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=3)
)
def test_any_metadata_makes_a_tokenizer_or_a_clear_error(base: str, changes: dict[str, Any]) -> None:
    """Nothing but CheckpointError comes out of arbitrary metadata, and a tokenizer that comes out works."""
    metadata = byte_level_metadata("qwen2", ["a b"]) if base == "gpt2" else sentence_piece_metadata()
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    try:
        tokenizer = Tokenizer.from_gguf_metadata(metadata)
    except CheckpointError as error:
        assert "tokenizer.ggml" in str(error)
    else:
        tokenizer.decode(tokenizer.encode("ab é", add_special_tokens=True))
