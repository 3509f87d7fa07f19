"""GGUF metadata, as the keys of a Hugging Face config.json."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.gguf_names import ARCHITECTURES, layer_of
from tenfold.checkpoint.hf_config import gemma3_layer_types

_MODEL_TYPES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
_IRRELEVANT = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "pooling_type"}
"""Keys that say nothing the tensors do not say, or nothing about computing; pooling is `pooling.py`'s."""


def architecture_of(metadata: dict[str, Any], path: str) -> str:
    """``general.architecture``, if it is a supported one. Raises CheckpointError."""
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: architecture {architecture!r:.80} (general.architecture) is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    return str(architecture)


def config_from_gguf(
    metadata: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    rope_factors: npt.NDArray[np.float32] | None,
    path: str,
) -> dict[str, Any]:
    """The config of a model with these metadata and these weights (shapes by canonical name).

    ``rope_factors`` are the divisors of rotary frequencies that Llama 3 files have in ``rope_freqs.weight``.
    Raises CheckpointError, naming the key, for metadata that are missing, impossible, unsupported or unknown.
    """
    keys = _Keys(metadata, architecture_of(metadata, path), path)
    architecture = keys.architecture
    hidden_size = keys.count("embedding_length")
    layers = keys.count("block_count")
    _check_layers(keys, layers, hidden_size, shapes)
    heads = keys.count("attention.head_count")
    kv_heads = keys.count("attention.head_count_kv", heads)
    head_dim = keys.count("attention.key_length", hidden_size // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.count(name, head_dim) != head_dim:
            keys.fail(name, f"that differs from the head's {head_dim} dimensions is not supported")
    if heads % kv_heads or head_dim % 2 or head_dim == 0:
        keys.fail("attention.head_count", f"({heads}, {kv_heads} for keys, of {head_dim}) is impossible")

    model_type, model_class = _MODEL_TYPES[architecture]
    first = "model.layers.0."
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [model_class],
        "hidden_size": hidden_size,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 1e4 if architecture != "gemma3" else None),
        "rope_scaling": None,
        "max_position_embeddings": keys.count("context_length"),
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "attention_bias": first + "self_attn.q_proj.bias" in shapes,
        "mlp_bias": first + "mlp.gate_proj.bias" in shapes,
        "hidden_act": "silu",
    }
    if architecture == "gemma3":
        _add_gemma3(config, keys)
    config["rope_scaling"] = _rope_scaling(keys)
    if rope_factors is not None and not (rope_factors == 1).all():
        if config["rope_scaling"] is not None:
            keys.fail("rope.scaling.type", "together with rope_freqs.weight is not supported")
        config["rope_scaling"] = _llama3_scaling(rope_factors, config["rope_theta"], head_dim, path)
    if keys.take("attention.causal", True) is not True:
        keys.fail("attention.causal", "must be true")
    if keys.take("expert_count", 0) != 0:
        keys.fail("expert_count", "(a mixture of experts) is not supported")
    keys.refuse_unknown()
    return config


def _check_layers(keys: _Keys, layers: int, hidden_size: int, shapes: dict[str, tuple[int, ...]]) -> None:
    embedding = shapes.get("model.embed_tokens.weight")
    if embedding is None or len(embedding) != 2:
        raise CheckpointError(f"{keys.path}: the file has no matrix token_embd.weight")
    if embedding[1] != hidden_size:
        keys.fail("embedding_length", f"contradicts token_embd.weight, which has {embedding[1]} columns")
    present = {layer for layer in map(layer_of, shapes) if layer is not None}
    if len(present) != layers or max(present) >= layers:
        keys.fail("block_count", f"contradicts the tensors, which are of {len(present)} layers")


def _add_gemma3(config: dict[str, Any], keys: _Keys) -> None:
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    pattern = keys.count("attention.sliding_window_pattern", 6)
    # The 27B model (62 layers) scales scores by hidden size per head, not by head_dim; files do not say so.
    scalar = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else head_dim
    del config["hidden_act"]
    config |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": keys.count("attention.sliding_window"),
        "sliding_window_pattern": pattern,
        "layer_types": gemma3_layer_types(layers, pattern),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 1e4),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
    }


def _rope_scaling(keys: _Keys) -> dict[str, Any] | None:
    kind = keys.take("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", 1.0)
    original = keys.count("rope.scaling.original_context_length", 0)
    attention_factor = keys.number("rope.scaling.attn_factor", 1.0)
    fast = keys.number("rope.scaling.yarn_beta_fast", 32.0)
    slow = keys.number("rope.scaling.yarn_beta_slow", 1.0)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        keys.fail("rope.scaling.type", "is not supported; supported are none, linear and yarn")
    if not original:
        keys.fail("rope.scaling.original_context_length", "is needed for yarn")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": fast,
        "beta_slow": slow,
        # GGUF's factor multiplies the one that YaRN derives from the stretch; Hugging Face's replaces it.
        "attention_factor": attention_factor * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
    }


def _llama3_scaling(
    factors: npt.NDArray[np.float32], theta: float, head_dim: int, path: str
) -> dict[str, Any]:
    """Finds the parameters of Llama 3's rule behind its factors, and sees that they give the factors.

    The rule and its constants: Llama 3.1's reference code, as in transformers' ``modeling_rope_utils.py``.
    """
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    if factors.shape == (head_dim // 2,):
        frequency = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        turns = original * frequency / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        if np.allclose(factors, 1.0 / ((1.0 - kept) / factor + kept), rtol=1e-4, atol=0.0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise CheckpointError(
        f"{path}: rope_freqs.weight does not follow Llama 3's rule (low 1, high 4, original context 8192), "
        "and no other is supported"
    )


class _Keys:
    """The metadata under the architecture's name, with a note of which were looked at."""

    def __init__(self, metadata: dict[str, Any], architecture: str, path: str) -> None:
        self.metadata = metadata
        self.architecture = architecture
        self.path = path
        self.taken: set[str] = set()

    def fail(self, name: str, problem: str) -> NoReturn:
        value = self.metadata.get(f"{self.architecture}.{name}")
        raise CheckpointError(f"{self.path}: {self.architecture}.{name} = {value!r:.80} {problem}")

    def take(self, name: str, default: Any = None) -> Any:
        """The value or the default (None: there must be a value). A list of equals counts as one."""
        self.taken.add(name)
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise CheckpointError(f"{self.path}: {self.architecture}.{name} is missing")
        if isinstance(value, list):
            if not value or any(other != value[0] for other in value):
                self.fail(name, "differs from layer to layer, which is not supported")
            return value[0]
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.take(name, default)
        if type(value) is not int or not (0 < value < 1 << 31 or value == default):
            self.fail(name, "is not a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.take(name, default)
        if type(value) not in (int, float) or not (1e-37 < value < 1e37 or value == default):
            self.fail(name, "is not a positive float32")
        # Files hold float32: its shortest decimal is what the authors wrote, 1e-05 and not 9.99999975e-06.
        return float(str(np.float32(value)))

    def refuse_unknown(self) -> None:
        prefix = self.architecture + "."
        for key in self.metadata:
            if key.startswith(prefix) and key[len(prefix) :] not in self.taken | _IRRELEVANT:
                self.fail(key[len(prefix) :], "is a feature that is not known here")
