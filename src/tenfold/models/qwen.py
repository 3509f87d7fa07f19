"""Qwen2 and 2.5 (biases on q, k and v) and Qwen3 (norms of q and k per head)."""

from __future__ import annotations

from typing import Any

from tenfold.graph.graph import Graph
from tenfold.models.blocks import pre_norm_decoder, read_heads
from tenfold.models.settings import Settings

DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def qwen2(config: dict[str, Any]) -> Graph:
    """The graph of a ``qwen2`` configuration. Raises ValueError for what is missing or not supported."""
    settings = Settings(config, DEFAULTS)
    heads = read_heads(settings, qkv_bias=True, out_bias=False, qk_norm=False)
    return pre_norm_decoder("qwen2", settings, heads, _windows(settings))


def qwen3(config: dict[str, Any]) -> Graph:
    """The graph of a ``qwen3`` configuration. Raises ValueError for what is missing or not supported."""
    settings = Settings(config, {**DEFAULTS, "head_dim": 128})
    bias = settings.flag("attention_bias")
    heads = read_heads(settings, qkv_bias=bias, out_bias=bias, qk_norm=True)
    return pre_norm_decoder("qwen3", settings, heads, _windows(settings))


def _windows(settings: Settings) -> tuple[int, ...]:
    """If ``use_sliding_window``: layers that ``layer_types`` names, or all from ``max_window_layers`` on."""
    layers = settings.size("num_hidden_layers")
    uses = settings.flag("use_sliding_window") and settings.get("sliding_window") is not None
    window = settings.size("sliding_window") if uses else 0
    first = settings.get("max_window_layers")
    return settings.layer_windows(layers, window, tuple(uses and layer >= first for layer in range(layers)))
