"""Text in, token ids out, and back: the only place where the front meets tokenizers and chat templates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Tokens(Protocol):
    """What the front needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False
    ) -> list[int]: ...

    def token_bytes(self, id: int) -> bytes: ...


class Template(Protocol):
    """What the front needs of a chat template. Raises ValueError for messages that it does not take."""

    def render(
        self,
        messages: list[dict[str, str]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
    ) -> str: ...


class Stream(Protocol):
    """Tokens of one request becoming text; holds back what may still turn out to be part of a stop string."""

    @property
    def stopped(self) -> bool: ...

    @property
    def tokens_used(self) -> int: ...

    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True)
class Text:
    """A model's text side. Stateless, and safe to use from several threads."""

    tokenizer: Tokens
    template: Template | None
    """None: the model comes without a chat template."""
    stream: Callable[[Sequence[str]], Stream]
    """A new stream that ends at any of the given stop strings."""

    def encode_prompt(self, text: str) -> list[int]:
        """A raw prompt: special tokens written in it are taken as such."""
        return self.tokenizer.encode(text, add_special_tokens=True, parse_special=True)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """A conversation, ready for the answer. Raises ValueError when the template refuses it."""
        if self.template is None:
            raise ValueError("this model has no chat template; use /v1/completions (or generate with --raw)")
        # The template writes the special tokens itself.
        return self.tokenizer.encode(
            self.template.render(messages), add_special_tokens=False, parse_special=True
        )
