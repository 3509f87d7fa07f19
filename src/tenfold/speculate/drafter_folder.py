"""A trained drafter on disk: ``drafter.json`` and ``head.safetensors``.

The folder has only what the drafter does not share with its target; opened beside its target it gives a
`Checkpoint` with both. Format of the weights: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from tenfold.backends.base import Floats
from tenfold.checkpoint.base import Checkpoint, CheckpointError, Placement, TensorInfo
from tenfold.checkpoint.regular import read_regular
from tenfold.checkpoint.safetensors import SafetensorsFile
from tenfold.checkpoint.stored import StoredWeight
from tenfold.formats.matrix import Layout, Matrix
from tenfold.graph.recurrent import RecurrentGraph
from tenfold.models.recurrent_head import HeadConfig, recurrent_head
from tenfold.speculate.target import Fingerprint, TargetModel, check_fingerprint
from tenfold.speculate.trained_head import HeadEvidence, HeadFormat, StartingHead, TrainedHead

_DESCRIPTION, _WEIGHTS = "drafter.json", "head.safetensors"


class DrafterDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``drafter.json``."""

    version: Literal[1] = 1
    kind: Literal["recurrent"]
    """What sort of drafter it is; others have other fields."""
    target: Fingerprint
    taps: tuple[str, ...]
    """Values of the target's graph that make up its features."""
    token_ids: tuple[int, ...]
    """The target's token of each output row, ascending."""
    head: HeadConfig
    weights_sha256: str
    evidence: HeadEvidence
    served: HeadFormat = "q8"
    """How its matrices are held in memory. They are read anew for every draft, between two steps that take
    the caches for themselves, so their bytes are what a draft costs."""


class DrafterFolder:
    """An opened drafter. Owns its own weights' file; the target's checkpoint must stay open beside it."""

    def __init__(self, description: DrafterDescription, graph: RecurrentGraph, checkpoint: Overlay) -> None:
        self.description = description
        self.graph = graph
        self.checkpoint = checkpoint
        """The drafter's weights and those that it shares with its target."""

    def start(self) -> StartingHead:
        """What a training can go on from: a copy of the drafter's own weights."""
        return StartingHead(
            config=self.description.head,
            token_ids=self.description.token_ids,
            weights={name: self.checkpoint.own(name) for name in self.checkpoint.own_names},
            served=self.description.served,
        )

    def close(self) -> None:
        """Unmaps the drafter's weights."""
        self.checkpoint.close()


class Overlay:
    """A `Checkpoint`: a drafter's weights over its target's."""

    def __init__(
        self,
        path: str,
        weights: SafetensorsFile,
        target: Checkpoint,
        config: HeadConfig,
        served: HeadFormat,
    ) -> None:
        self.path = path
        self._served = served
        self.architecture = "recurrent-head"
        self.config: dict[str, Any] = msgspec.to_builtins(config)
        self._file = weights
        self._target = target
        self._own = {
            name: StoredWeight(
                TensorInfo(name, tensor.shape, tensor.kind.name, tensor.size, weights.path, tensor.offset),
                tensor.kind,
                weights.mapped,
            )
            for name, tensor in weights.tensors.items()
        }

    @property
    def own_names(self) -> tuple[str, ...]:
        """The drafter's own weights."""
        return tuple(self._own)

    def own(self, name: str) -> Floats:
        """One of them, dequantized: a matrix or a vector."""
        weight = self._own[name]
        blocks = [block.dequantize() for _, block in weight.rows(weight.place("auto").layout, 0)]
        return np.concatenate(blocks).reshape(weight.info.shape)

    def tensors(self) -> dict[str, TensorInfo]:
        """See `Checkpoint.tensors`."""
        return {**self._target.tensors(), **{name: weight.info for name, weight in self._own.items()}}

    def place(self, name: str, requested: str) -> Placement:
        """See `Checkpoint.place`."""
        own = self._own.get(name)
        if own is None:
            return self._target.place(name, requested)
        return own.place(self._served if requested == "auto" else requested)

    def rows(self, name: str, layout: Layout, block_rows: int = 0) -> Iterator[tuple[int, Matrix]]:
        """See `Checkpoint.rows`."""
        own = self._own.get(name)
        return self._target.rows(name, layout, block_rows) if own is None else own.rows(layout, block_rows)

    def close(self) -> None:
        """Unmaps the drafter's own file."""
        self._file.close()


