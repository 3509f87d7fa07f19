"""What `tenfold inspect` tells of a model, without loading its weights."""

from __future__ import annotations

from typing import Any

import msgspec

from tenfold.backends.base import WeightReport
from tenfold.backends.native import resolve_kv_format
from tenfold.checkpoint.base import Checkpoint
from tenfold.checkpoint.locate import locate
from tenfold.checkpoint.open import open_checkpoint
from tenfold.config import PAGE_ROWS, available_memory, explain_kv, format_bytes, plan_kv
from tenfold.graph.cost import op_cost
from tenfold.graph.graph import Graph
from tenfold.graph.ops import Cost, StepShape
from tenfold.models.registry import build_graph
from tenfold.protocol import EngineSettings
from tenfold.worker.build import kv_page_bytes


class OpCosts(msgspec.Struct, frozen=True):
    """All ops of one kind in one step."""

    kind: str
    count: int
    flops: float
    bytes: float


class StepCosts(msgspec.Struct, frozen=True):
    """What a step must do at least."""

    name: str
    shape: StepShape
    ops: tuple[OpCosts, ...]

    @property
    def total(self) -> Cost:
        """Over all ops."""
        return Cost(sum(op.flops for op in self.ops), sum(op.bytes for op in self.ops))


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """A model's weights, graph, costs and memory."""

    path: str
    graph: Graph
    weights: tuple[WeightReport, ...]
    unused: tuple[str, ...]
    """Weights in the file that the graph does not read."""
    steps: tuple[StepCosts, ...]
    page_bytes: int
    kv_pages: int
    kv_why: str

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def text(self) -> str:
        """For people."""
        graph = self.graph
        parameters = sum(_elements(weight.shape) for weight in self.weights)
        size = sum(weight.bytes for weight in self.weights)
        lines = [
            f"{self.path}",
            f"{graph.name}: {parameters / 1e6:.1f} M parameters in {format_bytes(size)}, "
            f"{len(graph.kv)} layers, hidden {graph.hidden_size}, vocabulary {graph.vocab_size}, "
            f"context {graph.max_context}",
            "",
            *_table(
                ("weight", "shape", "stored", "held as", "size", "lossless", "why"),
                [
                    (
                        weight.name,
                        "x".join(map(str, weight.shape)),
                        weight.stored_type,
                        weight.format,
                        format_bytes(weight.bytes),
                        "yes" if weight.lossless else "no",
                        weight.why,
                    )
                    for weight in self.weights
                ],
            ),
        ]
        if self.unused:
            lines += ["", f"not read by the graph: {', '.join(self.unused)}"]
        for step in self.steps:
            total = step.total
            lines += [
                "",
                f"{step.name}: {total.flops / 1e9:.2f} GFLOP, {total.bytes / 1e6:.1f} MB",
                *_table(
                    ("op", "count", "GFLOP", "MB"),
                    [
                        (op.kind, str(op.count), f"{op.flops / 1e9:.3f}", f"{op.bytes / 1e6:.2f}")
                        for op in step.ops
                    ],
                ),
            ]
        lines += [
            "",
            f"KV cache: {self.page_bytes // PAGE_ROWS} bytes a token; served here and now with "
            f"{format_bytes(self.kv_pages * self.page_bytes)} = {self.kv_pages * PAGE_ROWS} tokens "
            f"({self.kv_why})",
        ]
        return "\n".join(lines)


def inspect_model(model: str, requested: str, context: int) -> Inspection:
    """Opens ``model`` and reports on it as if it were served in format ``requested``.

    Costs are those of a decode step and of a prefill of ``context`` tokens. Raises ValueError for a model
    that cannot be served.
    """
    path = str(locate(model))
    checkpoint = open_checkpoint(path)
    try:
        graph = build_graph(checkpoint.config)
        weights = _weights(checkpoint, graph, requested)
        unused = tuple(name for name in checkpoint.tensors() if name not in graph.weights)
    finally:
        checkpoint.close()
    sizes = {weight.name: float(weight.bytes) for weight in weights}
    shapes = {
        f"decode step, 1 token at context {context}": StepShape(rows=1, context=context),
        f"prefill step, {context} tokens": StepShape(rows=context, context=(context + 1) // 2),
    }
    settings = EngineSettings(model=path)
    page = kv_page_bytes(graph, resolve_kv_format("auto", requested))
    pages = plan_kv(None, available_memory(), page, graph.max_context, settings.max_running)
    return Inspection(
        path=path,
        graph=graph,
        weights=weights,
        unused=unused,
        steps=tuple(_costs(name, graph, shape, sizes) for name, shape in shapes.items()),
        page_bytes=page,
        kv_pages=pages,
        kv_why=explain_kv(pages, None, graph.max_context, settings.max_running),
    )


def _weights(checkpoint: Checkpoint, graph: Graph, requested: str) -> tuple[WeightReport, ...]:
    tensors = checkpoint.tensors()
    reports = []
    for name, spec in graph.weights.items():
        if name not in tensors:
            raise ValueError(f"{checkpoint.path}: weight {name} is missing; the file is not complete")
        info = tensors[name]
        placement = checkpoint.place(name, requested)
        # Vectors stay f32 whatever is asked for.
        matrix = len(spec.shape) > 1
        bits = placement.layout.bits_per_weight if matrix else 32
        reports.append(
            WeightReport(
                name=name,
                shape=tuple(info.shape),
                stored_type=info.stored_type,
                format=placement.layout.format.value if matrix else "f32",
                bytes=round(_elements(info.shape) * bits / 8),
                lossless=placement.lossless,
                why=placement.why,
            )
        )
    return tuple(reports)


def _costs(name: str, graph: Graph, shape: StepShape, sizes: dict[str, float]) -> StepCosts:
    costs: dict[str, tuple[int, Cost]] = {}
    for op in graph.ops:
        kind = str(type(op).__struct_config__.tag)
        count, cost = costs.get(kind, (0, Cost()))
        costs[kind] = count + 1, cost + op_cost(graph, op, shape, sizes)
    ops = tuple(OpCosts(kind, count, cost.flops, cost.bytes) for kind, (count, cost) in costs.items())
    return StepCosts(name, shape, ops)


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]
