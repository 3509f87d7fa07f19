"""Which hidden states of a model tell most about the tokens to come."""

from __future__ import annotations

from tenfold.graph.graph import Graph
from tenfold.graph.ops import Linear


def default_taps(graph: Graph) -> tuple[str, ...]:
    """The residual stream after about 1/3 and 2/3 of the layers, and the value that the output matrix reads.

    Each is named once, so that a model of one layer has two. After EAGLE-3 (arXiv 2503.01840, section 3),
    which feeds low, middle and high states to its head; what the output matrix reads stands for the last,
    since the next token follows from it alone. Raises ValueError for a graph without layer outputs.
    """
    layers = len(graph.layer_outputs)
    if not layers:
        raise ValueError(f"graph {graph.name!r} names no layer outputs; its model file must mark them")
    heads = [op.inputs[0] for op in graph.ops if isinstance(op, Linear)]
    depths = (max(round(layers * third / 3), 1) for third in (1, 2))
    return tuple(dict.fromkeys([*(graph.layer_outputs[depth - 1] for depth in depths), heads[-1]]))
