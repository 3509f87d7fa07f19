"""Text to measure with: Python's own manual, which every installation has."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable


def manual_text() -> str:
    """English prose with some code, about 400,000 characters."""
    return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


def windows(encode: Callable[[str], list[int]], count: int, tokens: int) -> list[list[int]]:
    """``count`` stretches of ``tokens`` token ids each, from different places of the manual.

    ``encode`` turns text into ids. Raises ValueError when the manual is too short for that.
    """
    # No tokenizer makes a token of more than 16 characters of prose on average.
    ids = encode(manual_text()[: 16 * count * tokens])
    if len(ids) < count * tokens:
        raise ValueError(f"Python's manual has {len(ids)} tokens here; {count * tokens} are needed")
    return [ids[at : at + tokens] for at in range(0, count * tokens, tokens)]


def questions(count: int, excerpt: int = 600) -> list[list[dict[str, str]]]:
    """``count`` conversations, each of one question about a passage of the manual of ``excerpt`` characters;
    all different."""
    topics = sorted(pydoc_data.topics.topics.items())
    return [
        [{"role": "user", "content": f"Explain {name} to a beginner.\n\n{text[:excerpt]} ({index})"}]
        for index, (name, text) in zip(range(count), topics * (count // len(topics) + 1), strict=False)
    ]
