"""Requests that are prefilled here and decoded elsewhere: their pages are exported as they become ready."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tenfold.backends.base import PAGE_ROWS, PageViews
from tenfold.engine.scheduler import Work
from tenfold.engine.sequence import Sequence
from tenfold.kv.segment import token_bytes
from tenfold.kv.transfer import Exports
from tenfold.protocol import Chunk

EXPORT_PAGES = 64
"""Most pages that a step exports of a prompt, but for its last step."""


class Handover:
    """Exports of one engine; owns ``exports``. All rows of a full page are the sequence's until it leaves,
    so they are copied where they lie, by the engine's own thread, after the step that wrote them."""

    def __init__(self, exports: Exports, memory: PageViews) -> None:
        self._exports = exports
        self._memory = memory
        self._waiting: set[str] = set()
        self._declined: set[str] = set()
        """Of these, the ones that run, and for which there has been no room so far."""
        self._under_way: set[str] = set()

    def expect(self, sequence: Sequence) -> None:
        """The sequence is to be exported when it runs."""
        self._waiting.add(sequence.id)

    def begin(self, work: Iterable[Work]) -> list[Chunk]:
        """Begins the exports of sequences that run now; each is announced by a chunk with its handoff, so
        that its importer can read along. For whom there is no room there may be in a later step: the region
        before it is often just being read, and until the prompt's last step nothing is lost."""
        chunks = []
        for sequence in [one.sequence for one in work] if self._waiting else ():
            if sequence.id in self._waiting:
                pages = len(sequence.tokens) // PAGE_ROWS
                tokens = token_bytes(sequence.tokens[: pages * PAGE_ROWS])
                handoff = self._exports.begin(sequence.id, sequence.namespace, tokens, pages)
                if handoff is None:
                    self._declined.add(sequence.id)
                else:
                    self._waiting.discard(sequence.id)
                    self._under_way.add(sequence.id)
                    chunks.append(Chunk(id=sequence.id, handoff=handoff))
        return chunks

    def advance(self, work: Iterable[Work]) -> None:
        """Exports what a step has made ready."""
        for sequence in [work.sequence for work in work] if self._under_way else ():
            if sequence.id in self._under_way and sequence.table is not None:
                first, wanted = self._exports.missing(sequence.id)
                last = min(wanted, sequence.computed // PAGE_ROWS)
                if sequence.pending > 1:
                    last = min(last, first + EXPORT_PAGES)
                if last > first:
                    pages = sequence.table.pages[first:last].tolist()
                    self._exports.add(sequence.id, [self._memory.view_page(page) for page in pages])

    def end(self, id: str, token: int | None) -> dict[str, Any] | None:
        """The request leaves; its handoff, if all its pages are in it. ``token``: the one to go on behind."""
        if id in self._waiting:
            self._waiting.discard(id)
            self._exports.declined += id in self._declined
            self._declined.discard(id)
        if id not in self._under_way:
            return None
        self._under_way.discard(id)
        return self._exports.end(id, token)

    def sweep(self) -> None:
        """Gives back what importers have taken, and what they did not in time."""
        self._exports.sweep()

    def close(self) -> None:
        """Gives everything back."""
        self._exports.close()
