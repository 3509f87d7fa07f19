"""News of pages in the form that other routers read: vLLM's KV events.

Their structs are arrays with a tag, as msgpack: ``["BlockStored", hashes, parent, tokens, block size, lora
id, medium, lora name, extra keys]``, ``["BlockRemoved", hashes, medium]``, ``["AllBlocksCleared"]``; in a
batch ``[time, events, data parallel rank]``. Fields that vLLM added later stand at the end, and readers that
do not know them pass over them. Hashes are the names of `tenfold.router.names`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from tenfold.kv.news import PageNews
from tenfold.protocol import KVEvents

MEDIUM = "GPU"
"""What vLLM calls the memory that its engine computes in; routers give other media less credit."""


class BlockStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    """Blocks that are there now, one after another."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Of the block before the first; None for the first of a prompt."""
    token_ids: list[int]
    """Of all these blocks."""
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """For each block what beside tokens went into its hash: the namespace, of the first block."""


class BlockRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    """Blocks that are gone."""

    block_hashes: list[int]
    medium: str | None = MEDIUM


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    """There is none."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """What is sent at once."""

    ts: float
    """Seconds since 1970."""
    events: list[WireEvent]
    data_parallel_rank: int | None = None


class Publisher(Protocol):
    """Where events go."""

    def publish(self, events: list[WireEvent]) -> None:
        """One batch, whose events do not change any more."""
        ...

    def close(self) -> None: ...


class WireNews(PageNews):
    """News that also go to a ``publisher``, whenever they are taken. Owns it."""

    def __init__(self, publisher: Publisher) -> None:
        super().__init__()
        self._publisher = publisher
        self._wire: list[WireEvent] = [AllBlocksCleared()]
        """The first: whoever knew an engine at this address before."""

    def stored(self, page: int, tokens: Sequence[int], before: int | str) -> None:
        """See `PageNews.stored`."""
        super().stored(page, tokens, before)
        name = self._names[page]
        if isinstance(before, str):
            keys: list[tuple[str, ...] | None] | None = [(before,)] if before else None
            self._wire.append(BlockStored([name], None, [*tokens], len(tokens), extra_keys=keys))
            return
        parent = self._names[before]
        last = self._wire[-1] if self._wire else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent:
            last.block_hashes.append(name)
            last.token_ids.extend(tokens)
            if last.extra_keys is not None:
                last.extra_keys.append(None)
        else:
            self._wire.append(BlockStored([name], parent, [*tokens], len(tokens)))

    def removed(self, page: int) -> None:
        """See `PageNews.removed`."""
        name = self._names[page]
        super().removed(page)
        if self._wire and isinstance(last := self._wire[-1], BlockRemoved):
            last.block_hashes.append(name)
        else:
            self._wire.append(BlockRemoved([name]))

    def take(self) -> KVEvents | None:
        """See `PageNews.take`."""
        if self._wire:
            events, self._wire = self._wire, []
            self._publisher.publish(events)
        return super().take()

    def close(self) -> None:
        """See `PageNews.close`."""
        self._publisher.close()
