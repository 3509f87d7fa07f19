"""A tokenizer, template and text stream without files: printable characters and short words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tenfold.server.text import Text
from tests.helpers.fake_engine import EOS


def piece_of(id: int) -> str:
    """The text of a token: 1 to 95 are the printable ASCII characters, the others words."""
    if id == EOS:
        return ""
    return chr(31 + id) if id < 96 else f" w{id}"


class FakeTokenizer:
    """One token a character when encoding."""

    eos_token_ids = (EOS,)
    longest_token_bytes = 5
    vocab_size = 128
    special_ids = frozenset((EOS,))

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        return [ord(char) - 31 if 32 <= ord(char) < 127 else 95 for char in text]

    def token_bytes(self, token: int) -> bytes:
        return piece_of(token).encode()


class FakeTemplate:
    """``role:content|`` for each message."""

    source = "{% for message in messages %}"
    variables = frozenset({"messages"})

    def render(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        if messages[0]["role"] == "tool":
            raise ValueError("a conversation cannot begin with a tool's answer")
        return "".join(f"{message['role']}:{message['content']}|" for message in messages)


class FakeStream:
    """Holds back any tail that a stop string may begin with."""

    def __init__(self, stop: tuple[str, ...], shown: frozenset[int] = frozenset()) -> None:
        self._stop = stop
        self._held = ""
        self.stopped: str | None = None
        self.tokens_used = 0

    def push(self, ids: Iterable[int]) -> str:
        out = ""
        for id in ids:
            self._held += piece_of(id)
            self.tokens_used += 1
            hits = [(self._held.index(stop), stop) for stop in self._stop if stop in self._held]
            if hits:
                cut, self.stopped = min(hits)
                return out + self._held[:cut]
            keep = max(
                (
                    size
                    for stop in self._stop
                    for size in range(1, len(stop))
                    if self._held.endswith(stop[:size])
                ),
                default=0,
            )
            cut = len(self._held) - keep
            out, self._held = out + self._held[:cut], self._held[cut:]
        return out

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def load_fake_text(path: str) -> Text:
    """The server's text loader."""
    return Text(tokenizer=FakeTokenizer(), template=FakeTemplate(), stream=FakeStream)
