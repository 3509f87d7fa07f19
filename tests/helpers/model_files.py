"""Small models with random weights, written as GGUF files and as Hugging Face folders.

Written from the formats' descriptions, independently of what reads them in `tenfold.checkpoint`: a round trip
proves something.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tenfold.checkpoint.gguf_write import NewTensor
from tenfold.checkpoint.gguf_write import write_gguf as write

Floats = npt.NDArray[np.float32]
Config = dict[str, Any]
Weights = dict[str, Floats]
Tensors = dict[str, tuple[tuple[int, ...], str, bytes]]
"""By GGUF name: shape with rows first, type, encoded data."""

_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma3_text": "Gemma3",
}


def tiny_config(family: str, **changes: Any) -> Config:
    """A config.json of ``family`` (llama, mistral, qwen2, qwen3, gemma3), with ``changes``.

    Without them: 2 layers, hidden size 64, 4 heads, vocabulary 256.
    """
    model_type = "gemma3_text" if family == "gemma3" else family
    config: Config = {
        "model_type": model_type,
        "architectures": [f"{_CLASSES[model_type]}ForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if family in ("qwen3", "gemma3") else 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "vocab_size": 256,
        "tie_word_embeddings": family == "gemma3",
        "attention_bias": family == "qwen2",
        "mlp_bias": False,
        "hidden_act": "silu",
    }
    if family == "mistral":
        config["sliding_window"] = 32
    if family == "gemma3":
        del config["hidden_act"]
        config |= {
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 32,
            "sliding_window": 32,
            "sliding_window_pattern": 6,
            "layer_types": ["sliding_attention"] * 2,
            "rope_local_base_freq": 10000.0,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        }
    config |= changes
    if family == "gemma3" and "num_hidden_layers" in changes and "layer_types" not in changes:
        config["layer_types"] = [
            "full_attention" if layer % 6 == 5 else "sliding_attention"
            for layer in range(config["num_hidden_layers"])
        ]
    return config


def weight_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The weights a model with this config has, by Hugging Face name."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    gemma3 = config["model_type"] == "gemma3_text"
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = (hidden,)
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{at}self_attn.{part}_proj.weight"] = (rows, hidden)
            if config["attention_bias"]:
                shapes[f"{at}self_attn.{part}_proj.bias"] = (rows,)
        if gemma3 or config["model_type"] == "qwen3":
            shapes[at + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[at + "self_attn.k_norm.weight"] = (head_dim,)
        shapes[at + "self_attn.o_proj.weight"] = (hidden, q)
        shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        if gemma3:
            shapes[at + "pre_feedforward_layernorm.weight"] = (hidden,)
            shapes[at + "post_feedforward_layernorm.weight"] = (hidden,)
        shapes[at + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[at + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[at + "mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def random_weights(config: Config, seed: int = 0) -> Weights:
    """Weights that keep activations near one: matrices ~ N(0, 1 / cols), norms near 1 (Gemma's 0)."""
    rng = np.random.default_rng(seed)
    gemma3 = config["model_type"] == "gemma3_text"
    weights: Weights = {}
    for name, shape in weight_shapes(config).items():
        values = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2:
            values *= np.float32(1.0 / math.sqrt(shape[1]))
        else:
            values *= np.float32(0.1)
            if name.endswith("norm.weight") and not gemma3:
                values += np.float32(1)
        weights[name] = values
    return weights


# Hugging Face folders


def write_folder(path: Path, config: Config, weights: Weights, dtype: str = "F32", shards: int = 1) -> Path:
    """A folder with config.json and ``weights`` as ``dtype`` (F32, F16, BF16) in so many files."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_safetensors(path / "model.safetensors", weights, dtype)
        return path
    weight_map: dict[str, str] = {}
    names = list(weights)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        write_safetensors(path / file, part, dtype)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def write_safetensors(path: Path, weights: Weights, dtype: str = "F32") -> Path:
    """One safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in weights.items():
        encoded = encode(values, dtype)
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(encoded)],
        }
        data += encoded
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


# GGUF files

