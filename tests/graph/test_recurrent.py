"""Recurrent graphs: two graphs that fit together, or an error that says where they do not."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from tenfold.graph.builder import GraphBuilder
from tenfold.graph.cost import graph_cost
from tenfold.graph.graph import Graph
from tenfold.graph.ops import Concat, Input, StepShape
from tenfold.graph.recurrent import RecurrentGraph, validate_recurrent
from tenfold.graph.validate import GraphError
from tests.helpers.recurrent_graphs import head_graph

HEAD = head_graph()
JOINED = next(op.output for op in HEAD.first.ops if isinstance(op, Concat))


def step(*inputs: tuple[str, int], rows: int = 100, up: int = 96, rope: bool = False) -> tuple[Graph, str]:
    """A step with these inputs, each through a matrix of its own, added up."""
    b = GraphBuilder("head")
    x = b.embed("model.embed_tokens.weight", 160, 64)
    for name, width in inputs:
        x = b.add(x, b.linear(b.input(name, width), f"{name}.weight", 64))
    if rope:
        x = b.rope(x, 64, 1e4)
    x = b.add(x, b.linear(b.linear(x, "head.up.weight", up), "head.down.weight", 64))
    b.linear(b.select_rows(x), "head.out.weight", rows)
    return b.build(hidden_size=64, vocab_size=rows, max_context=1), x


def changed(**fields: object) -> RecurrentGraph:
    return msgspec.structs.replace(HEAD, **fields)


def with_next(graph: tuple[Graph, str]) -> RecurrentGraph:
    return changed(next=graph[0], state_output=(HEAD.state_output[0], graph[1]))


MISTAKES: dict[str, tuple[Callable[[], RecurrentGraph], str]] = {
    "no input": (lambda: with_next(step()), r"inputs are \{\}, must be 'state': 64"),
    "two inputs": (lambda: with_next(step(("state", 64), ("more", 64))), "must be 'state': 64"),
    "another name": (lambda: with_next(step(("features", 64))), "must be 'state': 64"),
    "another width": (lambda: changed(feature_width=95), "must be 'features': 95"),
    "logits of another width": (lambda: with_next(step(("state", 64), rows=99)), "100 and 99 rows"),
    "positions": (lambda: with_next(step(("state", 64), rope=True)), "rope.* no positions"),
    "a weight of two shapes": (lambda: with_next(step(("state", 64), up=80)), "head.up.weight"),
    "no such state": (lambda: changed(state_output=(HEAD.state_output[0], "ghost")), "'ghost'"),
    "a state of another width": (
        lambda: changed(state_output=("concat.4", HEAD.state_output[1])),
        "concat.4",
    ),
    "a state of the wanted rows": (
        lambda: changed(state_output=(HEAD.state_output[0], HEAD.next.ops[-2].output)),
        "no computed value of all rows",
    ),
    "a state that is handed in": (
        lambda: changed(state_output=(HEAD.state_output[0], "state")),
        "no computed value",
    ),
}


def test_a_head_is_valid() -> None:
    """What the tests run is what the rules allow."""
    validate_recurrent(HEAD)
    validate_recurrent(with_next(step(("state", 64))))
    data = msgspec.msgpack.encode(HEAD)
    assert msgspec.msgpack.decode(data, type=RecurrentGraph) == HEAD


@pytest.mark.parametrize("mistake", MISTAKES)
def test_graphs_that_do_not_fit_together_are_refused(mistake: str) -> None:
    """Whatever is wrong with one of the two, or between them, is named before anything is compiled."""
    build, message = MISTAKES[mistake]
    with pytest.raises(GraphError, match=message):
        validate_recurrent(build())


def test_values_that_are_handed_in_cost_their_bytes() -> None:
    """Handing in and joining compute nothing and move what they write and read."""
    sizes = dict.fromkeys(HEAD.next.weights, 0.0)
    with_input = graph_cost(HEAD.next, StepShape(rows=3, logit_rows=3), sizes)
    moved = sum(
        3 * 4 * (HEAD.next.widths[op.output] + sum(HEAD.next.widths[name] for name in op.inputs))
        for op in HEAD.next.ops
    )
    assert with_input.bytes == moved
    assert any(isinstance(op, Input) for op in HEAD.next.ops)
