"""A tokenizer from the metadata of a GGUF file.

The meaning of the keys, the pre-tokenizers' rules and the defaults are those of llama.cpp
(src/llama-vocab.cpp), so that a GGUF file gives the same ids here and there. Known differences:

- The text of a control or byte token (``<0x0A>``) never becomes that token by merging; llama.cpp lets it.
- A token's type counts, not its name: Gemma 3's HTML ``</s>`` is text and ends nothing.
- Where two special tokens overlap in a text the leftmost wins, as in the tokenizers that models are trained
with;
  llama.cpp takes the longest of the whole text first.
- Letters that came with Unicode 16 are letters here; llama.cpp's tables are older.

Where llama.cpp and a model's tokenizer.json differ, this follows llama.cpp: no Unicode normalization (Qwen's
is NFC), no case folding of the long s in contractions, a byte without a token parts its neighbours, and a
literal U+2581 in a SentencePiece text joins no white-space token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.tokenizer_base import (
    SPACE,
    Encoder,
    TokenizerParts,
    byte_fallback_value,
    byte_level_alphabet,
    byte_level_piece,
)
from tenfold.checkpoint.tokenizer_folder import library_ids
from tenfold.checkpoint.tokenizer_metadata import numbers, optional, required, strings, token_id
from tenfold.checkpoint.tokenizer_spm import SentencePieceEncoder

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _modern_split(digits: str) -> str:
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_LLAMA3_SPLIT = _modern_split(r"\p{N}{1,3}")
_QWEN2_SPLIT = _modern_split(r"\p{N}")

_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2_SPLIT,),
    "smollm": (r"\p{N}", _GPT2_SPLIT),
    "llama-bpe": (_LLAMA3_SPLIT,),
    "llama-v3": (_LLAMA3_SPLIT,),
    "llama3": (_LLAMA3_SPLIT,),
    "qwen2": (_QWEN2_SPLIT,),
    "deepseek-r1-qwen": (_QWEN2_SPLIT,),
}
"""``tokenizer.ggml.pre`` to the expressions that cut a text into words, each applied to the words of the one
before."""

_WHOLE_WORDS_AND_BOS = {"llama-bpe", "llama-v3", "llama3"}
"""Pre-tokenizers whose models take a word that is a token as it is, and begin a text with bos by default."""

_END_NAMES = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"),
    *("<|end_of_text|>", "</s>", "<EOT>", "<end_of_utterance>"),
}
"""Control tokens that end an answer in any model that has them: many files name only one of several."""


class BytePairEncoder:
    """Byte-level BPE by the tokenizers library.

    ``hole`` is an id that stands for bytes that the vocabulary lacks: they keep their neighbours apart, as in
    llama.cpp, and are then dropped.
    """

    def __init__(self, with_special: Tokenizer, without_special: Tokenizer, hole: int | None) -> None:
        self._with_special = with_special
        self._without_special = without_special
        self.hole = hole

    def library(self) -> Tokenizer:
        """A copy of the tokenizer that parses special tokens, in the library's own form. It gives `hole`
        where a byte has no token: that is to be dropped."""
        copy: Tokenizer = Tokenizer.from_str(self._with_special.to_str())
        return copy

    def encode(self, text: str, parse_special: bool) -> list[int]:
        tokenizer = self._with_special if parse_special else self._without_special
        ids = library_ids(tokenizer, text)
        if self.hole is not None and self.hole in ids:
            return [token for token in ids if token != self.hole]
        return ids


def read_gguf_tokenizer(metadata: Mapping[str, Any]) -> TokenizerParts:
    """The tokenizer that ``tokenizer.ggml.*`` describe. Raises CheckpointError, naming the key."""
    model = required(metadata, "tokenizer.ggml.model", str)
    if model not in ("gpt2", "llama"):
        raise CheckpointError(
            f"tokenizer.ggml.model is {model!r}, which is not supported: gpt2 (byte-level BPE) and llama"
            " (SentencePiece BPE) are"
        )
    tokens = strings(metadata, "tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError("tokenizer.ggml.tokens is empty")
    types = numbers(metadata, "tokenizer.ggml.token_type", len(tokens)) or [_NORMAL] * len(tokens)
    if unknown := set(types) - {_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE}:
        raise CheckpointError(f"tokenizer.ggml.token_type has {sorted(unknown)[:5]}; 1 to 6 are defined")
    ids = {text: token for token, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        first = next(token for token, text in enumerate(tokens) if ids[text] != token)
        raise CheckpointError(
            f"tokenizer.ggml.tokens: {tokens[first]!r} is there twice, as {first} and {ids[tokens[first]]}"
        )
    if "" in ids:
        raise CheckpointError(f"tokenizer.ggml.tokens: token {ids['']} is empty")

    is_llama = model == "llama"
    bos = token_id(metadata, "bos", len(tokens), default=1 if is_llama else None)
    eos = token_id(metadata, "eos", len(tokens), default=2 if is_llama else None)
    unknown_id = token_id(metadata, "unknown", len(tokens), default=0 if is_llama else None)
    special = {text: token for token, text in enumerate(tokens) if types[token] in (_CONTROL, _UNKNOWN)}
    user_defined = {text: token for token, text in enumerate(tokens) if types[token] == _USER_DEFINED}
    encoder: Encoder
    if is_llama:
        encoder = _sentence_piece(metadata, tokens, types, ids, special, user_defined, unknown_id)
        adds_bos = True
    else:
        encoder, adds_bos = _byte_pairs(metadata, ids, special, user_defined)

    adds_bos = optional(metadata, "tokenizer.ggml.add_bos_token", bool, adds_bos)
    adds_eos = optional(metadata, "tokenizer.ggml.add_eos_token", bool, False)
    for flag, token, name in ((adds_bos, bos, "bos"), (adds_eos, eos, "eos")):
        if flag and token is None:
            raise CheckpointError(
                f"tokenizer.ggml.add_{name}_token is set but tokenizer.ggml.{name}_token_id is missing"
            )
    named = {"bos_token": bos, "eos_token": eos, "unk_token": unknown_id}
    named["pad_token"] = token_id(metadata, "padding", len(tokens), default=None)
    return TokenizerParts(
        encoder=encoder,
        pieces=_pieces(tokens, types, is_llama),
        special_ids=frozenset(special.values()),
        prefix=(bos,) if adds_bos and bos is not None else (),
        suffix=(eos,) if adds_eos and eos is not None else (),
        bos_token_id=bos,
        eos_token_ids=_end_tokens(metadata, len(tokens), eos, special),
        named_tokens={name: tokens[token] for name, token in named.items() if token is not None},
    )


def _byte_pairs(
    metadata: Mapping[str, Any], ids: dict[str, int], special: dict[str, int], user_defined: dict[str, int]
) -> tuple[Encoder, bool]:
    """The encoder, and whether its kind of model begins a text with bos."""
    pre = required(metadata, "tokenizer.ggml.pre", str)
    if pre not in _SPLITS:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {pre!r}, a pre-tokenizer that is not supported; {', '.join(_SPLITS)} are"
        )
    merges = strings(metadata, "tokenizer.ggml.merges")
    pairs = []
    for at, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise CheckpointError(
                f"tokenizer.ggml.merges: entry {at} is {merge!r}, not two tokens with a space between"
            )
        pairs.append((left, right))
    if len(set(pairs)) != len(pairs):
        raise CheckpointError("tokenizer.ggml.merges: a pair is there twice")

    vocab, hole = ids, None
    if not all(char in ids for char in byte_level_alphabet()):
        # A text cannot contain this name: its first character is not of the byte alphabet.
        hole, name = len(ids), "\0hole"
        vocab = {**ids, name: hole}
    try:
        bpe = models.BPE(
            vocab=vocab,
            merges=pairs,
            unk_token=None if hole is None else name,
            ignore_merges=pre in _WHOLE_WORDS_AND_BOS,
        )
    except Exception as error:  # the library raises nothing more particular
        raise CheckpointError(f"tokenizer.ggml.merges: {error}") from error
    steps = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Sequence([*steps, to_bytes])

    def tokenizer(parse_special: bool) -> Tokenizer:
        made = Tokenizer(bpe)
        made.pre_tokenizer = words
        made.add_tokens([AddedToken(text, normalized=False) for text in user_defined])
        if parse_special:
            made.add_special_tokens([AddedToken(text, normalized=False) for text in special])
        return made

    return BytePairEncoder(tokenizer(True), tokenizer(False), hole), pre in _WHOLE_WORDS_AND_BOS


def _sentence_piece(
    metadata: Mapping[str, Any],
    tokens: list[str],
    types: list[int],
    ids: dict[str, int],
    special: dict[str, int],
    user_defined: dict[str, int],
    unknown_id: int | None,
) -> Encoder:
    values = numbers(metadata, "tokenizer.ggml.scores", len(tokens), real=True)
    if values is None:
        raise CheckpointError("tokenizer.ggml.scores is missing")
    if any(math.isnan(value) for value in values):
        raise CheckpointError("tokenizer.ggml.scores has a NaN")
    byte_ids = [ids.get(f"<0x{byte:02X}>", -1) for byte in range(256)]
    has_bytes = all(token >= 0 and types[token] == _BYTE for token in byte_ids)
    if not has_bytes and unknown_id is None:
        raise CheckpointError(
            "tokenizer.ggml.tokens lacks byte tokens (<0x00> to <0xFF>) and tokenizer.ggml.unknown_token_id"
            " is missing: some texts would have no tokens"
        )
    normal = {text: token for text, token in ids.items() if types[token] in (_NORMAL, _UNUSED)}
    return SentencePieceEncoder(
        normal,
        {text: values[token] for text, token in normal.items()},
        special=special,
        user_defined=user_defined,
        byte_ids=byte_ids if has_bytes else None,
        unknown_id=unknown_id,
        space_prefix=optional(metadata, "tokenizer.ggml.add_space_prefix", bool, True),
    )


def _pieces(tokens: list[str], types: list[int], is_llama: bool) -> list[bytes]:
    alphabet = byte_level_alphabet()
    pieces = []
    for token, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _UNUSED:
            piece = b""
        elif kind == _BYTE:
            byte = byte_fallback_value(text)
            if byte is None:
                raise CheckpointError(f"tokenizer.ggml.tokens: {token} is a byte token named {text!r}")
            piece = bytes((byte,))
        elif kind != _NORMAL:
            piece = text.encode("utf-8")
        elif is_llama:
            piece = text.replace(SPACE, " ").encode("utf-8")
        else:
            piece = byte_level_piece(text, alphabet)
        pieces.append(piece)
    return pieces


def _end_tokens(
    metadata: Mapping[str, Any], count: int, eos: int | None, special: dict[str, int]
) -> tuple[int, ...]:
    named = [eos, *(token_id(metadata, kind, count, default=None) for kind in ("eot", "eom"))]
    known = sorted(token for text, token in special.items() if text in _END_NAMES)
    return tuple(dict.fromkeys(token for token in [*named, *known] if token is not None))
