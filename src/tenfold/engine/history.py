"""Which tokens a sequence has seen, for the penalties. Kept up to date token by token."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tenfold.backends.base import Int32s


class History:
    """The distinct tokens of a sequence's prompt and output, and how often each is in the output."""

    __slots__ = ("_counts", "_slots", "_tokens", "size")

    def __init__(self, prompt: Iterable[int], output: Iterable[int]) -> None:
        distinct = list(dict.fromkeys(prompt))
        self.size = len(distinct)
        self._slots = {token: slot for slot, token in enumerate(distinct)}
        self._tokens: Int32s = np.zeros(self.size + 64, np.int32)
        self._tokens[: self.size] = distinct
        self._counts: Int32s = np.zeros(self.size + 64, np.int32)
        for token in output:
            self.add(token)

    @property
    def tokens(self) -> Int32s:
        """[size] distinct tokens; a view."""
        return self._tokens[: self.size]

    @property
    def counts(self) -> Int32s:
        """[size] times in the output, 0 for a token of the prompt alone; a view."""
        return self._counts[: self.size]

    def slot(self, token: int) -> int | None:
        """Index of a token in ``tokens``; None if it is not there."""
        return self._slots.get(token)

    def add(self, token: int) -> None:
        """One output token more."""
        slot = self._slots.setdefault(token, self.size)
        if slot == self.size:
            if slot == len(self._tokens):
                self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._tokens[slot] = token
            self.size += 1
        self._counts[slot] += 1
