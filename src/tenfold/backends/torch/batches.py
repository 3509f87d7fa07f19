"""Checks a StepBatch against a program before anything is computed or written."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tenfold.backends.base import PAGE_ROWS, ProgramInfo, StepBatch


def check_batch(batch: StepBatch, info: ProgramInfo) -> npt.NDArray[np.int64]:
    """The cache line of each row, ``page * 16 + line`` ``[R]``. ValueError for a batch that does not fit."""
    rows, wanted, sequences = len(batch.tokens), len(batch.logit_rows), len(batch.cached_rows)
    _check(0 < rows <= info.max_rows, f"{rows} rows; a step has 1 to {info.max_rows}")
    _check(wanted <= info.max_logit_rows, f"{wanted} logit rows; a step has at most {info.max_logit_rows}")
    _check(len(batch.positions) == rows, f"{len(batch.positions)} positions for {rows} rows")
    _within("token", batch.tokens, info.vocab_size)
    _within("position", batch.positions, info.max_context)
    _within("logit row", batch.logit_rows, rows)
    _check(bool((np.diff(batch.logit_rows) > 0).all()), "logit_rows are not ascending")
    if batch.state_rows is not None:
        _within("state row", batch.state_rows, rows)
        _check(bool((np.diff(batch.state_rows) > 0).all()), "state_rows are not ascending")
    _offsets("row_offsets", batch.row_offsets, sequences, rows)
    _offsets("page_offsets", batch.page_offsets, sequences, len(batch.pages))
    _within("page", batch.pages, info.kv_pages)
    _check(bool((batch.cached_rows >= 0).all()), "cached_rows has a negative entry")
    _check(
        len(batch.sampling.temperature) == wanted,
        f"sampling has {len(batch.sampling.temperature)} entries for {wanted} logit rows",
    )
    lines = np.empty(rows, dtype=np.int64)
    for s in range(sequences):
        first, end = int(batch.row_offsets[s]), int(batch.row_offsets[s + 1])
        pages = batch.pages[batch.page_offsets[s] : batch.page_offsets[s + 1]]
        cache = int(batch.cached_rows[s]) + np.arange(end - first)
        needed = -(-(int(batch.cached_rows[s]) + end - first) // PAGE_ROWS)
        _check(len(pages) >= needed, f"sequence {s} has {len(pages)} pages and needs {needed}")
        lines[first:end] = pages[cache // PAGE_ROWS].astype(np.int64) * PAGE_ROWS + cache % PAGE_ROWS
    _check(len(np.unique(lines)) == rows, "two rows would be written to the same cache line")
    return lines


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(f"step batch: {message}")


def _within(what: str, values: npt.NDArray[np.int32], limit: int) -> None:
    wrong = values[(values < 0) | (values >= limit)]
    _check(len(wrong) == 0, f"{what} {wrong[0] if len(wrong) else 0} is not in 0..{limit - 1}")


def _offsets(what: str, offsets: npt.NDArray[np.int32], sequences: int, end: int) -> None:
    _check(len(offsets) == sequences + 1, f"{what} has {len(offsets)} entries for {sequences} sequences")
    rises = offsets[0] == 0 and offsets[-1] == end and bool((np.diff(offsets) >= 0).all())
    _check(bool(rises), f"{what} does not rise from 0 to {end}")
