"""What a step costs by its rows, measured on the program that will serve."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise

import msgspec
import numpy as np

from tenfold.backends.base import PAGE_ROWS, Program, StepBatch
from tenfold.backends.steps import sequence_step

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# The order in which they are timed: should time run out, the shape is known coarsely all over.
_ORDER = (1, 4, 2, 8, 16, 3, 6, 32, 12, 24)
_SELDOM = 16
DEPTH = 256
_DEEP, _DEEP_STEPS = 1024, 8


class CostCurve(msgspec.Struct, frozen=True):
    """Time of a step at some numbers of rows; linear between them and, at the last slope, beyond."""

    rows: tuple[int, ...]
    """Ascending, from 1 on; at least two."""
    ms: tuple[float, ...]
    """As many; positive, does not fall."""
    depth: int = 0
    """Tokens of the sequence that was timed."""
    token_ms: float = 0.0
    """What each further token of a sequence adds to a step of one row."""

    def __post_init__(self) -> None:
        """Raises ValueError for what is no curve."""
        rows, ms = self.rows, self.ms
        if len(rows) < 2 or len(rows) != len(ms) or rows[0] != 1 or list(rows) != sorted(set(rows)):
            raise ValueError(f"rows {rows} must ascend from 1, two or more, with one time each ({len(ms)})")
        if not 0 < ms[0] < float("inf") or any(not a <= b < float("inf") for a, b in pairwise(ms)):
            raise ValueError(f"times {ms} must be positive, finite and not fall as rows grow")
        if self.depth < 0 or not 0 <= self.token_ms < float("inf"):
            raise ValueError(f"depth {self.depth} and token_ms {self.token_ms} must be finite, 0 or more")

    def at(self, rows: float) -> float:
        """Milliseconds of a step of ``rows`` rows (1 or more)."""
        i = min(max(bisect_right(self.rows, rows), 1), len(self.rows) - 1)
        r, t = self.rows, self.ms
        return t[i - 1] + (t[i] - t[i - 1]) * (rows - r[i - 1]) / (r[i] - r[i - 1])

    def v(self, rows: float) -> float:
        """Cost relative to a step of one row."""
        return self.at(rows) / self.ms[0]


def measure_curve(
    program: Program, budget_s: float = 0.6, clock: Callable[[], float] = time.perf_counter
) -> CostCurve:
    """Times steps of one sequence in the middle of a short text, every row drawn, as a verification is.

    Rounds over the row counts until ``budget_s`` is spent (a slow program may not get through one round; it
    is timed at 1, 4 and 2 rows at least; the largest counts are timed twice), and the shortest time of each
    count, made monotone: whatever else runs on the machine only adds to a step's time. The
    first ``DEPTH`` rows of pages are overwritten: call it before the program serves.

    Why one depth: attention adds to every row's cost and to the first's as well, so V(rows) changes far less
    with depth than the time itself does. What it does change, `LiveCurve` follows; what a deeper step of one
    row takes, which drafting is weighed against, is timed at ``_DEEP`` where there is room and steps are
    short (attention is little of long ones). Raises ValueError where the program has no pages for a step of
    two rows.
    """
    info = program.info
    most = min(info.max_rows, info.max_logit_rows, info.kv_pages * PAGE_ROWS, info.max_context, ROWS[-1])
    if most < 2:
        raise ValueError("the program cannot make a step of two rows: give it more rows, logit rows or pages")
    cached = max(0, min(DEPTH, info.kv_pages * PAGE_ROWS - most, info.max_context - most))
    counts = [rows for rows in _ORDER if rows <= most]
    # Pages that were never written may not be memory yet, and would be read faster than any real ones.
    for page in range(-(-cached // PAGE_ROWS)):
        program.write_page(page, bytes(info.page_bytes))
    batches = {rows: verification(cached, rows) for rows in counts}
    program.step(batches[1])
    times: dict[int, list[float]] = {rows: [] for rows in counts}
    deadline = clock() + budget_s
    spent = False
    while not spent:
        for rows in counts:
            if rows > _SELDOM and len(times[rows]) == 2:
                continue
            began = clock()
            program.step(batches[rows])
            ended = clock()
            times[rows].append((ended - began) * 1e3)
            spent = ended >= deadline
            if spent and all(times[needed] for needed in counts[:3]):
                break
    known = sorted(rows for rows in counts if times[rows])
    quick = [max(min(times[rows]), 1e-6) for rows in known]
    token_ms = 0.0
    room = min(info.kv_pages * PAGE_ROWS, info.max_context)
    if room > _DEEP > 2 * cached and quick[0] * _DEEP_STEPS < budget_s * 1e3:
        deep = _timed(program, verification(_DEEP, 1), clock)
        token_ms = max(0.0, deep - quick[0]) / (_DEEP - cached)
    return CostCurve(tuple(known), tuple(np.maximum.accumulate(quick).tolist()), cached, token_ms)


def _timed(program: Program, batch: StepBatch, clock: Callable[[], float]) -> float:
    """The shortest of a few steps, in milliseconds; the first finds its pages new."""
    taken = []
    for _ in range(_DEEP_STEPS):
        began = clock()
        program.step(batch)
        taken.append((clock() - began) * 1e3)
    return min(taken)


def verification(cached: int, rows: int) -> StepBatch:
    """A greedy step of ``rows`` rows of one sequence after ``cached`` ones, every row drawn."""
    pages = np.arange(-(-(cached + rows) // PAGE_ROWS), dtype=np.int32)
    return sequence_step(np.arange(1, rows + 1, dtype=np.int32), cached, pages, wanted=rows)