SCALES_AT = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where the float16 scales are in a block."""


def random_blocks(kind: str, rows: int, cols: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Random bytes of a quantized type, ``[rows, row bytes]``, with scales of usual size."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (rows * cols // block, size), dtype=np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = rng.integers(118, 126, len(raw))
    for at in SCALES_AT.get(kind, ()):
        scale = rng.uniform(-0.01, 0.01, len(raw)) / (32 if kind.endswith(("_K", "_XS")) else 1)
        raw[:, at : at + 2] = scale.astype("<f2").view(np.uint8).reshape(-1, 2)
    return raw.reshape(rows, -1)


def encode(values: Floats, kind: str) -> bytes:
    """``values`` in a GGUF type, or random blocks of their shape where package gguf cannot quantize."""
    if kind == "F32":
        return values.astype("<f4").tobytes()
    try:
        return bytes(gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).tobytes())
    except NotImplementedError:
        rows, cols = values.shape
        return random_blocks(kind, rows, cols, np.random.default_rng(values.size)).tobytes()


def write_gguf(path: Path, metadata: dict[str, Any], tensors: Tensors) -> Path:
    """A GGUF file of ``tensors`` as they are."""
    numbers = gguf.GGMLQuantizationType
    new = [
        NewTensor(name, shape, numbers[kind].value, len(encoded), partial(iter, [encoded]))
        for name, (shape, kind, encoded) in tensors.items()
    ]
    write(path, metadata, new)
    return path


def write_gguf_model(
    path: Path,
    config: Config,
    weights: Weights,
    kinds: str | Callable[[str], str] = "F32",
    metadata: dict[str, Any] | None = None,
) -> Path:
    """A GGUF file of a model as llama.cpp's converter writes it: its names, row order and norms.

    ``kinds`` is the type of all matrices, or gives it by Hugging Face name; vectors are F32. ``metadata``
    adds keys, a tokenizer's for example.
    """
    family = config["model_type"].removesuffix("_text")
    tensors: Tensors = {}
    for name, values in weights.items():
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            values = (
                values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
            )
        if family == "gemma3" and name.endswith("norm.weight"):
            values = values + np.float32(1)
        kind = "F32" if values.ndim == 1 else kinds if isinstance(kinds, str) else kinds(name)
        tensors[gguf_name(name, family)] = (values.shape, kind, encode(np.ascontiguousarray(values), kind))
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        factors = llama3_factors(config)
        tensors["rope_freqs.weight"] = (factors.shape, "F32", factors.tobytes())
    return write_gguf(path, gguf_metadata(config) | (metadata or {}), tensors)


def gguf_name(name: str, family: str) -> str:
    """GGUF's name of a weight."""
    if not name.startswith("model.layers."):
        return {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }[name]
    _, _, layer, rest = name.split(".", 3)
    part, role = rest.rsplit(".", 1)
    gemma3 = family == "gemma3"
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm" if gemma3 else "ffn_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    return f"blk.{layer}.{names[part]}.{role}"


def gguf_metadata(config: Config) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes for a config."""
    family = config["model_type"].removesuffix("_text")
    values: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.freq_base": float(config["rope_theta"]),
    }
    if family == "llama":
        values["vocab_size"] = config["vocab_size"]
        values["rope.dimension_count"] = config["head_dim"]
    if family == "gemma3":
        values["attention.sliding_window"] = config["sliding_window"]
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        values["rope.scaling.type"] = scaling["rope_type"]
        values["rope.scaling.factor"] = float(scaling["factor"])
    if scaling.get("rope_type") == "yarn":
        values["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    general: dict[str, Any] = {"general.architecture": family, "general.name": "tiny"}
    return general | {f"{family}.{key}": value for key, value in values.items()}


def llama3_factors(config: Config) -> Floats:
    """What Llama 3 divides the rotary frequencies by, ``[head_dim / 2]``."""
    scaling = config["rope_scaling"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    factors = []
    for index in range(0, config["head_dim"], 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (index / config["head_dim"])
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(scaling["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, dtype=np.float32)
