"""Llama and what copies it (SmolLM, TinyLlama and others), and Mistral, which adds a sliding window."""

from __future__ import annotations

from typing import Any

from tenfold.graph.graph import Graph
from tenfold.models.blocks import pre_norm_decoder, read_heads
from tenfold.models.settings import Settings


def graph(config: dict[str, Any]) -> Graph:
    """The graph of a ``llama`` configuration. Raises ValueError for what is missing or not supported."""
    settings = Settings(config, {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False})
    # Transformers' Llama would pass over windows in silence; a file that has them means them.
    settings.only("sliding_window")
    bias = settings.flag("attention_bias")
    heads = read_heads(settings, qkv_bias=bias, out_bias=bias, qk_norm=False)
    layers = settings.size("num_hidden_layers")
    windows = settings.layer_windows(layers, 0, (False,) * layers)
    return pre_norm_decoder("llama", settings, heads, windows, mlp_bias=settings.flag("mlp_bias"))


def mistral(config: dict[str, Any]) -> Graph:
    """The graph of a ``mistral`` configuration: one window for all layers (absent: 4096, null: none)."""
    defaults = {
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    }
    settings = Settings(config, defaults)
    settings.only("attention_bias", False)
    settings.only("mlp_bias", False)
    settings.only("layer_types")
    heads = read_heads(settings, qkv_bias=False, out_bias=False, qk_norm=False)
    window = 0 if settings.get("sliding_window") is None else settings.size("sliding_window")
    windows = (window,) * settings.size("num_hidden_layers")
    return pre_norm_decoder("mistral", settings, heads, windows)
