"""A small vocabulary to constrain texts of, and constraints."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from tenfold.constraints.base import Matcher
from tenfold.constraints.compiler import Compiler
from tenfold.protocol import Constraint, ConstraintKind

WORDS = ['{"', '":', '",', '"}', "true", "name", '": ', "12", "ab", "],", "null", "[{", "re", "in"]
"""Tokens of several characters, in the place of characters that the tests can do without."""


class SmallVocabulary:
    """96 tokens: the end, most printable characters, the two bytes of an accented one, and `WORDS`, so that
    a text has many ways to be cut."""

    def __init__(self) -> None:
        characters = [chr(code).encode() for code in range(32, 127) if chr(code) not in "~`^@#$%&;<>=|?!'"]
        self.pieces = [b"<end>", *characters, b"\xc3", b"\xa9", *(word.encode() for word in WORDS)]
        assert len(self.pieces) == 96
        self.vocab_size = 96
        self.special_ids = frozenset((0,))
        self.eos_token_ids = (0,)
        self._longest_first = sorted(range(1, 96), key=lambda token: -len(self.pieces[token]))

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        tokens, data = [], text.encode()
        while data:
            token = next((t for t in self._longest_first if data.startswith(self.pieces[t])), None)
            if token is not None:
                tokens.append(token)
            data = data[1 if token is None else len(self.pieces[token]) :]
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """Without the end."""
        return b"".join(self.pieces[token] for token in tokens if token).decode(errors="replace")


class ByteVocabulary:
    """A token for each byte, behind the end."""

    vocab_size = 257
    special_ids = frozenset((0,))
    eos_token_ids = (0,)

    def token_bytes(self, token: int) -> bytes:
        return bytes((token - 1,)) if token else b"<end>"

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        return [byte + 1 for byte in text.encode()]


SMALL = SmallVocabulary()


def small_compiler(size: int = 96) -> Compiler:
    """A compiler for the small vocabulary, or a model with more rows than that."""
    return Compiler(lambda: SMALL, size)


def constraint(kind: ConstraintKind, value: Any = "") -> Constraint:
    """Schemas and choices may be given as such."""
    return Constraint(kind=kind, text=value if isinstance(value, str) else json.dumps(value))


def allowed(matcher: Matcher, vocab_size: int = 96) -> list[int]:
    """Tokens that may come next."""
    mask: npt.NDArray[np.uint32] = np.zeros((vocab_size + 31) // 32, np.uint32)
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found
