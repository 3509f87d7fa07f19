"""From a configuration to a graph, by ``model_type``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tenfold.graph.graph import Graph
from tenfold.models import gemma3, llama, qwen

FAMILIES: dict[str, Callable[[dict[str, Any]], Graph]] = {
    "llama": llama.graph,
    "mistral": llama.mistral,
    "qwen2": qwen.qwen2,
    "qwen3": qwen.qwen3,
    "gemma3_text": gemma3.graph,
}
"""Every model_type that can be run, and the function that makes its graph."""


def build_graph(config: dict[str, Any]) -> Graph:
    """The graph of a model, from the keys of its config.json.

    Raises ValueError, naming the key, for an unknown ``model_type`` and for anything in the configuration
    that is missing, contradictory or not implemented.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type {kind!r} is not supported; supported are {', '.join(FAMILIES)}")
    return FAMILIES[kind](config)
