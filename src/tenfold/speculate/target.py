"""What a drafter takes from its target: which values to tap, rows of its matrices, and its fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from tenfold.backends.base import Floats
from tenfold.checkpoint.base import Checkpoint
from tenfold.graph.graph import Graph
from tenfold.graph.ops import Embed, Linear, Softcap
from tenfold.graph.validate import describe
from tenfold.models.taps import default_taps


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which target a drafter was made for."""

    architecture: str
    hidden_size: int
    vocab_size: int
    output_sha256: str
    """Of the output matrix as it is stored, row after row."""


class TargetModel:
    """A target by its graph and its checkpoint, seen as a drafter sees it. Owns neither.

    Raises ValueError for a graph whose logits are made in a way that a drafter cannot take over.
    """

    def __init__(self, graph: Graph, checkpoint: Checkpoint) -> None:
        self.graph = graph
        self.checkpoint = checkpoint
        embeds = [op for op in graph.ops if isinstance(op, Embed)]
        last = graph.ops[-1]
        self.softcap = last.cap if isinstance(last, Softcap) else 0.0
        output = graph.ops[-2] if isinstance(last, Softcap) else last
        if len(embeds) != 1 or not isinstance(output, Linear) or output.bias is not None:
            raise ValueError(
                f"{checkpoint.path}: a drafter needs a target with one embedding and logits from a plain "
                f"linear; this one ends in {describe(last)}"
            )
        self.embedding = embeds[0].weight.name
        self.output = output.weight.name

    def taps(self) -> tuple[str, ...]:
        """The values that a drafter's features are made of, side by side, each ``hidden_size``
        wide: `default_taps`, of which the last is what the output matrix reads. Raises ValueError for a graph
        without layer outputs."""
        return default_taps(self.graph)

    def rows(self, name: str, indices: Sequence[int]) -> Floats:
        """Rows of a matrix as the file has them, dequantized: ``[len(indices), cols]``. One pass over it."""
        wanted = np.asarray(indices, dtype=np.int64)
        result = np.empty((len(wanted), self.checkpoint.tensors()[name].shape[1]), dtype=np.float32)
        for first, block in self.checkpoint.rows(name, self.checkpoint.place(name, "auto").layout):
            inside = (wanted >= first) & (wanted < first + len(block.codes))
            if inside.any():
                result[inside] = block.dequantize()[wanted[inside] - first]
        return result

    def fingerprint(self) -> Fingerprint:
        """Reads the whole output matrix."""
        digest = hashlib.sha256()
        for _, block in self.checkpoint.rows(
            self.output, self.checkpoint.place(self.output, "auto").layout, block_rows=1024
        ):
            for part in (block.codes, block.scale, block.minimum):
                if part is not None:
                    digest.update(part.tobytes())
        return Fingerprint(
            architecture=self.checkpoint.architecture,
            hidden_size=self.graph.hidden_size,
            vocab_size=self.graph.vocab_size,
            output_sha256=digest.hexdigest(),
        )


def check_fingerprint(drafter: Fingerprint, target: Fingerprint, where: str) -> None:
    """Raises ValueError, naming what differs and what to do, if a drafter was made for another target."""
    for field in Fingerprint.__struct_fields__:
        made_for, found = getattr(drafter, field), getattr(target, field)
        if made_for != found:
            what = "output matrix" if field == "output_sha256" else field.replace("_", " ")
            raise ValueError(
                f"{where}: made for a target with {what} {made_for!s:.16}, this one has {found!s:.16}; "
                "train a drafter for this target, or serve the one it was made for"
            )
