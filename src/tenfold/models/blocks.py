"""What the families share: attention block, gated MLP, output head, and the pre-norm decoder made of them."""

from __future__ import annotations

from typing import Literal

import msgspec

from tenfold.graph.builder import GraphBuilder
from tenfold.graph.graph import Graph
from tenfold.models.positions import Rotation, max_context, rotation
from tenfold.models.settings import Settings


class Heads(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of an attention block and what surrounds its projections."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0


def read_heads(settings: Settings, *, qkv_bias: bool, out_bias: bool, qk_norm: bool) -> Heads:
    """Head counts and width from the configuration; the scale is 1 / sqrt(head_dim)."""
    heads = settings.size("num_attention_heads")
    hidden = settings.size("hidden_size")
    if settings.get("head_dim") is None and hidden % heads:
        raise ValueError(f"{settings.family}: hidden_size {hidden} is not a multiple of {heads} heads")
    head_dim = settings.size("head_dim", otherwise=hidden // heads)
    return Heads(
        heads=heads,
        kv_heads=settings.size("num_key_value_heads", otherwise=heads),
        head_dim=head_dim,
        eps=settings.number("rms_norm_eps"),
        scale=head_dim**-0.5,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
    )


def self_attention(
    b: GraphBuilder, x: str, prefix: str, heads: Heads, rope: Rotation, window: int, hidden: int
) -> str:
    """Projections of ``x``, optional norms of q and k per head, rope, attention, output projection."""

    def project(name: str, count: int, *, norm: bool, rotate: bool) -> str:
        bias = f"{prefix}.{name}_proj.bias" if heads.qkv_bias else None
        value = b.linear(x, f"{prefix}.{name}_proj.weight", count * heads.head_dim, bias)
        if norm:
            weight = f"{prefix}.{name}_norm.weight"
            value = b.rms_norm(value, weight, heads.eps, heads.head_dim, heads.norm_offset)
        return b.rope(value, heads.head_dim, rope.theta, rope.scaling) if rotate else value

    q = project("q", heads.heads, norm=heads.qk_norm, rotate=True)
    k = project("k", heads.kv_heads, norm=heads.qk_norm, rotate=True)
    v = project("v", heads.kv_heads, norm=False, rotate=False)
    attended = b.attention(q, k, v, head_dim=heads.head_dim, scale=heads.scale, window=window)
    out_bias = f"{prefix}.o_proj.bias" if heads.out_bias else None
    return b.linear(attended, f"{prefix}.o_proj.weight", hidden, out_bias)


def gated_mlp(
    b: GraphBuilder,
    x: str,
    prefix: str,
    width: int,
    activation: Literal["silu", "gelu"],
    hidden: int,
    bias: bool = False,
) -> str:
    """``down(activation(gate(x)) * up(x))``."""

    def linear(value: str, name: str, out: int) -> str:
        stem = f"{prefix}.{name}_proj"
        return b.linear(value, f"{stem}.weight", out, f"{stem}.bias" if bias else None)

    gated = b.gate(linear(x, "gate", width), linear(x, "up", width), activation)
    return linear(gated, "down", hidden)


def logits(b: GraphBuilder, x: str, settings: Settings, norm_offset: float = 0.0) -> str:
    """The wanted rows, the final norm and the output head, which is the embedding where the two are tied."""
    x = b.select_rows(x)
    x = b.rms_norm(x, "model.norm.weight", settings.number("rms_norm_eps"), weight_offset=norm_offset)
    tied = settings.flag("tie_word_embeddings")
    weight = "model.embed_tokens.weight" if tied else "lm_head.weight"
    return b.linear(x, weight, settings.size("vocab_size"))


def pre_norm_decoder(
    name: str, settings: Settings, heads: Heads, windows: tuple[int, ...], mlp_bias: bool = False
) -> Graph:
    """The decoder of Llama and its kin: norm, attention, add, norm, gated MLP (silu), add."""
    settings.only("hidden_act", "silu")
    settings.only("final_logit_softcapping")
    settings.only("query_pre_attn_scalar")
    hidden, vocab = settings.size("hidden_size"), settings.size("vocab_size")
    rope = rotation(settings)
    b = GraphBuilder(name)
    x = b.embed("model.embed_tokens.weight", vocab, hidden)
    for layer, window in enumerate(windows):
        prefix = f"model.layers.{layer}"
        normed = b.rms_norm(x, f"{prefix}.input_layernorm.weight", heads.eps)
        x = b.add(x, self_attention(b, normed, f"{prefix}.self_attn", heads, rope, window, hidden))
        normed = b.rms_norm(x, f"{prefix}.post_attention_layernorm.weight", heads.eps)
        width = settings.size("intermediate_size")
        x = b.end_layer(b.add(x, gated_mlp(b, normed, f"{prefix}.mlp", width, "silu", hidden, mlp_bias)))
    logits(b, x, settings)
    return b.build(hidden_size=hidden, vocab_size=vocab, max_context=max_context(settings, rope.scaling))
