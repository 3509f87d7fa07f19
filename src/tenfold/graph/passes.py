"""Passes over a graph. ``fuse`` makes the fused program that the native backend lowers.

Anchors are fused first (attention with the three linears behind it, gates with their two), then the linears
that are left, with the norm before and the addition after them where nobody else reads the value in between.
What fits nowhere stays an op of its own. A fused op stands where the last of its members stood. Nobody but
its members reads a value that vanished, so the order stays right.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from tenfold.graph.fused import AnyFusedOp, FusedAttention, FusedGraph, FusedLinear, NormAdd, NormSpec
from tenfold.graph.graph import Graph
from tenfold.graph.ops import (
    Add,
    AnyOp,
    Attention,
    Concat,
    Embed,
    Gate,
    Input,
    Linear,
    RMSNorm,
    Rope,
    Scale,
    SelectRows,
    Softcap,
)
from tenfold.graph.validate import describe


def fuse(graph: Graph, keep: Collection[str] = ()) -> FusedGraph:
    """The graph in fused ops; each value of ``keep`` is still the output of an op.

    Raises NotImplementedError, naming the op, where no fused op fits, and ValueError for a value that cannot
    be kept.
    """
    if unknown := [name for name in keep if name not in graph.widths]:
        raise ValueError(f"graph {graph.name!r} has no value {unknown[0]!r} to keep")
    return _Fuser(graph, keep).run()


class _Fuser:
    """The bookkeeping of one run of `fuse`: who writes and reads a value, what is used up and emitted."""

    def __init__(self, graph: Graph, keep: Collection[str]) -> None:
        self.graph = graph
        self.keep = keep
        self.position = {op.output: index for index, op in enumerate(graph.ops)}
        self.readers: dict[str, list[AnyOp]] = {op.output: [] for op in graph.ops}
        for op in graph.ops:
            for name in op.inputs:
                self.readers[name].append(op)
        self.used: set[str] = set()
        self.emitted: list[tuple[int, AnyFusedOp]] = []
        self.widths: dict[str, int] = {}

    def run(self) -> FusedGraph:
        ops = self.graph.ops
        for op in ops:
            if isinstance(op, Attention):
                self.attention(op)
        for op in ops:
            if isinstance(op, Gate):
                self.gate(op)
        for op in ops:
            if isinstance(op, Linear) and op.output not in self.used:
                self.linear(op)
        for op in ops:
            if isinstance(op, RMSNorm) and op.output not in self.used:
                self.norm(op)
        for op in ops:
            if op.output not in self.used:
                if not isinstance(op, Add | Concat | Embed | Gate | Input | Scale | SelectRows | Softcap):
                    raise NotImplementedError(f"no fused op for {describe(op)}")
                self.emit([op], op, self.graph.widths[op.output])
        self.emitted.sort(key=lambda item: item[0])
        return FusedGraph(
            name=self.graph.name,
            ops=tuple(op for _, op in self.emitted),
            widths={op.output: self.widths[op.output] for _, op in self.emitted},
            kv=self.graph.kv,
            hidden_size=self.graph.hidden_size,
            vocab_size=self.graph.vocab_size,
            max_context=self.graph.max_context,
        )

    def emit(self, members: Sequence[AnyOp], fused: AnyFusedOp, width: int) -> None:
        """Puts ``fused`` where the last of ``members`` stood."""
        self.used.update(op.output for op in members)
        self.emitted.append((max(self.position[op.output] for op in members), fused))
        self.widths[fused.output] = width

    def writer(self, value: str) -> AnyOp:
        return self.graph.ops[self.position[value]]

    def only_reader(self, value: str) -> AnyOp | None:
        """The op that alone needs ``value``, so that it may vanish into it."""
        readers = self.readers[value]
        return readers[0] if len(readers) == 1 and value not in self.keep else None

    def attention(self, op: Attention) -> None:
        """``attention(rope(norm(linear(x))), rope(norm(linear(x))), linear(x))`` becomes two fused ops."""
        q, q_rope, q_norm = self.projection(op, op.inputs[0])
        k, k_rope, k_norm = self.projection(op, op.inputs[1])
        v, v_rope, v_norm = self.projection(op, op.inputs[2])
        if v_rope is not None or v_norm is not None:
            raise NotImplementedError(f"norm or rope on the values of {describe(op)}")
        if _rotation(q_rope) != _rotation(k_rope):
            raise NotImplementedError(f"queries and keys are rotated differently in {describe(op)}")
        if not q.inputs == k.inputs == v.inputs:
            raise NotImplementedError(f"q, k and v are not linears of one value in {describe(op)}")
        packed = f"{op.output}.qkv"
        self.group((q, k, v), None, packed)
        inner: list[AnyOp] = [o for o in (q_rope, q_norm, k_rope, k_norm) if o is not None]
        fused = FusedAttention(
            input=packed,
            q_norm=_spec(q_norm),
            k_norm=_spec(k_norm),
            rope=q_rope,
            kv=op.kv,
            heads=op.heads,
            scale=op.scale,
            softcap=op.softcap,
            output=op.output,
        )
        self.emit([op, *inner], fused, self.graph.widths[op.output])

    def projection(self, op: Attention, value: str) -> tuple[Linear, Rope | None, RMSNorm | None]:
        """Walks back from an attention's input to its linear, over an optional rope and norm per head."""
        rope: Rope | None = None
        norm: RMSNorm | None = None
        while True:
            if value in self.keep:
                raise ValueError(f"{value!r} cannot be kept: it vanishes into {describe(op)}")
            if self.only_reader(value) is None:
                break
            writer = self.writer(value)
            if isinstance(writer, Linear):
                return writer, rope, norm
            if isinstance(writer, Rope) and rope is None and norm is None:
                rope = writer
            elif isinstance(writer, RMSNorm) and norm is None and writer.width == op.kv.head_dim:
                norm = writer
            else:
                break
            value = writer.inputs[0]
        raise NotImplementedError(
            f"{describe(op)}: {value!r} is not a linear with norm per head and rope that nobody else reads"
        )

    def gate(self, op: Gate) -> None:
        writers = [self.writer(value) for value in op.inputs]
        linears = tuple(w for w in writers if isinstance(w, Linear) and self.only_reader(w.output) is op)
        if len(linears) == 2 and linears[0].inputs == linears[1].inputs:
            self.group(linears, op, op.output)

    def linear(self, op: Linear) -> None:
        self.group((op,), None, op.output)

    def group(self, linears: tuple[Linear, ...], gate: Gate | None, output: str) -> None:
        """Emits one FusedLinear, with the norm before and the addition after it where they fit in."""
        members: list[AnyOp] = [*linears] if gate is None else [*linears, gate]
        value = linears[0].inputs[0]
        before = self.writer(value)
        norm: RMSNorm | None = None
        mine = {linear.output for linear in linears} == {op.output for op in self.readers[value]}
        if isinstance(before, RMSNorm) and self.whole_row(before) and mine and value not in self.keep:
            norm = before
            members.append(norm)
            value = norm.inputs[0]
        residual: str | None = None
        # The joined q, k and v have a name that the graph does not know.
        after = self.only_reader(output) if output in self.readers else None
        if isinstance(after, Add) and after.output not in self.used:
            residual = after.inputs[1] if after.inputs[0] == output else after.inputs[0]
            members.append(after)
            output = after.output
        activation: Literal["silu", "gelu"] | None = gate.activation if gate is not None else None
        fused = FusedLinear(
            input=value,
            norm=_spec(norm),
            weights=tuple(linear.weight for linear in linears),
            biases=tuple(linear.bias for linear in linears),
            gate=activation,
            residual=residual,
            output=output,
        )
        rows = sum(linear.weight.shape[0] for linear in linears)
        self.emit(members, fused, rows if gate is None else rows // 2)

    def norm(self, op: RMSNorm) -> None:
        if not self.whole_row(op):
            raise NotImplementedError(f"a norm per head outside attention: {describe(op)}")
        spec = _spec(op)
        assert spec is not None
        width = self.graph.widths[op.output]
        after = self.only_reader(op.output)
        if isinstance(after, Add) and after.output not in self.used:
            residual = after.inputs[1] if after.inputs[0] == op.output else after.inputs[0]
            fused = NormAdd(input=op.inputs[0], norm=spec, residual=residual, output=after.output)
            self.emit([op, after], fused, width)
        else:
            self.emit([op], op, width)

    def whole_row(self, op: RMSNorm) -> bool:
        return op.width == self.graph.widths[op.inputs[0]]


def _spec(norm: RMSNorm | None) -> NormSpec | None:
    if norm is None:
        return None
    return NormSpec(weight=norm.weight, eps=norm.eps, weight_offset=norm.weight_offset)


def _rotation(rope: Rope | None) -> object:
    """What must be equal for queries and keys."""
    return None if rope is None else (rope.head_dim, rope.rotary_dim, rope.theta, rope.scaling)
