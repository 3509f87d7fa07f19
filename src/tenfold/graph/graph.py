"""A model as a graph: ops in order, the values between them, and what a sequence must keep."""

from __future__ import annotations

import msgspec

from tenfold.graph.ops import AnyOp, KVSpec, SelectRows, WeightSpec


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """A straight-line program. The last op's output is the logits ``[logit_rows, vocab_size]``."""

    name: str
    """Architecture name, for people ("llama")."""
    ops: tuple[AnyOp, ...]
    widths: dict[str, int]
    """Width in elements of every value."""
    kv: tuple[KVSpec, ...]
    """One per attention op, in layer order."""
    hidden_size: int
    vocab_size: int
    max_context: int
    """Positions the model was made for; a request beyond it is refused."""
    layer_outputs: tuple[str, ...] = ()
    """The residual stream after each layer, for those who look into the model (drafters, calibration)."""

    @property
    def weights(self) -> dict[str, WeightSpec]:
        """Every weight the graph reads, by name, in order of first use. A tied matrix appears once."""
        return {spec.name: spec for op in self.ops for spec in op.weights}

    @property
    def selected(self) -> frozenset[str]:
        """Values that have only the rows whose logits are wanted."""
        found: set[str] = set()
        for op in self.ops:
            if isinstance(op, SelectRows) or not found.isdisjoint(op.inputs):
                found.add(op.output)
        return frozenset(found)
