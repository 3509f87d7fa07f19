"""Costs: a known model adds up, and each op's cost moves with the step as it should."""

from __future__ import annotations

import math

import pytest

from tenfold.graph.cost import graph_cost, op_cost
from tenfold.graph.graph import Graph
from tenfold.graph.ops import Attention, Cost, Embed, Linear, StepShape
from tenfold.models.registry import build_graph
from tests.helpers.tiny_models import CONFIGS
from tests.models.test_published import SMOLLM2_135M


def bytes_of(graph: Graph, bytes_per_weight: float) -> dict[str, float]:
    return {name: math.prod(spec.shape) * bytes_per_weight for name, spec in graph.weights.items()}


def test_smollm2_adds_up() -> None:
    """The published 134.5M parameters; two operations per matrix weight; a step reads each matrix once."""
    graph = build_graph(SMOLLM2_135M)
    sizes = bytes_of(graph, 1.0)
    assert sum(sizes.values()) == 134_515_008
    matrices = sum(math.prod(spec.shape) for spec in graph.weights.values() if len(spec.shape) == 2)
    step = graph_cost(graph, StepShape(rows=1, context=0), sizes)
    assert matrices * 2 <= step.flops <= matrices * 2 * 1.02
    # The tied matrix is read once as the head; the lookup adds one row of it.
    assert sum(sizes.values()) <= step.bytes <= sum(sizes.values()) * 1.03


def test_kv_traffic() -> None:
    """A row of context costs its K and V in bfloat16, once per sequence however many rows that has."""
    graph = build_graph(SMOLLM2_135M)
    sizes = bytes_of(graph, 0.0)
    row = 30 * 3 * 64 * 2 * 2

    def step_bytes(**shape: int) -> float:
        return graph_cost(graph, StepShape(**shape), sizes).bytes

    assert step_bytes(rows=1, context=1001) - step_bytes(rows=1, context=1) == 1000 * row
    assert step_bytes(rows=4, context=1001) - step_bytes(rows=4, context=1) == 1000 * row
    apart = step_bytes(rows=4, context=1001, sequences=4) - step_bytes(rows=4, context=1, sequences=4)
    assert apart == 4 * 1000 * row


def test_windows_bound_attention() -> None:
    """A layer with a window costs no more for a longer context; a full layer does."""
    graph = build_graph(CONFIGS["gemma3"])
    sizes = bytes_of(graph, 1.0)
    for op in graph.ops:
        if isinstance(op, Attention):
            short = op_cost(graph, op, StepShape(rows=2, context=20, sequences=2), sizes)
            long = op_cost(graph, op, StepShape(rows=2, context=50, sequences=2), sizes)
            assert (short == long) is (op.kv.window > 0)
            assert short.flops >= 2 * op.heads * min(20, op.kv.window or 20) * 4 * op.kv.head_dim


def test_only_wanted_rows_reach_the_head() -> None:
    """After select_rows the cost follows logit_rows, before it the rows of the step."""
    graph = build_graph(CONFIGS["llama"])
    sizes = bytes_of(graph, 1.0)
    head = graph.ops[-1]
    first = next(op for op in graph.ops if isinstance(op, Linear))
    one, many = StepShape(rows=8, logit_rows=1), StepShape(rows=8, logit_rows=8)
    assert op_cost(graph, head, many, sizes).flops == 8 * op_cost(graph, head, one, sizes).flops
    assert op_cost(graph, first, many, sizes) == op_cost(graph, first, one, sizes)


def test_weights_are_read_once_a_step() -> None:
    """Rows share a matrix; a lookup reads only their rows of the table."""
    graph = build_graph(CONFIGS["llama"])
    sizes = bytes_of(graph, 100.0)
    embed, linear = graph.ops[0], next(op for op in graph.ops if isinstance(op, Linear))
    assert isinstance(embed, Embed)
    one, eight = StepShape(rows=1), StepShape(rows=8)
    assert op_cost(graph, embed, one, sizes).bytes == 64 * 100 + 64 * 4
    assert op_cost(graph, embed, eight, sizes).bytes == 8 * (64 * 100 + 64 * 4)
    activations = 4 * (64 + linear.weight.shape[0])
    assert op_cost(graph, linear, eight, sizes).bytes == sizes[linear.weight.name] + 8 * activations


@pytest.mark.parametrize("name", CONFIGS)
def test_every_op_has_a_cost(name: str) -> None:
    """Each op of each family has one, and a graph's is their sum."""
    graph = build_graph(CONFIGS[name])
    sizes = bytes_of(graph, 0.5)
    shape = StepShape(rows=3, context=9, logit_rows=2)
    costs = [op_cost(graph, op, shape, sizes) for op in graph.ops]
    assert all(cost.bytes > 0 for cost in costs)
    total = sum(costs, Cost())
    whole = graph_cost(graph, shape, sizes)
    assert whole.flops == pytest.approx(total.flops)
    assert whole.bytes == pytest.approx(total.bytes)


def test_a_missing_weight_is_named() -> None:
    """A plan that forgets a weight must not count it as free."""
    graph = build_graph(CONFIGS["llama"])
    sizes = bytes_of(graph, 1.0)
    del sizes["lm_head.weight"]
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        graph_cost(graph, StepShape(rows=1), sizes)
