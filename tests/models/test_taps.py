"""Hidden states that models name, and the ones that are handed back by default."""

from __future__ import annotations

import msgspec
import pytest

from tenfold.graph.ops import Add
from tenfold.models.registry import build_graph
from tenfold.models.taps import default_taps
from tests.helpers.tiny_models import CONFIGS, SIZES
from tests.models.test_published import SMOLLM2_135M


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_names_its_layers_outputs(name: str) -> None:
    """One a layer, in order: the residual stream, of the hidden width, after the layer's last addition."""
    graph = build_graph(CONFIGS[name])
    additions = [op.output for op in graph.ops if isinstance(op, Add)]
    assert graph.layer_outputs == tuple(additions[1::2])
    assert len(graph.layer_outputs) == CONFIGS[name]["num_hidden_layers"]
    assert {graph.widths[value] for value in graph.layer_outputs} == {graph.hidden_size}


def test_default_taps() -> None:
    """A third and two thirds of the way down, and what the output matrix reads, soft cap or not."""
    graph = build_graph(SMOLLM2_135M)
    assert default_taps(graph) == (graph.layer_outputs[9], graph.layer_outputs[19], "model.norm")
    for name in ("gemma3", "gemma3-one-kv-head"):
        graph = build_graph(CONFIGS[name])
        assert default_taps(graph) == (graph.layer_outputs[0], graph.layer_outputs[1], "model.norm")


@pytest.mark.parametrize("layers", [1, 2])
def test_shallow_models_have_fewer(layers: int) -> None:
    """No state is named twice."""
    graph = build_graph({"model_type": "llama", **SIZES, "num_hidden_layers": layers})
    taps = default_taps(graph)
    assert taps[-1] == "model.norm"
    assert len(set(taps)) == len(taps) == {1: 2, 2: 2}[layers]


def test_a_graph_without_layer_outputs_has_no_default_taps() -> None:
    """It is an error that says what is missing."""
    graph = msgspec.structs.replace(build_graph(SMOLLM2_135M), layer_outputs=())
    with pytest.raises(ValueError, match="names no layer outputs"):
        default_taps(graph)
