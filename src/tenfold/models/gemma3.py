"""Gemma 3, text only: windows on most layers with their own rope, norms before and after each block, gelu."""

from __future__ import annotations

from typing import Any

import msgspec

from tenfold.graph.builder import GraphBuilder
from tenfold.graph.graph import Graph
from tenfold.models.blocks import gated_mlp, logits, read_heads, self_attention
from tenfold.models.positions import Rotation, max_context, parse_scaling
from tenfold.models.settings import Settings, positive_number

# Published configurations leave most of these out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}


def graph(config: dict[str, Any]) -> Graph:
    """The graph of a ``gemma3_text`` configuration.

    The embedding's scale is sqrt(hidden_size) in full precision, as transformers computes it in float32 (and
    llama.cpp always). Transformers in bfloat16 rounds it (25.25 for 25.298 at width 640), so its bfloat16
    logits differ a little more from these than rounding alone would make them. Raises ValueError for what is
    missing or not supported.
    """
    settings = Settings(config, DEFAULTS)
    settings.only("hidden_activation", "gelu_pytorch_tanh")
    settings.only("hidden_act", "gelu_pytorch_tanh")
    hidden, vocab = settings.size("hidden_size"), settings.size("vocab_size")
    layers, width = settings.size("num_hidden_layers"), settings.size("intermediate_size")
    bias = settings.flag("attention_bias")
    heads = msgspec.structs.replace(
        read_heads(settings, qkv_bias=bias, out_bias=bias, qk_norm=True),
        scale=settings.number("query_pre_attn_scalar") ** -0.5,
        norm_offset=1.0,
    )
    pattern = settings.size("sliding_window_pattern")
    window = 0 if settings.get("sliding_window") is None else settings.size("sliding_window")
    slides = tuple((layer + 1) % pattern != 0 for layer in range(layers))
    full, sliding = rotations(settings)

    b = GraphBuilder("gemma3")

    def norm(value: str, name: str) -> str:
        return b.rms_norm(value, f"{prefix}.{name}_layernorm.weight", heads.eps, weight_offset=1.0)

    x = b.embed("model.embed_tokens.weight", vocab, hidden, scale=hidden**0.5)
    for layer, layer_window in enumerate(settings.layer_windows(layers, window, slides)):
        prefix = f"model.layers.{layer}"
        rope = sliding if layer_window else full
        attended = self_attention(
            b, norm(x, "input"), f"{prefix}.self_attn", heads, rope, layer_window, hidden
        )
        x = b.add(x, norm(attended, "post_attention"))
        fed = gated_mlp(b, norm(x, "pre_feedforward"), f"{prefix}.mlp", width, "gelu", hidden)
        x = b.end_layer(b.add(x, norm(fed, "post_feedforward")))
    x = logits(b, x, settings, norm_offset=1.0)
    if settings.get("final_logit_softcapping") is not None:
        b.softcap(x, settings.number("final_logit_softcapping"))
    return b.build(hidden_size=hidden, vocab_size=vocab, max_context=max_context(settings, full.scaling))


def rotations(settings: Settings) -> tuple[Rotation, Rotation]:
    """Rope of the full and of the sliding layers. Old configurations scale only the full layers."""
    nested = settings.get("rope_parameters") or {}
    if strange := sorted(nested.keys() - {"full_attention", "sliding_attention"}):
        raise ValueError(
            f"{settings.family}: rope_parameters has {strange[0]!r}; expected one table a layer type"
        )

    def one(kind: str, theta_key: str, theta: float, scaling: dict[str, Any]) -> Rotation:
        table = {**(nested.get(kind) or {}), **scaling}
        value = table.get("rope_theta", settings.get(theta_key))
        value = theta if value is None else value
        return Rotation(positive_number(settings.family, theta_key, value), parse_scaling(settings, table))

    return (
        one("full_attention", "rope_theta", 1_000_000.0, settings.get("rope_scaling") or {}),
        one("sliding_attention", "rope_local_base_freq", 10_000.0, {}),
    )
