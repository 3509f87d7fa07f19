"""What a step costs at least: arithmetic, and bytes that must move.

Multiply and add count as two operations. Element-wise ops have nominal counts (an exponential or tanh counts
ten); they matter little. Bytes are packed weights, read once a step whatever its rows; activations in
float32, each input read and each output written; and KV rows in bfloat16, those of a sequence read once for
all of its rows. Whether they come from memory or from a cache is not told here.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from tenfold.graph.graph import Graph
from tenfold.graph.ops import (
    Add,
    AnyOp,
    Attention,
    Concat,
    Cost,
    Embed,
    Gate,
    Input,
    Linear,
    RMSNorm,
    Rope,
    Scale,
    SelectRows,
    Softcap,
    StepShape,
)

ACTIVATION_BYTES = 4
KV_BYTES = 2
EXPONENTIAL_FLOPS = 10

ELEMENT_FLOPS: dict[type[AnyOp], int] = {
    Embed: 1,
    Input: 0,
    Concat: 0,
    RMSNorm: 4,
    Rope: 3,
    Add: 1,
    Gate: 2 + EXPONENTIAL_FLOPS,
    Scale: 1,
    Softcap: 2 + EXPONENTIAL_FLOPS,
    SelectRows: 0,
}
"""Operations per element of the output."""


def graph_cost(graph: Graph, shape: StepShape, weight_bytes: Mapping[str, float]) -> Cost:
    """Cost of a whole step. Arguments and errors as for `op_cost`."""
    selected = graph.selected
    return sum((_op_cost(graph, op, shape, weight_bytes, selected) for op in graph.ops), Cost())


def op_cost(graph: Graph, op: AnyOp, shape: StepShape, weight_bytes: Mapping[str, float]) -> Cost:
    """Cost of one op of ``graph`` in a step of ``shape``.

    ``weight_bytes`` has the packed size of every weight by name. Raises ValueError for one that it lacks.
    """
    return _op_cost(graph, op, shape, weight_bytes, graph.selected)


def _op_cost(
    graph: Graph, op: AnyOp, shape: StepShape, weight_bytes: Mapping[str, float], selected: Set[str]
) -> Cost:
    if missing := [spec.name for spec in op.weights if spec.name not in weight_bytes]:
        raise ValueError(f"weight_bytes has no {missing[0]}")
    rows = shape.logit_rows if op.output in selected else shape.rows
    width = graph.widths[op.output]
    # SelectRows reads only the rows that it keeps, so every op reads as many rows as it writes.
    moved: float = rows * ACTIVATION_BYTES * (width + sum(graph.widths[name] for name in op.inputs))
    if isinstance(op, Embed):
        # A lookup touches the rows of its tokens, not the whole table.
        table = weight_bytes[op.weight.name] * rows / op.weight.shape[0]
        return Cost(rows * width * ELEMENT_FLOPS[Embed], moved + table)
    moved += sum(weight_bytes[spec.name] for spec in op.weights)
    if isinstance(op, Linear):
        bias = 0 if op.bias is None else rows * width
        return Cost(2.0 * rows * op.weight.shape[0] * op.weight.shape[1] + bias, moved)
    if isinstance(op, Attention):
        attended, read = _attended(op, shape)
        per_score = 4 * op.kv.head_dim + EXPONENTIAL_FLOPS + (EXPONENTIAL_FLOPS if op.softcap else 0)
        row_bytes = 2 * op.kv.heads * op.kv.head_dim * KV_BYTES
        return Cost(rows * op.heads * attended * per_score, moved + (read + rows) * row_bytes)
    return Cost(rows * width * ELEMENT_FLOPS[type(op)], moved)


def _attended(op: Attention, shape: StepShape) -> tuple[float, float]:
    """KV rows that one row attends to on average, and KV rows read in the step over all sequences."""
    own = shape.rows / shape.sequences
    # ``context`` is the mean over a sequence's rows of the step; its last row sees half a stretch more.
    length = shape.context + (own - 1) / 2
    if op.kv.window:
        return min(shape.context, op.kv.window), shape.sequences * min(length, op.kv.window + own - 1)
    return shape.context, shape.sequences * length
