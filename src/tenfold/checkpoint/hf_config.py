"""What Hugging Face's config.json says, brought to one form."""

from __future__ import annotations

from typing import Any

from tenfold.checkpoint.base import CheckpointError

_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}


def architecture_of(config: dict[str, Any], path: str) -> str:
    """The model family by ``model_type``. Raises CheckpointError for others and for quantized weights."""
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise CheckpointError(
            f"{path}: quantization_config ({method!r:.40}) is not supported; "
            "use the model in BF16, F16 or F32, or as a GGUF file"
        )
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _ARCHITECTURES:
        note = " (it is for images too; the text-only gemma3_text is)" if model_type == "gemma3" else ""
        raise CheckpointError(
            f"{path}: model_type {model_type!r:.80} is not supported{note}; "
            f"supported are {', '.join(_ARCHITECTURES)}"
        )
    return _ARCHITECTURES[model_type]


def normalised(config: dict[str, Any], path: str) -> dict[str, Any]:
    """The config with what is written in several ways in one: a copy with these keys.

    ``rope_theta`` and ``rope_scaling`` also where the file has transformers 5's ``rope_parameters``; for
    Gemma 3 ``rope_local_base_freq``, ``layer_types`` and, where regular, ``sliding_window_pattern``.
    Raises CheckpointError.
    """
    config = dict(config)
    gemma3 = config["model_type"] == "gemma3_text"
    rope = config.pop("rope_parameters", None)
    if rope is not None:
        if not isinstance(rope, dict):
            raise CheckpointError(f"{path}: rope_parameters is not an object")
        if gemma3 and "full_attention" in rope:
            local = rope.get("sliding_attention")
            rope = rope["full_attention"]
            if not isinstance(rope, dict) or not isinstance(local, dict):
                raise CheckpointError(f"{path}: rope_parameters has not an object per kind of layer")
            if local.get("rope_type", "default") != "default":
                raise CheckpointError(f"{path}: rope_parameters.sliding_attention.rope_type is not supported")
            config["rope_local_base_freq"] = local.get("rope_theta", 1e4)
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        config["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", 1e4))
        config["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    if gemma3:
        layers = config.get("num_hidden_layers")
        pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
        if type(layers) is not int or type(pattern) is not int or not 0 < layers < 1 << 16 or pattern < 1:
            raise CheckpointError(
                f"{path}: num_hidden_layers or sliding_window_pattern is not a positive integer"
            )
        config.setdefault("rope_local_base_freq", 1e4)
        regular = gemma3_layer_types(layers, pattern)
        if config.setdefault("layer_types", regular) == regular:
            config["sliding_window_pattern"] = pattern
    return config


def gemma3_layer_types(layers: int, pattern: int) -> list[str]:
    """Every ``pattern``-th layer of Gemma 3 attends to everything, the others to a window."""
    return ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]
