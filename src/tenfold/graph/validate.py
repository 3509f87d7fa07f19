"""Checks a graph: every value defined before use and once, widths and shapes agree, rows are not mixed up."""

from __future__ import annotations

from collections.abc import Mapping

from tenfold.graph.graph import Graph
from tenfold.graph.ops import (
    Add,
    AnyOp,
    Attention,
    Concat,
    Embed,
    Gate,
    Input,
    KVSpec,
    Linear,
    RMSNorm,
    Rope,
    SelectRows,
    WeightSpec,
)
from tenfold.graph.rope import rope_frequencies


class GraphError(ValueError):
    """A graph contradicts itself. The message names the op."""


def describe(op: AnyOp) -> str:
    """An op for error messages: ``linear 'name' (inputs ...)``."""
    return f"{type(op).__struct_config__.tag} {op.output!r} (inputs {', '.join(op.inputs) or 'none'})"


def output_width(op: AnyOp, widths: Mapping[str, int]) -> int:
    """Width of ``op``'s output, given the widths of the values before it.

    Raises GraphError for an undefined input, a wrong number of inputs, or shapes that do not fit together.
    """
    for name in op.inputs:
        if name not in widths:
            raise GraphError(f"{describe(op)}: input {name!r} is not defined before it")
    count = {Embed: 0, Input: 0, Attention: 3, Add: 2, Gate: 2}.get(type(op), 1)
    if isinstance(op, Concat):
        count = max(len(op.inputs), 2)
    if len(op.inputs) != count:
        raise GraphError(f"{describe(op)}: has {len(op.inputs)} inputs, needs {count}")
    shapes = [widths[name] for name in op.inputs]
    if isinstance(op, Embed):
        return _matrix(op, op.weight)[1]
    if isinstance(op, Input):
        if op.width <= 0:
            raise GraphError(f"{describe(op)}: width {op.width} is not positive")
        return op.width
    if isinstance(op, Concat):
        return sum(shapes)
    if isinstance(op, Linear):
        rows, cols = _matrix(op, op.weight)
        _expect(op, "input width", shapes[0], cols)
        if op.bias is not None:
            _expect(op, f"shape of {op.bias.name}", op.bias.shape, (rows,))
        return rows
    if isinstance(op, RMSNorm):
        _expect(op, f"shape of {op.weight.name}", op.weight.shape, (op.width,))
        if op.width <= 0 or shapes[0] % op.width:
            raise GraphError(f"{describe(op)}: width {op.width} does not divide the input's {shapes[0]}")
    elif isinstance(op, Rope):
        _expect(op, "input width", shapes[0], op.heads * op.head_dim)
        if not 0 < op.rotary_dim <= op.head_dim or op.rotary_dim % 2:
            raise GraphError(f"{describe(op)}: rotary_dim {op.rotary_dim} of head_dim {op.head_dim}")
        try:
            rope_frequencies(op)
        except ValueError as error:
            raise GraphError(f"{describe(op)}: {error}") from error
    elif isinstance(op, Attention):
        _expect(op, "width of q", shapes[0], op.heads * op.kv.head_dim)
        _expect(op, "width of k", shapes[1], op.kv.heads * op.kv.head_dim)
        _expect(op, "width of v", shapes[2], op.kv.heads * op.kv.head_dim)
        if op.kv.heads <= 0 or op.heads % op.kv.heads:
            raise GraphError(f"{describe(op)}: {op.heads} heads are not a multiple of {op.kv.heads} KV heads")
    elif isinstance(op, Add | Gate):
        _expect(op, "width of the second input", shapes[1], shapes[0])
    return shapes[0]


def validate(graph: Graph) -> None:
    """Checks the whole graph. Raises GraphError with the first op that is wrong."""
    widths: dict[str, int] = {}
    selected: set[str] = set()
    weights: dict[str, WeightSpec] = {}
    kv: list[KVSpec] = []
    for op in graph.ops:
        width = output_width(op, widths)
        if op.output in widths:
            raise GraphError(f"{describe(op)}: {op.output!r} is written a second time")
        if graph.widths.get(op.output) != width:
            said = graph.widths.get(op.output)
            raise GraphError(f"{describe(op)}: graph.widths says {said}, the width is {width}")
        widths[op.output] = width
        _check_rows(op, selected)
        for spec in op.weights:
            _expect(op, f"shape of {spec.name}", spec.shape, weights.setdefault(spec.name, spec).shape)
        if isinstance(op, Attention):
            kv.append(op.kv)
    if not graph.ops:
        raise GraphError(f"graph {graph.name!r} has no ops")
    last = graph.ops[-1]
    _expect(last, "width of the logits", widths[last.output], graph.vocab_size)
    if last.output not in selected:
        raise GraphError(f"{describe(last)}: the logits are of all rows; a select_rows must come before")
    if tuple(kv) != graph.kv:
        raise GraphError(f"graph {graph.name!r}: kv is not the attention ops' specs in their order")
    if [spec.layer for spec in kv] != list(range(len(kv))):
        raise GraphError(
            f"graph {graph.name!r}: KV layers are {[spec.layer for spec in kv]}, not 0, 1, 2 ..."
        )
    for name in graph.layer_outputs:
        if name not in widths or name in selected:
            raise GraphError(f"graph {graph.name!r}: layer output {name!r} is no value of all rows")
    if extra := graph.widths.keys() - widths.keys():
        raise GraphError(f"graph {graph.name!r}: widths of values that no op writes: {sorted(extra)}")


def _check_rows(op: AnyOp, selected: set[str]) -> None:
    """After select_rows there are fewer rows: such values do not meet others, and cannot attend."""
    after = [name in selected for name in op.inputs]
    if any(after) and not all(after):
        raise GraphError(f"{describe(op)}: mixes values before and after select_rows")
    if any(after) and isinstance(op, Attention | Rope | SelectRows):
        raise GraphError(f"{describe(op)}: comes after select_rows")
    if any(after) or isinstance(op, SelectRows):
        selected.add(op.output)


def _matrix(op: AnyOp, spec: WeightSpec) -> tuple[int, int]:
    if len(spec.shape) != 2 or min(spec.shape) <= 0:
        raise GraphError(f"{describe(op)}: {spec.name} must be a matrix, its shape is {spec.shape}")
    return spec.shape[0], spec.shape[1]


def _expect(op: AnyOp, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise GraphError(f"{describe(op)}: {what} is {found}, must be {wanted}")
