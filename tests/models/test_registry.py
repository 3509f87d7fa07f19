"""Configurations: family defaults, and nothing passed over in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tenfold.checkpoint.open import open_checkpoint
from tenfold.graph.ops import Attention, Embed, Linear, Rope
from tenfold.models.registry import FAMILIES, build_graph
from tests.helpers.model_files import random_weights, tiny_config, write_folder
from tests.helpers.tiny_models import CONFIGS, SIZES, YARN

GEMMA = CONFIGS["gemma3"]


def config(model_type: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SIZES, **changes}


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": "gemma3", "text_config": GEMMA}, "gemma3"),
        ({}, "model_type"),
        (config("llama", hidden_act="gelu"), "hidden_act"),
        (config("llama", rope_scaling={"rope_type": "longrope", "factor": 2.0}), "longrope"),
        (config("llama", rope_scaling={"type": "dynamic", "factor": 2.0}), "dynamic"),
        (config("llama", rope_scaling={"rope_type": "yarn"}), "factor"),
        (config("llama", rope_scaling={**YARN, "truncate": False}), "truncate"),
        (config("llama", rope_scaling={"rope_type": "linear", "factor": -1}), "factor"),
        (config("llama", rope_scaling={"rope_type": "default", "mrope_section": [1, 2]}), "mrope_section"),
        (config("llama", rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (config("llama", partial_rotary_factor=0.5), "partial_rotary_factor"),
        (config("llama", num_local_experts=8), "num_local_experts"),
        (config("llama", sliding_window=128), "sliding_window"),
        (config("llama", residual_multiplier=0.2), "residual_multiplier"),
        (config("llama", final_logit_softcapping=30.0), "final_logit_softcapping"),
        (config("llama", num_key_value_heads=3), "KV heads"),
        (config("llama", hidden_size=65), "hidden_size"),
        (config("llama", head_dim=15), "rotary_dim"),
        (config("llama", vocab_size=None), "vocab_size"),
        (config("llama", intermediate_size="96"), "intermediate_size"),
        (config("llama", rms_norm_eps=0), "rms_norm_eps"),
        (config("llama", attention_bias="yes"), "attention_bias"),
        (config("llama", layer_types=["sliding_attention"] * 3), "sliding_window"),
        (config("mistral", attention_bias=True), "attention_bias"),
        (config("mistral", layer_types=["full_attention"] * 3), "layer_types"),
        (config("qwen2", layer_types=["full_attention"] * 2), "layer_types"),
        (config("qwen2", layer_types=["chunked_attention"] * 3), "chunked_attention"),
        ({**GEMMA, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({**GEMMA, "hidden_activation": "gelu"}, "hidden_activation"),
        ({**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters"),
        ({**GEMMA, "sliding_window": None}, "sliding_window"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_implemented_is_refused(wrong: dict[str, Any], names: str) -> None:
    """Whatever a configuration asks for that would not be computed is a ValueError that names it."""
    with pytest.raises(ValueError, match=names):
        build_graph(wrong)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_can_be_opened(tmp_path: Path, model_type: str) -> None:
    """What can be run, the checkpoint lets in, and a folder has exactly the weights that the graph asks
    for."""
    config = tiny_config(model_type.removesuffix("_text"))
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", config, random_weights(config)))
    wanted = {name: spec.shape for name, spec in build_graph(checkpoint.config).weights.items()}
    assert wanted == {name: info.shape for name, info in checkpoint.tensors().items()}
    checkpoint.close()


def test_harmless_keys_pass() -> None:
    """Keys that say what is done anyway, or nothing, do not stop a model."""
    extra = {
        "partial_rotary_factor": 1.0,
        "num_local_experts": None,
        "rope_interleaved": False,
        "use_cache": True,
    }
    assert build_graph(config("llama", **extra)) == build_graph(config("llama"))


@pytest.mark.parametrize(("model_type", "tied"), [("llama", False), ("mistral", False), ("qwen2", False)])
def test_tying_follows_the_family_when_absent(model_type: str, tied: bool) -> None:
    """A missing tie_word_embeddings means what it means in transformers."""
    assert ("lm_head.weight" not in build_graph(config(model_type)).weights) is tied


def test_gemma_defaults() -> None:
    """Published Gemma 3 configurations leave out most keys; tying is on and five of six layers slide."""
    given = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 12, "sliding_window": 512}
    graph = build_graph({"model_type": "gemma3_text", **given})
    assert [kv.window for kv in graph.kv] == ([512] * 5 + [0]) * 2
    assert {(kv.heads, kv.head_dim) for kv in graph.kv} == {(4, 256)}
    assert graph.vocab_size == 262208 and graph.max_context == 131072
    assert "lm_head.weight" not in graph.weights
    thetas = [op.theta for op in graph.ops if isinstance(op, Rope)]
    assert thetas == ([10_000.0] * 10 + [1_000_000.0] * 2) * 2
    embed = graph.ops[0]
    assert isinstance(embed, Embed) and embed.scale == 8.0
    assert all(op.scale == 1 / 16 for op in graph.ops if isinstance(op, Attention))


def test_windows_of_mistral_and_qwen() -> None:
    """Mistral slides unless the window is null, Qwen only when told to and from max_window_layers on."""
    assert [kv.window for kv in build_graph(config("mistral")).kv] == [4096] * 3
    assert [kv.window for kv in build_graph(config("mistral", sliding_window=None)).kv] == [0] * 3
    assert [kv.window for kv in build_graph(config("qwen3", sliding_window=8)).kv] == [0] * 3
    assert [kv.window for kv in build_graph(CONFIGS["qwen2-window"]).kv] == [0, 5, 5]


def test_yarn_stretches_the_context() -> None:
    """Qwen's yarn tables leave max_position_embeddings as it was trained; the table says the rest."""
    assert build_graph(config("qwen3", rope_scaling=YARN)).max_context == 256
    assert build_graph(config("llama", max_position_embeddings=4096, rope_scaling=YARN)).max_context == 4096


def test_qwen2_biases_are_on_q_k_v_only() -> None:
    """Qwen2 has biases that no key of its configuration mentions."""
    linears = [op for op in build_graph(config("qwen2")).ops if isinstance(op, Linear)]
    biased = {op.weight.name.split(".")[-2] for op in linears if op.bias is not None}
    assert biased == {"q_proj", "k_proj", "v_proj"}
