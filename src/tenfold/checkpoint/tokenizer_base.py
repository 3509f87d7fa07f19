"""What a tokenizer is made of, however it was stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class Encoder(Protocol):
    """Text to token ids, without the tokens that a model adds around a text. Safe to call from several
    threads."""

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """``parse_special``: the text of a special token, ``<|im_end|>``, becomes that token; else it is
        plain text."""
        ...


@dataclass(frozen=True)
class TokenizerParts:
    """A tokenizer as its file describes it."""

    encoder: Encoder
    pieces: list[bytes]
    """What each token says, by id. For a special token: its name."""
    special_ids: frozenset[int]
    """Tokens that steer the model and are no text of the answer."""
    prefix: tuple[int, ...] = ()
    """Tokens that the model expects before every text ..."""
    suffix: tuple[int, ...] = ()
    """... and after it."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer, the file's own ``eos`` first."""
    named_tokens: dict[str, str] = field(default_factory=dict)
    """The text of ``bos_token``, ``eos_token`` ... as chat templates call them."""


def byte_level_alphabet() -> dict[str, int]:
    """Character to byte in byte-level BPE vocabularies (GPT-2, Radford et al. 2019).

    A byte that prints in Latin-1 stands for itself; the others, in order, are the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def byte_level_piece(text: str, alphabet: dict[str, int]) -> bytes:
    """The bytes behind a token of a byte-level vocabulary; a token outside its alphabet is plain UTF-8."""
    try:
        return bytes([alphabet[char] for char in text])
    except KeyError:
        return text.encode("utf-8")


SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece writes a space as this character."""


def byte_fallback_value(text: str) -> int | None:
    """The byte of a SentencePiece byte token (``<0x0A>``), None for any other text."""
    if len(text) != 6 or not text.startswith("<0x") or text[5] != ">":
        return None
    try:
        return int(text[3:5], 16)
    except ValueError:
        return None
