"""GGUF's tensor names, as Hugging Face calls the same weights."""

from __future__ import annotations

import re

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER = {
    "llama": _PROJECTIONS | _NORMS,
    "qwen2": _PROJECTIONS | _NORMS,
    "qwen3": _PROJECTIONS | _NORMS | _HEAD_NORMS,
    "gemma3": _PROJECTIONS | _GEMMA_NORMS | _HEAD_NORMS,
}
ARCHITECTURES = tuple(_LAYER)
"""The values of ``general.architecture`` that are supported."""

_BLOCK_NAME = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)")


def canonical_name(name: str, architecture: str) -> str | None:
    """The Hugging Face name of tensor ``name``, or None if the architecture has no such weight."""
    if name in _WHOLE:
        return _WHOLE[name]
    match = _BLOCK_NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, role = match.groups()
    canonical = _LAYER[architecture].get(part)
    if canonical is None or (role == "bias" and part not in _PROJECTIONS):
        return None
    return f"model.layers.{layer}.{canonical}.{role}"


def layer_of(canonical: str) -> int | None:
    """The layer a canonical name belongs to; None for the weights outside of layers."""
    parts = canonical.split(".", 3)
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None
