"""Lowers fused graphs to ops of the core.

Here is decided what goes where (matrices, vectors, activation buffers); the core only runs. A buffer is used
again as soon as nobody reads its value any more, so that a step's activations stay in cache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from tenfold.backends.base import WeightReport
from tenfold.checkpoint.base import Checkpoint, CheckpointError
from tenfold.formats.matrix import Format, Layout
from tenfold.graph.fused import AnyFusedOp, FusedAttention, FusedGraph, FusedLinear, NormAdd, NormSpec
from tenfold.graph.ops import (
    Add,
    Concat,
    Embed,
    Gate,
    Input,
    RMSNorm,
    Rope,
    RopeScaling,
    Scale,
    SelectRows,
    Softcap,
    WeightSpec,
)
from tenfold.graph.rope import rope_frequencies
from tenfold.graph.states import FinalStates

NO_NORM = (-1, 0.0, 0.0)


class Weights:
    """The weights of a program of the core: each is packed once, whoever names it."""

    def __init__(self, core: Any, checkpoint: Checkpoint, requested: str) -> None:
        self.core = core
        self.checkpoint = checkpoint
        self.format = requested
        self.tensors = checkpoint.tensors()
        self.matrices: dict[str, int] = {}
        self.vectors: dict[str, int] = {}
        self.reports: list[WeightReport] = []

    def _info(self, spec: WeightSpec) -> Any:
        info = self.tensors.get(spec.name)
        if info is None:
            raise CheckpointError(f"{self.checkpoint.path}: tensor {spec.name} is missing")
        if tuple(info.shape) != tuple(spec.shape):
            raise CheckpointError(
                f"{info.file}: tensor {spec.name} has shape {info.shape}, the configuration says {spec.shape}"
            )
        return info

    def matrix(self, spec: WeightSpec) -> int:
        """The matrix's index."""
        if spec.name in self.matrices:
            return self.matrices[spec.name]
        info = self._info(spec)
        placement = self.checkpoint.place(spec.name, self.format)
        layout: Layout = placement.layout
        rows, cols = spec.shape
        index: int = self.core.add_matrix(
            rows, cols, layout.format.value, layout.group, layout.wide_scales, layout.has_minimum
        )
        for first, block in self.checkpoint.rows(spec.name, layout):
            self.core.write_rows(index, first, block.codes, block.scale, block.minimum)
        self.matrices[spec.name] = index
        self._report(info, layout, self.core.matrix_bytes(index), placement.lossless, placement.why)
        return index

    def vector(self, spec: WeightSpec) -> int:
        """The vector's index."""
        if spec.name in self.vectors:
            return self.vectors[spec.name]
        info = self._info(spec)
        layout = Layout(Format.F32)
        values = np.concatenate([b.dequantize().ravel() for _, b in self.checkpoint.rows(spec.name, layout)])
        index: int = self.core.add_vector(np.ascontiguousarray(values, dtype=np.float32))
        self.vectors[spec.name] = index
        self._report(info, layout, values.size * 4, True, "vectors stay f32")
        return index

    def _report(self, info: Any, layout: Layout, size: int, lossless: bool, why: str) -> None:
        self.reports.append(
            WeightReport(
                name=info.name,
                shape=tuple(info.shape),
                stored_type=info.stored_type,
                format=layout.format.value,
                bytes=size,
                lossless=lossless,
                why=why,
            )
        )


