"""The ops a model is made of.

A graph is a straight-line list of these over row-major activations ``[rows, width]``; the rows are the tokens
of a step, from all sequences, flattened. Every op names its inputs, its output and its weights, and can tell
what a step costs. Shapes are in elements, weights are ``[out, in]``.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class StepShape(msgspec.Struct, frozen=True):
    """The shape of one step, for costs: how many rows it has and what they attend to."""

    rows: int
    """Tokens in the step, over all sequences."""
    context: int = 0
    """KV rows that one row attends to, on average, itself included."""
    logit_rows: int = 1
    """Rows whose logits are wanted."""
    sequences: int = 1
    """Sequences in the step: a sequence's KV rows are read once for all of its rows."""


class Cost(msgspec.Struct, frozen=True):
    """What an op must do in a step: floating or integer operations, and bytes it must move at least."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


class WeightSpec(msgspec.Struct, frozen=True):
    """A weight that a graph needs: its name (Hugging Face's) and its shape."""

    name: str
    shape: tuple[int, ...]


class RopeScaling(msgspec.Struct, frozen=True):
    """How rotary frequencies are stretched beyond the trained context.

    ``linear`` divides every frequency by ``factor``. ``llama3`` keeps the high ones, divides the low ones and
    blends between (Llama 3.1). ``yarn`` is NTK-by-parts with an attention factor (arXiv 2309.00071).
    """

    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


class KVSpec(msgspec.Struct, frozen=True):
    """What a cached row holds for one layer. K and V have ``heads * head_dim`` elements each."""

    layer: int
    heads: int
    head_dim: int
    window: int = 0
    """Rows a later row may look back at, itself included; 0 means all."""


class Op(msgspec.Struct, frozen=True, tag_field="op", kw_only=True):
    """Base of all ops: reads the values ``inputs``, writes the value ``output``."""

    inputs: tuple[str, ...] = ()
    output: str

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        """The weights this op reads."""
        return ()


class Embed(Op, frozen=True, tag="embed", kw_only=True):
    """Row lookup: ``output[r] = weight[token[r]] * scale``."""

    weight: WeightSpec
    scale: float = 1.0

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.weight,)


class Input(Op, frozen=True, tag="input", kw_only=True):
    """A value that the caller hands in with the step, ``[rows, width]``, instead of one that is computed."""

    width: int


class Concat(Op, frozen=True, tag="concat", kw_only=True):
    """Its inputs side by side, in their order."""


class Linear(Op, frozen=True, tag="linear", kw_only=True):
    """``output = input @ weight.T + bias``."""

    weight: WeightSpec
    bias: WeightSpec | None = None

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


class RMSNorm(Op, frozen=True, tag="rms_norm", kw_only=True):
    """``x / sqrt(mean(x^2) + eps) * (weight + weight_offset)``, over each stretch of ``width`` elements of a
    row.

    ``width`` is the row's width for a layer norm and the head's for q/k norms.
    """

    weight: WeightSpec
    eps: float
    width: int
    weight_offset: float = 0.0

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.weight,)


class Rope(Op, frozen=True, tag="rope", kw_only=True):
    """Rotary embedding over the first ``rotary_dim`` elements of each head, halves paired (NeoX order).

    Source: arXiv 2104.09864. Checkpoints that pair neighbours are permuted when they are read.
    """

    heads: int
    head_dim: int
    rotary_dim: int
    theta: float
    scaling: RopeScaling = RopeScaling()


class Attention(Op, frozen=True, tag="attention", kw_only=True):
    """Causal attention of ``inputs = (q, k, v)`` over the sequence's cached rows and its own.

    Writes k and v of the step's rows into the cache first. Scores are ``q.k * scale``, soft-capped if
    ``softcap`` > 0.
    """

    kv: KVSpec
    heads: int
    scale: float
    softcap: float = 0.0


class Add(Op, frozen=True, tag="add", kw_only=True):
    """Element-wise sum of two inputs."""


class Gate(Op, frozen=True, tag="gate", kw_only=True):
    """``activation(inputs[0]) * inputs[1]``; ``gelu`` is the tanh form."""

    activation: Literal["silu", "gelu"]


class Scale(Op, frozen=True, tag="scale", kw_only=True):
    """``input * factor``."""

    factor: float


class Softcap(Op, frozen=True, tag="softcap", kw_only=True):
    """``cap * tanh(input / cap)``."""

    cap: float


class SelectRows(Op, frozen=True, tag="select_rows", kw_only=True):
    """Keeps the rows whose logits are wanted, in their order."""


AnyOp = (
    Embed | Input | Concat | Linear | RMSNorm | Rope | Attention | Add | Gate | Scale | Softcap | SelectRows
)
