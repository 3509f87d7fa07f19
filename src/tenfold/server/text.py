"""Text in, token ids out, and back: the only place where the front meets tokenizers and chat templates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tenfold.checkpoint.control_names import ControlNames
from tenfold.checkpoint.pooling import UNSAID, PoolingRule
from tenfold.limits import PromptTooLong


class Tokens(Protocol):
    """What the front needs of a tokenizer."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def longest_token_bytes(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]: ...

    def token_bytes(self, token: int, /) -> bytes: ...


class Template(Protocol):
    """What the front needs of a chat template. Raises ValueError for messages that it does not take."""

    @property
    def source(self) -> str:
        """Its text, for whoever wants to know what a model was trained on."""
        ...

    @property
    def variables(self) -> frozenset[str]:
        """What it reads: ``tools`` is among them where it can put tools to the model."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = ...,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        **extra: Any,
    ) -> str: ...


class Stream(Protocol):
    """Tokens of one request becoming text; holds back what may still turn out to be part of a stop string."""

    stopped: str | None
    """The stop string that ended the text."""
    tokens_used: int
    """Tokens up to and including the one that completed the stop string."""

    def push(self, token_ids: Iterable[int], /) -> str: ...

    def finish(self) -> str: ...


class StreamMaker(Protocol):
    """Makes streams that end at any of the given stop strings. Special tokens are no text, but for those that
    are ``shown``."""

    def __call__(self, stop: tuple[str, ...], shown: frozenset[int] = ..., /) -> Stream: ...


class ChatPrompt(NamedTuple):
    """A conversation, ready for the answer."""

    ids: list[int]
    text: str
    """What the template made of it."""


@dataclass(frozen=True)
class Text:
    """A model's text side. Stateless, and safe to use from several threads."""

    tokenizer: Tokens
    template: Template | None
    """None: the model comes without a chat template."""
    stream: StreamMaker
    control_names: ControlNames = field(default_factory=lambda: ControlNames(()))
    """What must not become a token where it stands in a message."""
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens that are no text of an answer, by name."""
    pooling: PoolingRule = UNSAID
    """What an embedding is made of unless a request says otherwise."""

    def encode_prompt(self, text: str, context: int | None = None) -> list[int]:
        """A raw prompt: special tokens written in it are taken as such.

        Raises PromptTooLong, before the work of tokenizing, for a text that ``context`` tokens cannot hold.
        """
        self.check_size(text, context)
        return self.tokenizer.encode(text, add_special_tokens=True, parse_special=True)

    def encode_chat(self, messages: list[dict[str, Any]], context: int | None = None) -> list[int]:
        """The tokens of `chat_prompt`."""
        return self.chat_prompt(messages, context).ids

    def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        context: int | None = None,
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> ChatPrompt:
        """A conversation, ready for the answer. Names of control tokens in it are plain text.

        ``tools``: in OpenAI's form; ``variables``: further ones for the template; without
        ``add_generation_prompt`` it ends with the last message, and not with the beginning of an answer.
        Raises ValueError when the template refuses it, and PromptTooLong as `encode_prompt` does.
        """
        if self.template is None:
            raise ValueError("this model has no chat template; use /v1/completions (or generate with --raw)")
        (marked, marked_tools, more), mark = self.control_names.mark([messages, tools, variables or {}])
        rendered = self.template.render(
            marked, add_generation_prompt=add_generation_prompt, tools=marked_tools, **more
        )
        pieces = rendered.split(mark)
        text = "".join(pieces)
        self.check_size(text, context)
        # The template writes the special tokens itself, and only the template.
        ids = [
            token
            for piece in pieces
            for token in self.tokenizer.encode(piece, add_special_tokens=False, parse_special=True)
        ]
        return ChatPrompt(ids, text)

    def check_size(self, text: str, context: int | None) -> None:
        """Raises PromptTooLong for a text that ``context`` tokens cannot hold; None: any length will do."""
        if context is None:
            return
        # A normalizer may make a text smaller first, but hardly one whose every token is of the longest kind.
        size = len(text.encode("utf-8", errors="surrogatepass"))
        most = context * self.tokenizer.longest_token_bytes
        if size > most:
            raise PromptTooLong(
                "prompt",
                f"has {size} bytes; the model's context of {context} tokens holds {most} at the very most. "
                "Shorten the prompt",
            )


def load_text(path: str) -> Text:
    """The text side of the model at ``path``. Raises CheckpointError (a ValueError), naming file or key."""
    from tenfold.checkpoint.chat_template import ChatTemplate
    from tenfold.checkpoint.gguf_checkpoint import GGUFCheckpoint
    from tenfold.checkpoint.open import check_path
    from tenfold.checkpoint.pooling import folder_pooling, gguf_pooling
    from tenfold.checkpoint.text_stream import TextStream
    from tenfold.checkpoint.tokenizer import Tokenizer

    check_path(path)  # first what is wrong with the whole, as the worker says it
    if Path(path).is_dir():
        tokenizer = Tokenizer.from_folder(path)
        template = ChatTemplate.from_folder(path, tokenizer.named_tokens)
        pooling = folder_pooling(path)
    else:
        checkpoint = GGUFCheckpoint(path)
        try:
            tokenizer = Tokenizer.from_gguf_metadata(checkpoint.metadata)
            template = ChatTemplate.from_gguf_metadata(checkpoint.metadata, tokenizer.named_tokens)
            pooling = gguf_pooling(checkpoint.metadata)
        finally:
            checkpoint.close()
    special = {
        tokenizer.token_bytes(token).decode("utf-8", errors="replace"): token
        for token in (*tokenizer.eos_token_ids, *tokenizer.special_ids)
    }

    def stream(stop: tuple[str, ...], shown: frozenset[int] = frozenset()) -> Stream:
        return TextStream(tokenizer, stop, shown=shown)

    return Text(tokenizer, template, stream, ControlNames(special), special, pooling)
