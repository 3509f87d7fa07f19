"""What the fake engine must answer."""

from __future__ import annotations

from tests.helpers.fake_engine import token_at
from tests.helpers.fake_text import FakeTemplate, FakeTokenizer, piece_of


def tokens(prompt: tuple[int, ...], seed: int, count: int) -> list[int]:
    """The first ``count`` tokens after a prompt, with end of sequence ignored."""
    return [token_at(prompt, seed, len(prompt) + index) for index in range(count)]


def text(prompt: str, seed: int, count: int) -> str:
    """The text of the first ``count`` tokens after a raw prompt."""
    ids = tuple(FakeTokenizer().encode(prompt, add_special_tokens=True, parse_special=True))
    return "".join(piece_of(id) for id in tokens(ids, seed, count))


def chat_text(content: str, seed: int, count: int) -> str:
    """The text of the first ``count`` tokens after one user message."""
    return text(FakeTemplate().render([{"role": "user", "content": content}]), seed, count)
