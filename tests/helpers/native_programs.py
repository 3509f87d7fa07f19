"""Making native programs for tests: from tiny models in any format, and from a few ops by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from tenfold import _native
from tenfold.backends.base import PAGE_ROWS, CompileOptions, Floats, StepBatch
from tenfold.backends.native import NativeBackend, NativeProgram
from tenfold.checkpoint.base import Placement
from tenfold.formats.matrix import Format, Layout, Matrix
from tenfold.formats.rounding import quantize
from tenfold.graph.graph import Graph
from tenfold.models.registry import build_graph
from tests.helpers.memory_checkpoint import DictCheckpoint
from tests.helpers.tiny_models import random_weights

FormatName = Literal["f32", "bf16", "q8", "q4"]
IsaName = Literal["auto", "avx512", "avx2", "portable"]
FORMATS: tuple[FormatName, ...] = ("f32", "bf16", "q8", "q4")
LEVELS = cast("list[IsaName]", _native.isa_levels())
LAYOUTS: dict[str, Layout] = {
    "f32": Layout(Format.F32),
    "bf16": Layout(Format.BF16),
    "q8": Layout(Format.Q8, group=32),
    "q4": Layout(Format.Q4, group=32, has_minimum=True),
}
NO_INFO = cast("Any", None)


class RoundedCheckpoint(DictCheckpoint):
    """As its base, with every matrix whose columns are whole groups in `LAYOUTS` of what is asked for."""

    def place(self, name: str, requested: str) -> Placement:
        shape = self._weights[name].shape
        if len(shape) == 1 or shape[1] % 32:
            return Placement(Layout(Format.F32), True, "kept")
        return Placement(LAYOUTS[requested], requested == "f32", "asked for")

    def rows(self, name: str, layout: Layout, block_rows: int = 0) -> Iterator[tuple[int, Matrix]]:
        weight = np.atleast_2d(self._weights[name])
        for first in range(0, len(weight), 48):
            yield first, quantize(weight[first : first + 48], layout)


class TinyModel:
    """A graph with random weights, compiled as often as wanted."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.checkpoint = RoundedCheckpoint(random_weights(graph), {})

    def native(self, weights: FormatName, **options: Any) -> NativeProgram:
        """One thread, 64 rows, all of them wanted, 12 pages, unless said otherwise; every step on all of its
        threads."""
        given: dict[str, Any] = {"threads": 1, "max_rows": 64, "kv_pages": 12, "format": weights, **options}
        given.setdefault("max_logit_rows", given["max_rows"])
        program = NativeBackend().compile(self.graph, self.checkpoint, CompileOptions(**given))
        # On a busy machine a tiny program would soon run on one thread alone.
        program._core.fix_threads(given["threads"])
        return program

    def lines(self, program: NativeProgram, pages: list[int], rows: int) -> list[npt.NDArray[Any]]:
        """The bits of the K and V rows ``0 .. rows - 1`` of a page table: ``[rows, heads, dim]``, two per
        layer."""
        bits = np.uint32 if program.info.page_bytes == 2 * self._page_bytes_bf16() else np.uint16
        pool = [np.frombuffer(program.read_page(page), bits) for page in pages]
        found = []
        at = 0
        for kv in self.graph.kv:
            size = kv.heads * kv.head_dim * PAGE_ROWS
            for order, axis in (
                ((kv.heads, kv.head_dim, PAGE_ROWS), 2),
                ((kv.heads, PAGE_ROWS, kv.head_dim), 1),
            ):
                parts = [np.moveaxis(page[at : at + size].reshape(order), axis, 0) for page in pool]
                found.append(np.concatenate(parts)[:rows])
                at += size
        return found

    def _page_bytes_bf16(self) -> int:
        return sum(2 * 2 * PAGE_ROWS * kv.heads * kv.head_dim for kv in self.graph.kv)


def tiny_model(config: dict[str, Any]) -> TinyModel:
    """The model of a configuration."""
    return TinyModel(build_graph(config))


def logits_of(program: NativeProgram, step: StepBatch) -> Floats:
    """The logits of a step that hands them back."""
    logits = program.step(step).logits
    assert logits is not None
    return logits


def spoil(program: NativeProgram, pages: range | list[int] | None = None) -> None:
    """Fills pages (all, unless some are named) with what nobody may read: NaN, in BF16 and in F32."""
    for page in range(program.info.kv_pages) if pages is None else pages:
        program.write_page(page, b"\xff" * program.info.page_bytes)


def core_program(*, vocab: int, isa: str = LEVELS[0], **options: Any) -> Any:
    """An empty `_native.Program` with one page and no KV."""
    given = {"threads": 1, "max_rows": 64, "kv_pages": 1, "kv_format": "f32", "kv": [], **options}
    given.setdefault("max_logit_rows", given["max_rows"])
    return _native.Program.create(isa=isa, vocab=vocab, **given)


def pack(core: Any, matrix: Matrix) -> int:
    """Adds a matrix to a core program, in blocks of rows."""
    layout = matrix.layout
    rows, cols = matrix.codes.shape
    index: int = core.add_matrix(
        rows, cols, layout.format.value, layout.group, layout.wide_scales, layout.has_minimum
    )
    for first in range(0, rows, 32):
        block = slice(first, first + 32)
        core.write_rows(
            index,
            first,
            matrix.codes[block],
            None if matrix.scale is None else matrix.scale[block],
            None if matrix.minimum is None else matrix.minimum[block],
        )
    return index


def lookup_program(table: npt.NDArray[np.float32], vocab: int, rows: int, **options: Any) -> Any:
    """A core whose logits after token t are row t of ``table`` ``[n, vocab]``; its matrix 0 is the table, so
    that other rows can be written later. For tests of the sampler."""
    core = core_program(vocab=vocab, max_rows=rows, **options)
    core.add_matrix(max(vocab, rows), vocab, "f32", 0, False, False)
    core.write_rows(0, 0, table, None, None)
    everywhere, wanted = core.add_value(vocab, False), core.add_value(vocab, True)
    core.add_embed(0, 1.0, everywhere)
    core.add_select(everywhere, wanted)
    core.finish(wanted)
    return core


def linear_program(inputs: npt.NDArray[np.float32], matrix: Matrix, **options: Any) -> Any:
    """A core whose logits after token t are ``matrix @ inputs[t]``."""
    rows, cols = matrix.codes.shape
    core = core_program(vocab=rows, **options)
    table = np.zeros((max(rows, len(inputs)), cols), np.float32)
    table[: len(inputs)] = inputs
    embed = pack(core, Matrix(Layout(Format.F32), table))
    everywhere, wanted, logits = (
        core.add_value(cols, False),
        core.add_value(cols, True),
        core.add_value(rows, True),
    )
    core.add_embed(embed, 1.0, everywhere)
    core.add_select(everywhere, wanted)
    core.add_linear(wanted, (-1, 0.0, 0.0), [(pack(core, matrix), -1)], "none", -1, logits)
    core.finish(logits)
    return core


def wrapped(core: Any) -> NativeProgram:
    """A core as a program that takes step batches."""
    return NativeProgram(core, NO_INFO)
