"""Which requests are turns of one conversation, told from their prompts alone."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

MOST_PROMPTS = 4096
"""The oldest is forgotten beyond that: its conversation's next turn counts as another."""


class Conversations:
    """A later turn's prompt begins with the whole prompt of an earlier one. Only digests are kept."""

    def __init__(self, most: int = MOST_PROMPTS) -> None:
        self._most = most
        self._names: OrderedDict[bytes, str] = OrderedDict()
        """By prompt, its conversation."""
        self._lengths: dict[int, int] = {}
        """How many prompts of each length are known."""

    def name(self, prompt: Sequence[int]) -> str:
        """The conversation of the longest known prompt that this one begins with, or a new one; knows this
        prompt from now on."""
        data = np.asarray(prompt, np.int32).tobytes()
        digest = hashlib.blake2b(digest_size=12)
        found: str | None = None
        at = 0
        for length in sorted(length for length in self._lengths if length < len(prompt)):
            digest.update(data[4 * at : 4 * length])
            at = length
            found = self._names.get(_key(length, digest.digest()), found)
        digest.update(data[4 * at :])
        key = _key(len(prompt), digest.digest())
        known = self._names.pop(key, None)
        name = known or found or key.hex()
        self._names[key] = name
        if known is None:
            self._lengths[len(prompt)] = self._lengths.get(len(prompt), 0) + 1
        if len(self._names) > self._most:
            oldest, _ = self._names.popitem(last=False)
            length = int.from_bytes(oldest[:4], "little")
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]
        return name


def _key(length: int, digest: bytes) -> bytes:
    return length.to_bytes(4, "little") + digest
