"""The native CPU backend: lowers a fused graph to a program of the core.

This file decides what goes where (matrices, vectors, activation buffers); the core only runs. A buffer is
used again as soon as nobody reads its value any more, so that a step's activations stay in cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tenfold import _native
from tenfold.backends.base import (
    CompileOptions,
    Floats,
    ProgramInfo,
    StepBatch,
    StepOutput,
    WeightReport,
)
from tenfold.backends.cores import choose_threads
from tenfold.checkpoint.base import Checkpoint, CheckpointError
from tenfold.formats.matrix import Format, Layout
from tenfold.graph.fused import AnyFusedOp, FusedAttention, FusedGraph, FusedLinear, NormAdd, NormSpec
from tenfold.graph.graph import Graph
from tenfold.graph.ops import Embed, RMSNorm, Rope, RopeScaling, Scale, SelectRows, Softcap, WeightSpec
from tenfold.graph.passes import fuse
from tenfold.graph.rope import rope_frequencies

NO_NORM = (-1, 0.0, 0.0)


def choose_isa(requested: str) -> tuple[str, str]:
    """The ISA level to run and why. Raises ValueError if this machine lacks the requested one."""
    levels = _native.isa_levels()
    if requested == "auto":
        return levels[0], "best that this machine has"
    if requested not in levels:
        raise ValueError(f"isa: this machine cannot run {requested}; it can run {', '.join(levels)}")
    return requested, "asked for"


def resolve_kv_format(requested: str, weights: str) -> str:
    """What KV rows are held in: as asked for, else BF16, or F32 when the weights were asked for in F32."""
    if requested == "auto":
        return "f32" if weights == "f32" else "bf16"
    return requested


class NativeBackend:
    """Compiles graphs for the machine's own cores."""

    name = "native"

    def compile(self, graph: Graph, checkpoint: Checkpoint, options: CompileOptions) -> NativeProgram:
        """Packs the weights and reserves the KV pages; see `tenfold.backends.base.Backend`."""
        isa, why = choose_isa(options.isa)
        fused = fuse(graph)
        lowering = _Lowering(fused, checkpoint, options, isa)
        reports = lowering.run()
        lowering.core.run_modular(not options.fused)
        info = ProgramInfo(
            backend=self.name,
            threads=lowering.threads,
            threads_why=lowering.threads_why,
            isa=isa,
            isa_why=why,
            max_rows=options.max_rows,
            max_logit_rows=lowering.max_logit_rows,
            vocab_size=fused.vocab_size,
            max_context=fused.max_context,
            kv_pages=options.kv_pages,
            kv_format=resolve_kv_format(options.kv_format, options.format),
            page_bytes=lowering.core.page_bytes(),
            weight_bytes=lowering.step_bytes,
            weights=tuple(reports),
        )
        return NativeProgram(lowering.core, info)


class NativeProgram:
    """A program of the core; see `tenfold.backends.base.Program`."""

    def __init__(self, core: Any, info: ProgramInfo) -> None:
        self._core = core
        self.info = info

    def step(self, batch: StepBatch) -> StepOutput:
        """Runs one step without the GIL."""
        s = batch.sampling
        tokens, logprobs, top_tokens, top_logprobs, logits = self._core.step(
            batch.tokens,
            batch.positions,
            batch.row_offsets,
            batch.cached_rows,
            batch.page_offsets,
            batch.pages,
            batch.logit_rows,
            s.temperature,
            s.top_k,
            s.top_p,
            s.min_p,
            s.repetition,
            s.presence,
            s.frequency,
            s.seed,
            s.position,
            s.history_offsets,
            s.history_tokens,
            s.history_counts,
            s.bias_offsets,
            s.bias_tokens,
            s.bias_values,
            s.logprobs,
            batch.want_logits,
        )
        return StepOutput(
            tokens=tokens, logprobs=logprobs, top_tokens=top_tokens, top_logprobs=top_logprobs, logits=logits
        )

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copies the first lines of a page into another."""
        self._core.copy_rows(source, target, rows)

    def read_page(self, page: int) -> bytes:
        """A page's bytes."""
        data: bytes = self._core.read_page(page)
        return data

    def write_page(self, page: int, data: bytes) -> None:
        """Overwrites a page."""
        self._core.write_page(page, data)

    def set_bias(self, page: int, layer: int, head: int, values: Floats) -> None:
        """What is added to the scores of a KV head's 16 lines of a page; see `CompileOptions.kv_bias`.

        Values are numbers below infinity; -inf hides a line. A line that a step writes has 0 again. Raises
        ValueError for a page, layer or head that is not there, and where the program has no biases.
        """
        self._core.set_bias(page, layer, head, np.ascontiguousarray(values, np.float32))

    def close(self) -> None:
        """Stops the threads and frees the memory."""
        self._core = None