def save_drafter(folder: str | os.PathLike[str], head: TrainedHead) -> None:
    """Writes a drafter; matrices as F16, vectors as F32. What was there is replaced, description last.

    Raises OSError, and ValueError for weights that F16 cannot hold.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    data = _safetensors(head.weights)
    description = DrafterDescription(
        kind="recurrent",
        target=head.target,
        taps=head.taps,
        token_ids=head.token_ids,
        head=head.config,
        weights_sha256=hashlib.sha256(data).hexdigest(),
        evidence=head.evidence,
        served=head.served,
    )
    _replace(path / _WEIGHTS, data)
    _write_description(path, description)


def serve_in(folder: str | os.PathLike[str], served: HeadFormat) -> None:
    """Has a drafter held in this format from now on.

    Raises CheckpointError for a folder that is none, OSError.
    """
    path = Path(folder)
    _write_description(path, msgspec.structs.replace(_read_description(path / _DESCRIPTION), served=served))


def open_drafter(
    folder: str | os.PathLike[str], target: TargetModel, served: HeadFormat | None = None
) -> DrafterFolder:
    """Opens a drafter for its target. ``served``: to be held so instead of as it says itself.

    Raises CheckpointError for a folder that is none or damaged, ValueError if the target is not the one that
    it was made for, or has not the values that it taps.
    """
    path = Path(folder)
    if not path.is_dir() or not (path / _DESCRIPTION).exists():
        raise CheckpointError(f"{path}: not a drafter: a folder with {_DESCRIPTION} and {_WEIGHTS}")
    description = _read_description(path / _DESCRIPTION)
    check_fingerprint(description.target, target.fingerprint(), str(path))
    if description.taps != target.taps():
        raise ValueError(
            f"{path / _DESCRIPTION}: taps {', '.join(description.taps)} are not this target's "
            f"{', '.join(target.taps())}; train the drafter anew"
        )
    if hashlib.sha256(read_regular(path / _WEIGHTS)).hexdigest() != description.weights_sha256:
        raise CheckpointError(f"{path / _WEIGHTS}: not the weights that {_DESCRIPTION} describes; damaged?")
    graph = recurrent_head(description.head)
    weights = SafetensorsFile(str(path / _WEIGHTS))
    held = served or description.served
    overlay = Overlay(str(path), weights, target.checkpoint, description.head, held)
    return DrafterFolder(description, graph, overlay)


def _write_description(path: Path, description: DrafterDescription) -> None:
    _replace(path / _DESCRIPTION, msgspec.json.format(msgspec.json.encode(description)))


def _read_description(path: Path) -> DrafterDescription:
    try:
        description = msgspec.json.decode(read_regular(path), type=DrafterDescription)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path}: {error!s:.300}") from error
    ids = description.token_ids
    vocab = description.head.target_vocab_size
    if len(ids) != description.head.vocab_size or list(ids) != sorted(set(ids)):
        raise CheckpointError(f"{path}: token_ids are not head.vocab_size ascending tokens")
    if ids and not 0 <= ids[0] <= ids[-1] < vocab:
        raise CheckpointError(f"{path}: token_ids go beyond the target's vocabulary of {vocab}")
    return description


def _safetensors(weights: Mapping[str, Floats]) -> bytes:
    """The file's bytes."""
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    offset = 0
    for name, values in sorted(weights.items()):
        kind = np.float16 if values.ndim == 2 else np.float32
        with np.errstate(over="ignore"):
            stored = values.astype(kind)
        if not np.isfinite(stored).all():
            raise ValueError(f"{name}: a weight is not finite or beyond the range of F16: it diverged")
        parts.append(stored.tobytes())
        header[name] = {
            "dtype": "F16" if values.ndim == 2 else "F32",
            "shape": list(values.shape),
            "data_offsets": [offset, offset + stored.nbytes],
        }
        offset += stored.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.replace(path)
