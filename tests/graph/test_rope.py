"""Rotary frequencies against transformers' own initialisers, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tenfold.graph.ops import Rope, RopeScaling
from tenfold.graph.rope import rope_frequencies
from tenfold.models.registry import build_graph

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def rope(scaling: RopeScaling) -> Rope:
    return Rope(output="r", heads=1, head_dim=64, rotary_dim=64, theta=1e4, scaling=scaling)


@pytest.mark.parametrize(
    ("theta", "table"),
    [
        (500000.0, LLAMA3),
        (10000.0, {**LLAMA3, "factor": 8.0}),
        (1000000.0, YARN),
        (1000000.0, {**YARN, "attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0}),
        (10000.0, {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}),
        # Ends of the ramp beyond the first and beyond the last pair.
        (10000.0, {**YARN, "original_max_position_embeddings": 8}),
        (50.0, {**YARN, "beta_fast": 1000.0}),
        (10000.0, {"rope_type": "linear", "factor": 4.0}),
    ],
)
def test_frequencies_match_transformers(theta: float, table: dict[str, Any]) -> None:
    """Real-sized heads and contexts give the same angles and attention factor as transformers."""
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 256,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 131072,
        "rope_theta": theta,
        "rope_scaling": table,
    }
    op = next(op for op in build_graph(config).ops if isinstance(op, Rope))
    ours, factor = rope_frequencies(op)
    settings = transformers.LlamaConfig.from_dict(config)
    theirs, their_factor = ROPE_INIT_FUNCTIONS[str(table["rope_type"])](settings, None)
    np.testing.assert_allclose(ours, np.asarray(theirs, dtype=np.float64), rtol=2e-6)
    assert factor == pytest.approx(their_factor)


@pytest.mark.parametrize(
    ("scaling", "names"),
    [
        (RopeScaling(kind="linear", factor=0.0), "factor"),
        (RopeScaling(kind="llama3", factor=2.0), "original_context"),
        (
            RopeScaling(
                kind="llama3", factor=2.0, original_context=8, low_freq_factor=4.0, high_freq_factor=4.0
            ),
            "high_freq_factor",
        ),
    ],
)
def test_senseless_parameters_are_refused(scaling: RopeScaling, names: str) -> None:
    """Parameters that would divide by zero or do not fit the head are errors, not infinities."""
    with pytest.raises(ValueError, match=names):
        rope_frequencies(rope(scaling))
