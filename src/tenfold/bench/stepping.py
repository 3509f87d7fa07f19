"""Steps of a program on one sequence, without an engine: what the backend alone can do."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tenfold.backends.base import PAGE_ROWS, CompileOptions, Program, StepBatch, StepOutput
from tenfold.backends.native import NativeBackend
from tenfold.backends.steps import greedy, sequence_step
from tenfold.checkpoint.locate import locate
from tenfold.checkpoint.open import open_checkpoint
from tenfold.config import ServeConfig
from tenfold.models.registry import build_graph


def compile_model(config: ServeConfig, kv_pages: int, fused: bool = True) -> Program:
    """The model of ``config`` compiled as `tenfold serve` does it, but with ``kv_pages`` pages, the caller's
    to close. Raises ValueError or OSError for a model or setting that cannot be served."""
    checkpoint = open_checkpoint(locate(config.model))
    try:
        return NativeBackend().compile(
            build_graph(checkpoint.config),
            checkpoint,
            CompileOptions(
                threads=config.threads,
                isa=config.isa,  # type: ignore[arg-type]  # ServeConfig has checked it
                format=config.format,  # type: ignore[arg-type]
                kv_format=config.kv_format,  # type: ignore[arg-type]
                max_rows=config.max_batch_tokens,
                max_logit_rows=config.max_running,
                kv_pages=kv_pages,
                fused=fused,
            ),
        )
    finally:
        checkpoint.close()


def pages_of(tokens: int) -> int:
    """KV pages that ``tokens`` rows take."""
    return -(-tokens // PAGE_ROWS)


def joined(batches: Sequence[StepBatch]) -> StepBatch:
    """One step that does what these do, each of one sequence and one row with its logits."""

    def arrays(name: str) -> npt.NDArray[np.int32]:
        return np.concatenate([getattr(batch, name) for batch in batches])

    count = len(batches)
    return StepBatch(
        tokens=arrays("tokens"),
        positions=arrays("positions"),
        row_offsets=np.arange(count + 1, dtype=np.int32),
        cached_rows=arrays("cached_rows"),
        page_offsets=np.cumsum([0, *(len(batch.pages) for batch in batches)], dtype=np.int32),
        pages=arrays("pages"),
        logit_rows=np.arange(count, dtype=np.int32),
        sampling=greedy(count),
    )


class FirstPages:
    """A program of which only the first ``pages`` pages may be used."""

    def __init__(self, program: Program, pages: int) -> None:
        self.info = msgspec.structs.replace(program.info, kv_pages=pages)
        self._program = program

    def step(self, batch: StepBatch) -> StepOutput:
        return self._program.step(batch)

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        self._program.copy_rows(source, target, rows)

    def read_page(self, page: int) -> bytes:
        return self._program.read_page(page)

    def write_page(self, page: int, data: bytes) -> None:
        self._program.write_page(page, data)

    def close(self) -> None:
        """Nothing: the program belongs to somebody else."""


class OneSequence:
    """One sequence over pages ``first_page`` on. Its batches can be run again and again: a row that is there
    already is written anew, with the same content."""

    def __init__(self, program: Program, first_page: int, tokens: Sequence[int]) -> None:
        if len(tokens) > program.info.max_context:
            raise ValueError(
                f"the model's context is {program.info.max_context} tokens; "
                f"this measurement needs {len(tokens)}"
            )
        self._program = program
        self._tokens = np.array(tokens, np.int32)
        self._pages = np.arange(first_page, first_page + pages_of(len(tokens)), dtype=np.int32)

    def batch(self, cached: int, rows: int, wanted: int) -> StepBatch:
        """The step that adds ``rows`` rows to ``cached``; logits of the last ``wanted`` of them."""
        pages = self._pages[: pages_of(cached + rows)]
        return sequence_step(self._tokens[cached : cached + rows], cached, pages, wanted)

    def prefill(self, rows: int) -> list[StepBatch]:
        """The steps that compute the first ``rows`` rows, as few as the program allows; one token is drawn
        at the end."""
        most = self._program.info.max_rows
        return [
            self.batch(at, min(most, rows - at), wanted=int(rows - at <= most)) for at in range(0, rows, most)
        ]

    def decode(self, cached: int, steps: int) -> list[StepBatch]:
        """Steps of one row each, from ``cached`` rows on."""
        return [self.batch(cached + i, 1, wanted=1) for i in range(steps)]

    def time(self, batches: Sequence[StepBatch]) -> float:
        """Seconds that the steps take."""
        step = self._program.step
        began = time.perf_counter()
        for batch in batches:
            step(batch)
        return time.perf_counter() - began
