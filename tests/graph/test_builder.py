"""The builder refuses shapes that do not fit; validation finds mistakes planted in finished graphs."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from tenfold.graph.builder import GraphBuilder
from tenfold.graph.graph import Graph
from tenfold.graph.ops import Add, Attention, Linear, RMSNorm, SelectRows, WeightSpec
from tenfold.graph.validate import GraphError, validate
from tenfold.models.registry import build_graph
from tests.helpers.tiny_models import CONFIGS


def started() -> tuple[GraphBuilder, str]:
    b = GraphBuilder("test")
    return b, b.embed("embed.weight", 32, 16)


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda b, x: b.linear("nothing", "w.weight", 8), "nothing"),
        (lambda b, x: b.add(x, b.linear(x, "w.weight", 8)), "add"),
        (lambda b, x: b.gate(x, b.linear(x, "w.weight", 8), "silu"), "gate"),
        (lambda b, x: b.rms_norm(x, "n.weight", 1e-5, width=5), "rms_norm"),
        (lambda b, x: b.rope(x, 5, 1e4), "rope"),
        (lambda b, x: b.input("given", 0), "given.*width 0"),
        (lambda b, x: b.concat(x), "concat.* has 1 inputs, needs 2"),
        (lambda b, x: b.end_layer("nothing"), "nothing"),
        (lambda b, x: b.rope(x, 8, 1e4, rotary_dim=3), "rotary_dim"),
        (lambda b, x: b.attention(x, x, b.linear(x, "v.weight", 8), head_dim=8, scale=1), "width of v"),
        (
            lambda b, x: b.attention(b.linear(x, "q.weight", 24), x, x, head_dim=8, scale=1),
            "not a multiple of 2 KV heads",
        ),
    ],
)
def test_builder_names_the_op_that_does_not_fit(
    build: Callable[[GraphBuilder, str], str], names: str
) -> None:
    """A shape mistake in a model file surfaces where it is made, with the op's name."""
    b, x = started()
    with pytest.raises(GraphError, match=names):
        build(b, x)


def test_build_needs_selected_logits_of_the_vocabulary() -> None:
    """A graph that ends in something else than logits of the wanted rows is refused."""
    b, x = started()
    with pytest.raises(GraphError, match="width of the logits"):
        b.build(hidden_size=16, vocab_size=32, max_context=8)
    b.linear(x, "head.weight", 32)
    with pytest.raises(GraphError, match="select_rows must come before"):
        b.build(hidden_size=16, vocab_size=32, max_context=8)


def changed(graph: Graph, kind: type, **changes: object) -> Graph:
    """``graph`` with the first op of ``kind`` altered."""
    index = next(i for i, op in enumerate(graph.ops) if isinstance(op, kind))
    ops = list(graph.ops)
    ops[index] = msgspec.structs.replace(ops[index], **changes)
    return msgspec.structs.replace(graph, ops=tuple(ops))


def swapped(graph: Graph, index: int) -> Graph:
    ops = list(graph.ops)
    ops[index], ops[index + 1] = ops[index + 1], ops[index]
    return msgspec.structs.replace(graph, ops=tuple(ops))


def late_selection(graph: Graph) -> Graph:
    """The final residual addition takes a selected row and an unselected one."""
    ops = list(graph.ops)
    at = next(i for i, op in enumerate(ops) if isinstance(op, SelectRows))
    extra = Add(inputs=(ops[at].inputs[0], ops[at].output), output="mixed")
    widths = {**graph.widths, "mixed": graph.hidden_size}
    return msgspec.structs.replace(graph, ops=(*ops[: at + 1], extra, *ops[at + 1 :]), widths=widths)


MISTAKES: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "used before it is defined": (lambda g: swapped(g, 1), "not defined before"),
    "written twice": (lambda g: changed(g, Add, output="model.embed_tokens"), "second time"),
    "input missing": (lambda g: changed(g, Add, inputs=("model.embed_tokens",)), "needs 2"),
    "weight of another width": (
        lambda g: changed(g, Linear, weight=WeightSpec("w", (64, 63))),
        "input width is 64, must be 63",
    ),
    "one weight in two shapes": (
        lambda g: changed(g, RMSNorm, weight=WeightSpec("model.embed_tokens.weight", (64,))),
        "shape of model.embed_tokens.weight",
    ),
    "bias of another length": (lambda g: changed(g, Linear, bias=WeightSpec("b", (3,))), "shape of b"),
    "width noted wrong": (
        lambda g: msgspec.structs.replace(g, widths={**g.widths, "model.embed_tokens": 32}),
        "graph.widths",
    ),
    "width of nothing": (lambda g: msgspec.structs.replace(g, widths={**g.widths, "ghost": 1}), "ghost"),
    "attention out of order": (
        lambda g: changed(g, Attention, kv=msgspec.structs.replace(g.kv[0], layer=1)),
        "kv is not",
    ),
    "layers misnumbered": (
        lambda g: changed(
            msgspec.structs.replace(g, kv=(msgspec.structs.replace(g.kv[0], layer=5), *g.kv[1:])),
            Attention,
            kv=msgspec.structs.replace(g.kv[0], layer=5),
        ),
        "KV layers",
    ),
    "rows mixed": (late_selection, "before and after select_rows"),
    "layer output of nothing": (lambda g: msgspec.structs.replace(g, layer_outputs=("ghost",)), "ghost"),
    "layer output of the wanted rows": (
        lambda g: msgspec.structs.replace(g, layer_outputs=("model.norm",)),
        "layer output 'model.norm'",
    ),
    "no ops": (lambda g: msgspec.structs.replace(g, ops=()), "no ops"),
    "vocabulary differs": (lambda g: msgspec.structs.replace(g, vocab_size=95), "width of the logits"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_validation_finds_planted_mistakes(mistake: str) -> None:
    """A pass that produces a broken graph is caught, whatever it broke."""
    graph = build_graph(CONFIGS["llama-tied"])
    plant, message = MISTAKES[mistake]
    with pytest.raises(GraphError, match=message):
        validate(plant(graph))


@pytest.mark.parametrize("name", CONFIGS)
def test_graphs_survive_serialization(name: str) -> None:
    """Graphs are data: written and read back they are equal and still valid."""
    graph = build_graph(CONFIGS[name])
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(graph), type=Graph)
    validate(back)
    assert back == graph
