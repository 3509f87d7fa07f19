"""Which worker holds which pages: from the name of a page to the set of workers that have it.

A name stands for a page and all before it, and a worker gives pages up from the ends of chains, so along a
prompt the set of workers only shrinks. A lookup uses that: it finds by galloping where the set changes, a
few dictionary lookups for each change and not one for each page.

Memory: about 160 bytes for each page that one of 64 workers holds, 240 with 1,000 workers
(benchmarks/routing_decision.py measures it), and `capacity` bounds the pages of each worker: a stream that
claims more than its worker can hold is wrong and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class PageIndex:
    """Workers are small numbers, *slots*. Sets of them are the bits of integers."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._pages: dict[int, set[int]] = {}
        self._capacity: dict[int, int] = {}

    def open(self, slot: int, capacity: int) -> None:
        """A slot that holds nothing and may hold ``capacity`` pages."""
        if slot in self._pages:
            raise ValueError(f"slot {slot} is in use")
        self._pages[slot] = set()
        self._capacity[slot] = capacity

    def close(self, slot: int) -> None:
        """The slot and all its pages are gone."""
        self.clear(slot)
        del self._pages[slot], self._capacity[slot]

    def __len__(self) -> int:
        """Different pages that any worker holds."""
        return len(self._holders)

    def count(self, slot: int) -> int:
        """Pages of a slot."""
        return len(self._pages[slot])

    def pages(self, slot: int) -> frozenset[int]:
        """Names of a slot's pages; a copy."""
        return frozenset(self._pages[slot])

    def add(self, slot: int, names: Iterable[int]) -> bool:
        """The slot holds these too. False if that is more than it can hold."""
        pages, holders, bit = self._pages[slot], self._holders, 1 << slot
        for name in names:
            pages.add(name)
            holders[name] = holders.get(name, 0) | bit
        return len(pages) <= self._capacity[slot]

    def remove(self, slot: int, names: Iterable[int]) -> bool:
        """The slot gave these up. False if it never had one of them, as far as is known here."""
        pages, holders, bit = self._pages[slot], self._holders, 1 << slot
        known = True
        for name in names:
            if name not in pages:
                known = False
                continue
            pages.remove(name)
            if rest := holders[name] & ~bit:
                holders[name] = rest
            else:
                del holders[name]
        return known

    def clear(self, slot: int) -> None:
        """The slot holds nothing."""
        self.remove(slot, list(self._pages[slot]))

    def replace(self, slot: int, names: Iterable[int]) -> bool:
        """The slot holds exactly these. False if that is more than it can hold."""
        wanted = set(names)
        have = self._pages[slot]
        self.remove(slot, have - wanted)
        return self.add(slot, wanted - have)

    def overlap(self, names: Sequence[int], slots: int) -> Ints:
        """[slots] how many first pages of a prompt each slot has."""
        depths = np.zeros(slots, np.int64)
        get = self._holders.get
        pages = len(names)
        at = 0
        holders = get(names[0], 0) if pages else 0
        while holders:
            # Invariant: `holders` have all pages up to names[at]. Find the last page that they all have.
            low, step = at, 1
            while low + step < pages and get(names[low + step], 0) & holders == holders:
                low += step
                step *= 2
            high = min(low + step, pages)
            while high - low > 1:
                middle = (low + high) // 2
                if get(names[middle], 0) & holders == holders:
                    low = middle
                else:
                    high = middle
            at = low + 1
            rest = get(names[at], 0) & holders if at < pages else 0
            _mark(depths, holders & ~rest, at)
            holders = rest
        return depths

    def check(self) -> None:
        """Raises ValueError unless both directions of the index agree."""
        holders: dict[int, int] = {}
        for slot, pages in self._pages.items():
            for name in pages:
                holders[name] = holders.get(name, 0) | 1 << slot
        if holders != self._holders:
            raise ValueError("pages by worker and workers by page differ")


def _mark(depths: Ints, slots: int, depth: int) -> None:
    """Writes ``depth`` for every slot of a set."""
    if slots.bit_count() > 16:
        octets = np.frombuffer(slots.to_bytes(len(depths) // 8 + 1, "little"), np.uint8)
        depths[np.unpackbits(octets, count=len(depths), bitorder="little") == 1] = depth
        return
    while slots:
        bit = slots & -slots
        depths[bit.bit_length() - 1] = depth
        slots ^= bit
