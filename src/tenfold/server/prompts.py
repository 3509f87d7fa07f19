"""The prompts of a completion request, and the inputs of one for embeddings."""

from __future__ import annotations

from typing import Any

from tenfold.server.errors import invalid
from tenfold.server.fields import show, token_ids

MAX_CHOICES = 128
"""Of one request, over all its prompts."""


def parse_prompts(
    value: Any, vocab_size: int, name: str = "prompt", most: int = MAX_CHOICES
) -> tuple[str | tuple[int, ...], ...]:
    """The field ``name``: a text or token ids, or a list of up to ``most`` of either. Raises ApiError that
    names what is wrong."""
    if value is None:
        raise invalid(name, f"{name} is missing", code="missing_parameter")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise invalid(
            name,
            f"{name} is {show(value)}; it must be a string or a list of token ids, or a list of those",
        )
    if value and isinstance(value[0], str | list):
        return _several(value, vocab_size, name, most)
    ids = token_ids(name, value, vocab_size)
    if not ids:
        raise invalid(name, f"{name} is empty; it must have at least one token")
    return (ids,)


def _several(value: list[Any], vocab_size: int, name: str, most: int) -> tuple[str | tuple[int, ...], ...]:
    if len(value) > most:
        raise invalid(name, f"{name} has {len(value)} entries; a request can have up to {most}")
    other = next((i for i, item in enumerate(value) if type(item) is not type(value[0])), None)
    if other is not None:
        raise invalid(
            name,
            f"{name}[{other}] is {show(value[other])}, and {name}[0] is not of that kind; each is a "
            "string or a list of token ids",
        )
    prompts = []
    for index, item in enumerate(value):
        place = f"{name}[{index}]"
        prompt = item if isinstance(item, str) else token_ids(place, item, vocab_size)
        if not isinstance(item, str) and not item:
            raise invalid(place, f"{place} is empty; it must have at least one token")
        prompts.append(prompt)
    return tuple(prompts)
