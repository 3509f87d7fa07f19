"""Each op of a graph as a plain torch function: what every other backend is measured against."""

from __future__ import annotations

from typing import Any

import torch

from tenfold.graph.ops import Add, AnyOp, Concat, Gate, Linear, RMSNorm, Rope, Scale, Softcap
from tenfold.graph.rope import rope_frequencies

Tensor = Any
"""torch.Tensor (torch is not type-checked here)."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Normalises each stretch of ``len(weight)`` elements of each row: ``[rows, width] -> [rows, width]``."""
    parts = x.reshape(x.shape[0], x.shape[1] // weight.shape[0], weight.shape[0])  # there may be no row
    normed = parts * torch.rsqrt(parts.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * (weight + offset)).reshape(x.shape)


def rotate(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Turns the pairs ``(i, i + rotary_dim / 2)`` of each head of ``[rows, heads * head_dim]``."""
    frequencies, factor = rope_frequencies(rope)
    angles = positions.to(torch.float64)[:, None] * torch.from_numpy(frequencies)
    cos = (angles.cos() * factor).to(x.dtype)[:, None, :]
    sin = (angles.sin() * factor).to(x.dtype)[:, None, :]
    heads = x.reshape(x.shape[0], -1, rope.head_dim)
    half = rope.rotary_dim // 2
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
    return turned.reshape(x.shape)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first_row: int,
    scale: float,
    softcap: float,
    window: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Causal attention of one sequence.

    ``q`` is ``[rows, heads, head_dim]``; ``keys`` and ``values`` are the cache, ``[cached, kv_heads,
    head_dim]``, the step's own rows included; row ``i`` of ``q`` is cache row ``first_row + i``. ``bias``,
    ``[cached, kv_heads]``, is added to the scores (after the soft cap). Returns ``[rows, heads * head_dim]``.
    """
    rows, heads, head_dim = q.shape
    cached, kv_heads, _ = keys.shape
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("rkgd,ckd->kgrc", grouped, keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.T[:, None, None, :]
    own = torch.arange(first_row, first_row + rows)[:, None]
    other = torch.arange(cached)[None, :]
    visible = other <= own
    if window:
        visible &= own - other < window
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return torch.einsum("kgrc,ckd->rkgd", weights, values).reshape(rows, heads * head_dim)


def gate(a: Tensor, b: Tensor, activation: str) -> Tensor:
    """``activation(a) * b``; gelu in its tanh form."""
    if activation == "silu":
        return torch.nn.functional.silu(a) * b
    return torch.nn.functional.gelu(a, approximate="tanh") * b


def row_wise(op: AnyOp, inputs: list[Tensor], weights: list[Tensor]) -> Tensor:
    """An op that needs to know nothing of the step: each row of its output follows from the same row of its
    inputs."""
    match op:
        case Linear():
            return torch.nn.functional.linear(inputs[0], *weights)
        case RMSNorm():
            return rms_norm(inputs[0], weights[0], op.eps, op.weight_offset)
        case Add():
            return inputs[0] + inputs[1]
        case Gate():
            return gate(inputs[0], inputs[1], op.activation)
        case Scale():
            return inputs[0] * op.factor
        case Softcap():
            return op.cap * torch.tanh(inputs[0] / op.cap)
        case Concat():
            return torch.cat(inputs, dim=1)
    raise NotImplementedError(f"the torch backend has no {type(op).__name__}")
