"""The ops that a backend with fused kernels runs: what `tenfold.graph.passes.fuse` turns a graph into.

Models are never written in these. Embed, Input, Concat, SelectRows, Scale and Softcap stay as they are in
`tenfold.graph.ops`, and so do RMSNorm, Add and Gate where they fit into no fused op.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tenfold.graph.ops import (
    Add,
    Concat,
    Embed,
    Gate,
    Input,
    KVSpec,
    RMSNorm,
    Rope,
    Scale,
    SelectRows,
    Softcap,
    WeightSpec,
)


class NormSpec(msgspec.Struct, frozen=True, kw_only=True):
    """``x / sqrt(mean(x^2) + eps) * (weight + weight_offset)``; the width is the weight's."""

    weight: WeightSpec
    eps: float
    weight_offset: float = 0.0


class FusedLinear(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="fused_linear"):
    """``y = norm(input) @ concat(weights).T + concat(biases)``, then gate, then residual.

    The rows of the weights are concatenated: q, k, v, or gate, up. With a ``gate`` there are two weights of
    equal shape and the result is ``activation(first) * second`` (gelu is the tanh form). ``residual`` names a
    value that is added to the result.
    """

    input: str
    norm: NormSpec | None
    weights: tuple[WeightSpec, ...]
    biases: tuple[WeightSpec | None, ...]
    """One entry per weight."""
    gate: Literal["silu", "gelu"] | None
    residual: str | None
    output: str


class FusedAttention(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="fused_attention"):
    """Norm and rotate q and k of each row, write k and v to the cache, attend.

    ``input`` is ``[q: heads * head_dim | k: kv.heads * head_dim | v: kv.heads * head_dim]``; the output has
    width ``heads * head_dim``.
    """

    input: str
    q_norm: NormSpec | None
    """Per head, before the rotation."""
    k_norm: NormSpec | None
    rope: Rope | None
    """The query's op; the key's differs in ``heads`` alone. Tables: `tenfold.graph.rope.rope_frequencies`."""
    kv: KVSpec
    heads: int
    scale: float
    softcap: float
    """0: none."""
    output: str


class NormAdd(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="norm_add"):
    """``output = residual + rms_norm(input)``."""

    input: str
    norm: NormSpec
    residual: str
    output: str


AnyFusedOp = (
    Embed
    | Input
    | Concat
    | FusedLinear
    | FusedAttention
    | NormAdd
    | RMSNorm
    | Add
    | Gate
    | SelectRows
    | Scale
    | Softcap
)


class FusedGraph(msgspec.Struct, frozen=True, kw_only=True):
    """A straight-line program of fused ops. The last output is the logits ``[logit_rows, vocab_size]``."""

    name: str
    ops: tuple[AnyFusedOp, ...]
    widths: dict[str, int]
    """Width in elements of every value that is left."""
    kv: tuple[KVSpec, ...]
    hidden_size: int
    vocab_size: int
    max_context: int