class _Lowering:
    """One compilation: owns the maps from names of the graph to indices of the core."""

    def __init__(self, graph: FusedGraph, checkpoint: Checkpoint, options: CompileOptions, isa: str) -> None:
        if options.kv_pages <= 0:
            raise ValueError("kv_pages must be positive")
        self.graph = graph
        self.checkpoint = checkpoint
        self.options = options
        self.threads, self.threads_why = choose_threads(options.threads)
        self.max_logit_rows = min(options.max_logit_rows, options.max_rows)
        self.core: Any = _native.Program.create(
            isa=isa,
            threads=self.threads,
            max_rows=options.max_rows,
            max_logit_rows=self.max_logit_rows,
            vocab=graph.vocab_size,
            kv_pages=options.kv_pages,
            kv_format=resolve_kv_format(options.kv_format, options.format),
            kv=[(kv.heads, kv.head_dim) for kv in graph.kv],
            kv_bias=options.kv_bias,
        )
        self.tensors = checkpoint.tensors()
        self.matrices: dict[str, int] = {}
        self.vectors: dict[str, int] = {}
        self.ropes: dict[tuple[int, float, RopeScaling], int] = {}
        self.reports: list[WeightReport] = []
        self.step_bytes = 0
        self.slots: dict[str, int] = {}
        self.selected: set[str] = set()
        self.free: dict[tuple[int, bool], list[int]] = {}
        self.last_use = _last_uses(graph.ops)

    def run(self) -> list[WeightReport]:
        """Adds every op in order; returns what became of the weights."""
        for index, op in enumerate(self.graph.ops):
            self._op(index, op)
            for name in {*_inputs(op)}:
                if self.last_use[name] == index and name in self.slots:
                    self._release(name)
        self.core.finish(self.slots[self.graph.ops[-1].output])
        return self.reports

    def _op(self, index: int, op: AnyFusedOp) -> None:
        core = self.core
        match op:
            case Embed():
                core.add_embed(self._matrix(op.weight), op.scale, self._output(op.output, False))
            case FusedLinear():
                parts = [
                    (self._matrix(w), -1 if b is None else self._vector(b))
                    for w, b in zip(op.weights, op.biases, strict=True)
                ]
                self.step_bytes += sum(core.matrix_bytes(m) for m, _ in parts)
                if not self.options.fused:
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
                spec = NormSpec(weight=op.weight, eps=op.eps, weight_offset=op.weight_offset)
                output = self._output(op.output, op.inputs[0] in self.selected)
                core.add_norm(self.slots[op.inputs[0]], self._norm(spec), -1, output)
            case Scale():
                output = self._output(op.output, op.inputs[0] in self.selected)
                core.add_scale(self.slots[op.inputs[0]], op.factor, output)
            case SelectRows():
                core.add_select(self.slots[op.inputs[0]], self._output(op.output, True))
            case Softcap():
                # In place: the fused graph has it after the output matrix alone.
                name = op.inputs[0]
                core.add_softcap(self.slots[name], op.cap)
                self.slots[op.output] = self.slots.pop(name)
                if name in self.selected:
                    self.selected.add(op.output)

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
        if in_place_of is not None:
            slot = self.slots.pop(in_place_of)
        else:
            free = self.free.get((self.graph.widths[name], selected), [])
            slot = free.pop() if free else self.core.add_value(self.graph.widths[name], selected)
        self.slots[name] = slot
        return slot

    def _release(self, name: str) -> None:
        key = (self.graph.widths[name], name in self.selected)
        self.free.setdefault(key, []).append(self.slots.pop(name))

    def _info(self, spec: WeightSpec) -> Any:
        info = self.tensors.get(spec.name)
        if info is None:
            raise CheckpointError(f"{self.checkpoint.path}: tensor {spec.name} is missing")
        if tuple(info.shape) != tuple(spec.shape):
            raise CheckpointError(
                f"{info.file}: tensor {spec.name} has shape {info.shape}, the configuration says {spec.shape}"
            )
        return info

    def _matrix(self, spec: WeightSpec) -> int:
        """Packs a weight once; a tied matrix is shared."""
        if spec.name in self.matrices:
            return self.matrices[spec.name]
        info = self._info(spec)
        placement = self.checkpoint.place(spec.name, self.options.format)
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

    def _vector(self, spec: WeightSpec) -> int:
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

    def _norm(self, norm: NormSpec | None) -> tuple[int, float, float]:
        if norm is None:
            return NO_NORM
        return self._vector(norm.weight), norm.eps, norm.weight_offset

    def _rope(self, rope: Rope) -> int:
        key = (rope.rotary_dim, rope.theta, rope.scaling)
        if key not in self.ropes:
            frequencies, factor = rope_frequencies(rope)
            self.ropes[key] = self.core.add_rope(frequencies.tolist(), factor)
        return self.ropes[key]


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
