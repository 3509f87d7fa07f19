"""A block drafter: all positions of a draft in one pass, and a light sequential correction of the logits.

From the features of the anchor's row comes a state, as in the first step of a recurrent head. Each position
has its own scale and shift of it, attends to the features of the last rows (DFlash, arXiv 2602.06036, injects
them as keys and values), and goes through gated layers, which all positions share or have for themselves.
From the second on, a low-rank map of the token before is added to its logits (DSpark, arXiv 2607.05147).
Unlike DFlash the positions of a block do not attend to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from tenfold.backends.torch.functions import Tensor, gate, rms_norm
from tenfold.models.recurrent_head import (
    FUSE,
    FUSE_BIAS,
    OUTPUT,
    OUTPUT_NORM,
    UPDATE_VALUE,
    HeadConfig,
)

_STEM = (
    FUSE,
    FUSE_BIAS,
    "drafter.state_norm.weight",
    "drafter.update_gate.weight",
    UPDATE_VALUE,
    OUTPUT_NORM,
)
"""What it has in common with the head, and begins training with in the same way."""
_EPS = 1e-6
_COMMITTED = 2
"""Rows whose keys and values are new in a step, roughly: the tokens that a step commits."""

Weights = Mapping[str, Tensor]
Change = Callable[[Tensor], Tensor]


class Shape(NamedTuple):
    """How large a block drafter is."""

    own: bool
    """Each position has gated layers of its own; else all share them."""
    layers: int
    mlp_width: int
    length: int = 4
    """Positions."""
    rank: int = 128
    """Of the correction by the token before."""
    window: int = 8
    """Rows that a position attends to, the anchor's included."""
    heads: int = 3
    head_dim: int = 64


class Work(NamedTuple):
    """What a proposal takes, in weights."""

    once: float
    """Read, and multiplied with one row."""
    block: float
    """Read, and multiplied with a row of each position."""
    reads: float
    multiplications: float


def head_work(config: HeadConfig, length: int) -> Work:
    """Of a recurrent head's proposal: every step reads the cell and the output rows again."""
    h = config.state_width
    step = 4 * h * h + 3 * h * config.mlp_width + config.vocab_size * h
    total = config.feature_width * h + length * step
    return Work(total, 0, total, total)


def block_work(shape: Shape, config: HeadConfig) -> Work:
    """Of a block drafter's."""
    h, attended = config.state_width, shape.heads * shape.head_dim
    keys = 2 * config.feature_width * attended
    correction = (shape.length - 1) * shape.rank * (h + config.vocab_size)
    layers = shape.layers * 3 * h * shape.mlp_width
    once = config.feature_width * h + 4 * h * h + correction + (shape.length * layers if shape.own else 0)
    block = 2 * h * attended + config.vocab_size * h + (0 if shape.own else layers)
    return Work(
        once + keys,
        block,
        once + keys + block,
        once + _COMMITTED * keys + shape.length * block,
    )


def layer_name(shape: Shape, position: int, layer: int) -> str:
    """Of the gated layer of a position (1 is the first)."""
    return f"block.{position if shape.own else 'all'}.{layer}"


def initial_block(
    shape: Shape, config: HeadConfig, head: Weights, rows: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """Weights to start from. ``head``: those that a head starts from; ``rows``: the output rows."""
    h, attended = config.state_width, shape.heads * shape.head_dim

    def random(out: int, width: int, size: float = 1.0) -> Tensor:
        return torch.randn((out, width), generator=generator) * size * width**-0.5

    weights = {name: head[name].detach().clone() for name in _STEM}
    for position in range(1, shape.length + 1):
        weights[f"block.{position}.scale"] = torch.ones(h)
        weights[f"block.{position}.shift"] = torch.randn(h, generator=generator) * 0.3 * (position > 1)
        for layer in range(shape.layers):
            name = layer_name(shape, position, layer)
            if name + ".up" not in weights:
                weights[name + ".norm"] = torch.ones(h)
                weights[name + ".gate"] = random(shape.mlp_width, h)
                weights[name + ".up"] = random(shape.mlp_width, h)
                weights[name + ".down"] = random(h, shape.mlp_width, 0.2)
    weights["block.attention_norm"] = torch.ones(h)
    weights["block.query"] = random(attended, h)
    weights["block.keys_values"] = random(2 * attended, config.feature_width)
    weights["block.attended"] = random(h, attended, 0.2)
    weights["block.distance"] = torch.zeros(shape.heads, shape.window)
    # The correction begins as none, in the directions in which the output rows differ most.
    _, _, directions = torch.pca_lowrank(rows, q=shape.rank, niter=2)
    weights["block.correct_out"] = (rows @ directions).contiguous()
    weights["block.correct_in"] = torch.zeros(shape.rank, h)
    return weights


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """In float32 whatever it was computed in."""
    return torch.nn.functional.linear(x, weight, bias).float()


def unchanged(value: Tensor) -> Tensor:
    """No dropout."""
    return value


def stem(weights: Weights, features: Tensor, token: Tensor, dropped: Change = unchanged) -> Tensor:
    """The anchors' states ``[n, hidden]``, from features and newest token's embedding."""
    state = linear(features, weights[FUSE], weights[FUSE_BIAS])
    x = torch.cat([rms_norm(state, weights["drafter.state_norm.weight"], _EPS, 0.0), token], dim=-1)
    opened = linear(x, weights["drafter.update_gate.weight"]), linear(x, weights[UPDATE_VALUE])
    return state + dropped(gate(*opened, "silu"))


def position_state(
    weights: Weights,
    shape: Shape,
    position: int,
    state: Tensor,
    context: Tensor,
    seen: Tensor,
    dropped: Change = unchanged,
) -> Tensor:
    """What a position's logits are made of: ``[n, hidden]``. ``context``: keys and values of the window's
    rows ``[n, window, 2 * heads * head_dim]``; ``seen``: which of them there are ``[n, window]``."""
    n = len(state)
    x = state * weights[f"block.{position}.scale"] + weights[f"block.{position}.shift"]
    query = linear(rms_norm(x, weights["block.attention_norm"], _EPS, 0.0), weights["block.query"])
    query = query.reshape(n, shape.heads, shape.head_dim)
    keys, values = context.reshape(n, shape.window, 2, shape.heads, shape.head_dim).unbind(dim=2)
    scores = torch.einsum("nhd,nwhd->nhw", query, keys).float() * shape.head_dim**-0.5
    scores = (scores + weights["block.distance"]).masked_fill(~seen[:, None], float("-inf"))
    mixed = torch.einsum("nhw,nwhd->nhd", torch.softmax(scores, dim=-1), values).float()
    x = x + linear(mixed.reshape(n, -1), weights["block.attended"])
    for layer in range(shape.layers):
        name = layer_name(shape, position, layer)
        normed = rms_norm(x, weights[name + ".norm"], _EPS, 0.0)
        opened = gate(linear(normed, weights[name + ".gate"]), linear(normed, weights[name + ".up"]), "silu")
        x = x + linear(dropped(opened), weights[name + ".down"])
    return rms_norm(x, weights[OUTPUT_NORM], _EPS, 0.0)


def position_logits(weights: Weights, position: int, normed: Tensor, before: Tensor) -> Tensor:
    """``[n, rows]``; ``before`` are the embeddings of the tokens before, which the first position has in its
    state already."""
    logits = linear(normed, weights[OUTPUT])
    if position == 1:
        return logits
    return logits + linear(linear(before, weights["block.correct_in"]), weights["block.correct_out"])