class Lowering:
    """One graph on its way into a program of the core: from names of values to indices.

    ``own`` are values that must outlast the graph: their memory is nobody else's, before or after. ``taps``
    are values that are handed back, with the columns where; ``states`` are the final states, which can be.
    ``fused`` is that of `CompileOptions`.
    """

    def __init__(
        self,
        core: Any,
        graph: FusedGraph,
        weights: Weights,
        *,
        taps: Sequence[tuple[str, int]] = (),
        states: FinalStates | None = None,
        own: Collection[str] = (),
        fused: bool = True,
    ) -> None:
        self.core = core
        self.graph = graph
        self.weights = weights
        self.taps = taps
        self.states = states
        self.own = own
        self.fused = fused
        # What is handed in comes first: it may be read from memory that a later op writes.
        self.ops = sorted(graph.ops, key=lambda op: not isinstance(op, Input))
        self.ropes: dict[tuple[int, float, RopeScaling], int] = {}
        self.step_bytes = 0
        self.slots: dict[str, int] = {}
        self.selected: set[str] = set()
        self.free: dict[tuple[int, bool], list[int]] = {}
        self.last_use = _last_uses(self.ops)
        for name in own:
            self.last_use[name] = len(self.ops)

    def run(self) -> int:
        """Adds every op in order; returns the index of the logits."""
        for index, op in enumerate(self.ops):
            self._op(index, op)
            for name, column in self.taps:
                if name == op.output:
                    self.core.add_tap(self.slots[name], column)
            for name in {*_inputs(op)}:
                if self.last_use[name] == index and name in self.slots:
                    self._release(name)
        return self.slots[self.graph.ops[-1].output]

    def _op(self, index: int, op: AnyFusedOp) -> None:
        core = self.core
        match op:
            case Embed():
                core.add_embed(self.weights.matrix(op.weight), op.scale, self._output(op.output, False))
            case FusedLinear():
                parts = [
                    (self.weights.matrix(w), -1 if b is None else self.weights.vector(b))
                    for w, b in zip(op.weights, op.biases, strict=True)
                ]
                self.step_bytes += sum(core.matrix_bytes(m) for m, _ in parts)
                if not self.fused:
                    self._apart(op, parts)
                    return
                residual = -1 if op.residual is None else self.slots[op.residual]
                norm = self._norm(op.norm)
                source = self.slots[op.input]
                # Not in place of the input: threads write their columns while others still read it.
                dying = None if op.residual == op.input else self._dying(op.residual, index)
                output = self._output(op.output, op.input in self.selected, dying)
                core.add_linear(source, norm, parts, op.gate or "none", residual, output)
            case FusedAttention():
                kv = op.kv
                core.add_attention(
                    input=self.slots[op.input],
                    layer=self.graph.kv.index(kv),
                    heads=op.heads,
                    kv_heads=kv.heads,
                    head_dim=kv.head_dim,
                    window=kv.window,
                    scale=op.scale,
                    softcap=op.softcap,
                    query_norm=self._norm(op.q_norm),
                    key_norm=self._norm(op.k_norm),
                    rope=-1 if op.rope is None else self._rope(op.rope),
                    output=self._output(op.output, False),
                )
            case NormAdd():
                source, residual = self.slots[op.input], self.slots[op.residual]
                output = self._output(op.output, op.input in self.selected, self._dying(op.residual, index))
                core.add_norm(source, self._norm(op.norm), residual, output)
            case RMSNorm():
                output = self._output(op.output, op.inputs[0] in self.selected)
                core.add_norm(self.slots[op.inputs[0]], self._norm(_spec(op)), -1, output)
            case Scale():
                output = self._output(op.output, op.inputs[0] in self.selected)
                core.add_scale(self.slots[op.inputs[0]], op.factor, output)
            case Add():
                first, second = (self.slots[name] for name in op.inputs)
                selected = op.inputs[0] in self.selected
                dying = self._dying(op.inputs[0], index) or self._dying(op.inputs[1], index)
                core.add_sum(first, second, self._output(op.output, selected, dying))
            case Gate():
                first, second = (self.slots[name] for name in op.inputs)
                selected = op.inputs[0] in self.selected
                dying = self._dying(op.inputs[0], index) or self._dying(op.inputs[1], index)
                core.add_gate(op.activation, first, second, self._output(op.output, selected, dying))
            case Concat():
                output = self._output(op.output, op.inputs[0] in self.selected)
                core.add_concat([self.slots[name] for name in op.inputs], output)
            case Input():
                core.add_input(self._output(op.output, False))
            case SelectRows():
                if self.states is not None and op.inputs == (self.states.source,):
                    core.add_states(self.slots[self.states.source], self._norm(_spec(self.states.norm)))
                core.add_select(self.slots[op.inputs[0]], self._output(op.output, True))
            case Softcap():
                name = op.inputs[0]
                source = self.slots[name]
                output = self._output(op.output, name in self.selected, self._dying(name, index))
                if output != source:
                    core.add_scale(source, 1.0, output)
                core.add_softcap(output, op.cap)

    def _apart(self, op: FusedLinear, parts: list[tuple[int, int]]) -> None:
        """A linear op by op: norm, each matrix, gate and residual as ops of their own."""
        core = self.core
        selected = op.input in self.selected
        borrowed: list[tuple[int, int]] = []

        def borrow(width: int) -> int:
            free = self.free.get((width, selected), [])
            borrowed.append((width, free.pop() if free else core.add_value(width, selected)))
            return borrowed[-1][1]

        source = self.slots[op.input]
        if op.norm is not None:
            normed = borrow(self.graph.widths[op.input])
            core.add_norm(source, self._norm(op.norm), -1, normed)
            source = normed
        output = self._output(op.output, selected)
        if op.gate is not None:
            pair = [borrow(self.graph.widths[op.output]) for _ in parts]
            for part, to in zip(parts, pair, strict=True):
                core.add_linear(source, NO_NORM, [part], "none", -1, to)
            core.add_gate(op.gate, *pair, output)
        else:
            column = 0
            for part, spec in zip(parts, op.weights, strict=True):
                core.add_linear(source, NO_NORM, [part], "none", -1, output, column)
                column += spec.shape[0]
        if op.residual is not None:
            core.add_sum(self.slots[op.residual], output, output)
        for width, slot in borrowed:
            self.free.setdefault((width, selected), []).append(slot)

    def _dying(self, name: str | None, index: int) -> str | None:
        """``name`` if this op is its last reader: its buffer may take the op's output in place."""
        return name if name is not None and self.last_use[name] == index else None

    def _output(self, name: str, selected: bool, in_place_of: str | None = None) -> int:
        if selected:
            self.selected.add(name)
        if name in self.own:
            slot: int = self.core.add_value(self.graph.widths[name], selected)
        elif in_place_of is not None:
            slot = self.slots.pop(in_place_of)
        else:
            free = self.free.get((self.graph.widths[name], selected), [])
            slot = free.pop() if free else self.core.add_value(self.graph.widths[name], selected)
        self.slots[name] = slot
        return slot

    def _release(self, name: str) -> None:
        key = (self.graph.widths[name], name in self.selected)
        self.free.setdefault(key, []).append(self.slots.pop(name))

    def _norm(self, norm: NormSpec | None) -> tuple[int, float, float]:
        if norm is None:
            return NO_NORM
        return self.weights.vector(norm.weight), norm.eps, norm.weight_offset

    def _rope(self, rope: Rope) -> int:
        key = (rope.rotary_dim, rope.theta, rope.scaling)
        if key not in self.ropes:
            frequencies, factor = rope_frequencies(rope)
            self.ropes[key] = self.core.add_rope(frequencies.tolist(), factor)
        return self.ropes[key]


def _spec(norm: RMSNorm) -> NormSpec:
    return NormSpec(weight=norm.weight, eps=norm.eps, weight_offset=norm.weight_offset)


def _inputs(op: AnyFusedOp) -> Sequence[str]:
    if isinstance(op, FusedLinear):
        return (op.input,) if op.residual is None else (op.input, op.residual)
    if isinstance(op, FusedAttention):
        return (op.input,)
    if isinstance(op, NormAdd):
        return (op.input, op.residual)
    return op.inputs


def _last_uses(ops: Sequence[AnyFusedOp]) -> dict[str, int]:
    return {name: index for index, op in enumerate(ops) for name in _inputs(op)}
