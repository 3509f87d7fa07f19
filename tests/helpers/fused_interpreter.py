"""Runs a FusedGraph in plain torch, one sequence from an empty cache: what the fused ops mean, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from tenfold.backends.torch import functions
from tenfold.graph.fused import FusedAttention, FusedGraph, FusedLinear, NormAdd, NormSpec
from tenfold.graph.ops import Add, Concat, Embed, Gate, RMSNorm, Scale, SelectRows, Softcap


def run_fused(
    graph: FusedGraph, weights: Mapping[str, Any], tokens: Sequence[int], wanted: Sequence[int]
) -> Any:
    """Logits ``[wanted, vocab]`` of one sequence from scratch; ``weights`` are tensors by name."""
    return fused_values(graph, weights, tokens, wanted)[graph.ops[-1].output]


def fused_values(
    graph: FusedGraph, weights: Mapping[str, Any], tokens: Sequence[int], wanted: Sequence[int]
) -> dict[str, Any]:
    """As `run_fused`, but all values."""
    values: dict[str, Any] = {}

    def norm(x: Any, spec: NormSpec | RMSNorm | None) -> Any:
        if spec is None:
            return x
        return functions.rms_norm(x, weights[spec.weight.name], spec.eps, spec.weight_offset)

    def linear(op: FusedLinear) -> Any:
        x = norm(values[op.input], op.norm)
        parts = []
        for weight, bias in zip(op.weights, op.biases, strict=True):
            part = x @ weights[weight.name].T
            parts.append(part if bias is None else part + weights[bias.name])
        y = torch.cat(parts, dim=1) if op.gate is None else functions.gate(parts[0], parts[1], op.gate)
        return y if op.residual is None else y + values[op.residual]

    def attention(op: FusedAttention) -> Any:
        head = op.kv.head_dim
        q, k, v = values[op.input].split([op.heads * head, op.kv.heads * head, op.kv.heads * head], dim=1)
        q, k = norm(q, op.q_norm), norm(k, op.k_norm)
        if op.rope is not None:
            assert op.rope.heads == op.heads
            positions = torch.arange(len(tokens))
            q = functions.rotate(q, positions, op.rope)
            k = functions.rotate(k, positions, msgspec.structs.replace(op.rope, heads=op.kv.heads))
        q, k, v = (x.reshape(len(tokens), -1, head) for x in (q, k, v))
        return functions.attend(q, k, v, 0, op.scale, op.softcap, op.kv.window)

    for op in graph.ops:
        match op:
            case Embed():
                value = weights[op.weight.name][torch.tensor(tokens)] * op.scale
            case FusedLinear():
                value = linear(op)
            case FusedAttention():
                value = attention(op)
            case NormAdd():
                value = values[op.residual] + norm(values[op.input], op.norm)
            case RMSNorm():
                value = norm(values[op.inputs[0]], op)
            case SelectRows():
                value = values[op.inputs[0]][torch.tensor(wanted)]
            case Scale():
                value = values[op.inputs[0]] * op.factor
            case Softcap() | Add() | Gate() | Concat():
                value = functions.row_wise(op, [values[name] for name in op.inputs], [])
            case _:
                raise AssertionError(f"{op} is not known here")
        assert value.shape[1] == graph.widths[op.output]
        values[op.output] = value
    return values
