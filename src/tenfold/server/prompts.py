"""The prompts of a completion request."""

from __future__ import annotations

from typing import Any

from tenfold.server.errors import invalid
from tenfold.server.fields import show, token_ids

MAX_CHOICES = 128
"""Of one request, over all its prompts."""


def parse_prompts(value: Any, vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    """``prompt``: a text or token ids, or a list of either. Raises ApiError that names what is wrong."""
    if value is None:
        raise invalid("prompt", "prompt is missing", code="missing_parameter")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise invalid(
            "prompt",
            f"prompt is {show(value)}; it must be a string or a list of token ids, or a list of those",
        )
    if value and isinstance(value[0], str | list):
        return _several(value, vocab_size)
    ids = token_ids("prompt", value, vocab_size)
    if not ids:
        raise invalid("prompt", "prompt is empty; it must have at least one token")
    return (ids,)


def _several(value: list[Any], vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    if len(value) > MAX_CHOICES:
        raise invalid("prompt", f"prompt has {len(value)} prompts; a request can have up to {MAX_CHOICES}")
    other = next((i for i, item in enumerate(value) if type(item) is not type(value[0])), None)
    if other is not None:
        raise invalid(
            "prompt",
            f"prompt[{other}] is {show(value[other])}, and prompt[0] is not of that kind; a prompt is a "
            "string or a list of token ids",
        )
    prompts = []
    for index, item in enumerate(value):
        prompt = item if isinstance(item, str) else token_ids(f"prompt[{index}]", item, vocab_size)
        if not isinstance(item, str) and not item:
            raise invalid(f"prompt[{index}]", f"prompt[{index}] is empty; it must have at least one token")
        prompts.append(prompt)
    return tuple(prompts)
