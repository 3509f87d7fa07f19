"""Text to token ids and back.

``decode`` and everything that streams text define the text of tokens as the concatenation of their bytes,
read as UTF-8 with U+FFFD for what is not. So the text of a sequence is the same however it is cut. In
particular a leading space that a SentencePiece model writes is kept: the text of an answer is what the model
generated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tenfold.checkpoint.tokenizer_base import TokenizerParts
from tenfold.checkpoint.tokenizer_folder import read_folder_tokenizer
from tenfold.checkpoint.tokenizer_gguf import read_gguf_tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of the model at ``path``, a folder or a GGUF file. Raises CheckpointError."""
    from tenfold.checkpoint.gguf_checkpoint import GGUFCheckpoint

    if Path(path).is_dir():
        return Tokenizer.from_folder(path)
    checkpoint = GGUFCheckpoint(str(path))
    try:
        return Tokenizer.from_gguf_metadata(checkpoint.metadata)
    finally:
        checkpoint.close()


class Tokenizer:
    """The tokenizer of one model. Immutable; safe to use from several threads."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._visible = [
            b"" if token in parts.special_ids else piece for token, piece in enumerate(parts.pieces)
        ]
        self._longest = max(map(len, parts.pieces), default=0)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """From a model folder: tokenizer.json, and tokenizer_config.json, generation_config.json and
        config.json where there are. Raises CheckpointError, naming the file."""
        return cls(read_folder_tokenizer(Path(path)))

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From a GGUF file's keys and values. Raises CheckpointError, naming the key."""
        return cls(read_gguf_tokenizer(metadata))

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool = True) -> list[int]:
        """Token ids of ``text``.

        ``add_special_tokens``: with the tokens that the model expects around every text (bos); not for a
        prompt that a chat template has rendered. ``parse_special``: the name of a special token in the text
        becomes that token; switch it off for text from strangers that should not steer the model.
        Raises ValueError for a lone surrogate, which no UTF-8 text has.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}"
            ) from None
        ids = self._parts.encoder.encode(text, parse_special)
        return [*self._parts.prefix, *ids, *self._parts.suffix] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; see the head of this file for what that means."""
        data = b"".join(self.token_bytes(token, skip_special_tokens) for token in ids)
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token: int, skip_special_tokens: bool = False) -> bytes:
        """What one token says; a special token says its name, or nothing with ``skip_special_tokens``.

        An id behind the vocabulary says nothing: a model's output may have more rows than there are tokens.
        """
        pieces = self._visible if skip_special_tokens else self._parts.pieces
        if token < 0:
            raise ValueError(f"{token} is no token id")
        return pieces[token] if token < len(pieces) else b""

    @property
    def vocab_size(self) -> int:
        """The number of tokens; a model's output may have more rows."""
        return len(self._parts.pieces)

    @property
    def longest_token_bytes(self) -> int:
        """The most bytes that one token says."""
        return self._longest

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that steer the model and are no text of an answer."""
        return self._parts.special_ids

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if the model has one (see `adds_bos`)."""
        return self._parts.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: of the text, of the turn. The file's own ``eos`` is the first."""
        return self._parts.eos_token_ids

    @property
    def adds_bos(self) -> bool:
        """Whether ``add_special_tokens`` puts `bos_token_id` before a text."""
        return self.bos_token_id is not None and self.bos_token_id in self._parts.prefix

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """The texts of ``bos_token``, ``eos_token``, ``unk_token`` and ``pad_token``, those that there
        are."""
        return self._parts.named_tokens
