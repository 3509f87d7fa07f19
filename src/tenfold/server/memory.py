"""Whether models fit this machine together: before anything is loaded, since afterwards it is too late."""

from __future__ import annotations

import ctypes
import gc
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from tenfold.config import ServeConfig, format_bytes

PROCESS_BYTES = 64 << 20
"""What a worker takes beside weights and KV memory: its interpreter, modules, activations and books. (30 MiB
when it has loaded a small model, some 55 when it has worked.)"""


@dataclass(frozen=True)
class Wanted:
    """What one model wants at least: its workers' own memory, its weights in each of them, and the KV memory
    that was asked for."""

    name: str
    weights: int
    """Bytes, of all its workers."""
    kv: int
    """Bytes, of all its workers; 0 where the server chooses by what is free."""
    workers: int
    """Processes."""

    @property
    def bytes(self) -> int:
        """All together."""
        return self.weights + self.kv + self.workers * PROCESS_BYTES

    def __str__(self) -> str:
        kv = f" + {format_bytes(self.kv)} of KV memory" if self.kv else ""
        own = f"{self.workers} {'workers' if self.workers > 1 else 'worker'} of {format_bytes(PROCESS_BYTES)}"
        return f"{self.name}: {format_bytes(self.weights)} of weights{kv} + {own}"


def wanted(config: ServeConfig, path: str) -> Wanted:
    """What ``config`` wants for the model at ``path``. Raises CheckpointError for what is no model."""
    processes = config.processes
    weights = weight_bytes(path, config.format) * processes
    return Wanted(config.model_name, weights, config.kv_memory_bytes or 0, processes)


def weight_bytes(path: str, format: str) -> int:
    """Memory of a model's weights, from its files' heads alone; 0 where nothing is at ``path``: whoever loads
    it will say so."""
    if not os.path.exists(path):
        return 0
    from tenfold.checkpoint.open import open_checkpoint  # brings numpy, which a front of one model can spare

    checkpoint = open_checkpoint(path)
    try:
        bits = [
            math.prod(info.shape)
            * (checkpoint.place(name, format).layout.bits_per_weight if len(info.shape) > 1 else 32)
            for name, info in checkpoint.tensors().items()
        ]
    finally:
        checkpoint.close()
    return round(sum(bits) / 8)


def check_together(wants: Sequence[Wanted], total_bytes: int) -> None:
    """Raises ValueError when the models and workers of a server want more memory than there is in all."""
    everything = sum(want.bytes for want in wants)
    if everything > total_bytes:
        raise ValueError(
            f"{format_bytes(everything)} of memory are wanted ({'; '.join(map(str, wants))}), but this "
            f"machine or its control group has {format_bytes(total_bytes)} in all; serve fewer models, with "
            "a smaller --kv-memory (it is of each model), fewer --workers, or --format q8 or q4"
        )


def check_room(want: Wanted, free_bytes: int, loaded: Sequence[str]) -> None:
    """Raises ValueError when a model that is to be loaded beside others wants more than is free now: the
    system would end some process for it, maybe another model's."""
    if want.bytes > free_bytes:
        free = format_bytes(max(0, free_bytes))
        others = f"; loaded are {', '.join(loaded)}" if loaded else ""
        raise ValueError(
            f"there is no room for {want}: {free} are free{others}. Unload one, or ask for a "
            "smaller kv_memory or fewer workers"
        )


def give_back() -> None:
    """Returns to the system what the front had of a model that is gone: cycles are collected, though they
    were frozen when the server was ready, and free heap is trimmed."""
    gc.unfreeze()
    settle()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # a C library without it
        return


def settle() -> None:
    """Takes all there is out of the collector's way: it is there to stay."""
    gc.collect()
    gc.freeze()
