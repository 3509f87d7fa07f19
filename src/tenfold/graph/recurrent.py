"""A small model that runs on from another's hidden states: what a recurrent drafter is."""

from __future__ import annotations

import msgspec

from tenfold.graph.graph import Graph
from tenfold.graph.ops import Attention, Input, Rope
from tenfold.graph.validate import GraphError, describe, validate


class RecurrentGraph(msgspec.Struct, frozen=True, kw_only=True):
    """Two graphs without attention that share weights by name.

    A row is a sequence. ``first`` reads the sequence's newest token and the `Input` value ``features`` (the
    target's hidden states that led to that token), ``next`` the token just drafted and the `Input` value
    ``state``. Both have logits over ``vocab_size`` rows (see ``token_ids`` of whoever runs them), and both
    compute the value named ``state_output``, ``[rows, state_width]``, that is the following step's ``state``.
    """

    first: Graph
    next: Graph
    state_output: tuple[str, str]
    """Its name in ``first`` and in ``next``: a value of all rows, before any select_rows."""
    feature_width: int
    state_width: int


def validate_recurrent(graph: RecurrentGraph) -> None:
    """Checks both graphs and that they fit together. Raises GraphError, naming what is wrong."""
    if graph.first.vocab_size != graph.next.vocab_size:
        raise GraphError(
            f"the steps' logits differ: {graph.first.vocab_size} and {graph.next.vocab_size} rows"
        )
    inputs = (("features", graph.feature_width), ("state", graph.state_width))
    for step, state, (name, width) in zip((graph.first, graph.next), graph.state_output, inputs, strict=True):
        validate(step)
        found = {op.output: op.width for op in step.ops if isinstance(op, Input)}
        if found != {name: width}:
            raise GraphError(f"graph {step.name!r}: its inputs are {found}, must be {name!r}: {width}")
        for op in step.ops:
            if isinstance(op, Attention | Rope):
                raise GraphError(f"{describe(op)}: a recurrent program has no positions and no cache")
        if step.widths.get(state) != graph.state_width or state in step.selected or state == name:
            raise GraphError(
                f"graph {step.name!r}: the state {state!r} is no computed value of all rows of width "
                f"{graph.state_width}"
            )
    shapes = {name: spec.shape for name, spec in graph.first.weights.items()}
    for name, spec in graph.next.weights.items():
        if shapes.get(name, spec.shape) != spec.shape:
            raise GraphError(f"weight {name} is {shapes[name]} in the first step, {spec.shape} in the next")
