"""Small random models of every family: configurations as config.json has them, and weights for any graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tenfold.graph.graph import Graph

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "llama-one-kv-head": {"model_type": "llama", **SIZES, "num_key_value_heads": 1},
    "llama-no-gqa": {"model_type": "llama", **SIZES, "num_key_value_heads": None},
    "llama-tied": {"model_type": "llama", **SIZES, "tie_word_embeddings": True, "rope_theta": 500.0},
    "llama-biases": {"model_type": "llama", **SIZES, "attention_bias": True, "mlp_bias": True},
    "llama-head-dim": {"model_type": "llama", **SIZES, "head_dim": 24},
    "llama-linear": {"model_type": "llama", **SIZES, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-llama3": {"model_type": "llama", **SIZES, "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "llama-yarn": {"model_type": "llama", **SIZES, "rope_scaling": YARN},
    "llama-yarn-mscale": {
        "model_type": "llama",
        **SIZES,
        "rope_scaling": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5, "beta_fast": 8.0, "beta_slow": 2.0},
    },
    "llama-rope-parameters": {
        "model_type": "llama",
        **SIZES,
        "rope_parameters": {**LLAMA3, "rope_theta": 2000.0},
    },
    "mistral": {"model_type": "mistral", **SIZES, "sliding_window": 7},
    "mistral-no-window": {"model_type": "mistral", **SIZES, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", **SIZES, "rope_theta": 1000000.0},
    "qwen2-tied": {"model_type": "qwen2", **SIZES, "tie_word_embeddings": True},
    "qwen2-window": {
        "model_type": "qwen2",
        **SIZES,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 32},
    "qwen3-yarn-biases": {
        "model_type": "qwen3",
        **SIZES,
        "head_dim": 16,
        "attention_bias": True,
        "rope_scaling": YARN,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **SIZES,
        "head_dim": 32,
        "query_pre_attn_scalar": 48,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "rope_theta": 5000.0,
        "rope_local_base_freq": 300.0,
    },
    "gemma3-one-kv-head": {
        "model_type": "gemma3_text",
        **SIZES,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "final_logit_softcapping": 3.0,
        "attention_bias": True,
    },
    "gemma3-rope-parameters": {
        "model_type": "gemma3_text",
        **SIZES,
        "head_dim": 16,
        "sliding_window": 9,
        "sliding_window_pattern": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
        },
    },
}


def random_weights(graph: Graph, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Weights that keep activations of order one; norms and biases are random too, so none can be missed."""
    rng = np.random.default_rng(seed)
    weights: dict[str, npt.NDArray[np.float32]] = {}
    for name, spec in graph.weights.items():
        values = rng.standard_normal(spec.shape)
        if len(spec.shape) == 2:
            values *= 1.0 if "embed" in name else spec.shape[1] ** -0.5
        elif "norm" in name:
            values = 0.3 * values + (0.0 if graph.name == "gemma3" else 1.0)
        weights[name] = values.astype(np.float32)
    return weights
