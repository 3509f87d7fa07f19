"""Steps for measuring: of one sequence, the most likely token drawn."""

from __future__ import annotations

import numpy as np

from tenfold.backends.base import Int32s, SamplingBatch, StepBatch


def greedy(count: int) -> SamplingBatch:
    """The most likely token for each of ``count`` rows."""
    return SamplingBatch(
        temperature=np.zeros(count, np.float32),
        top_k=np.zeros(count, np.int32),
        top_p=np.ones(count, np.float32),
        min_p=np.zeros(count, np.float32),
        repetition=np.ones(count, np.float32),
        presence=np.zeros(count, np.float32),
        frequency=np.zeros(count, np.float32),
        seed=np.zeros(count, np.uint64),
        position=np.zeros(count, np.int64),
        history_offsets=np.zeros(count + 1, np.int32),
        history_tokens=np.zeros(0, np.int32),
        history_counts=np.zeros(0, np.int32),
        bias_offsets=np.zeros(count + 1, np.int32),
        bias_tokens=np.zeros(0, np.int32),
        bias_values=np.zeros(0, np.float32),
        logprobs=np.full(count, -1, np.int32),
    )


def sequence_step(tokens: Int32s, cached: int, pages: Int32s, wanted: int) -> StepBatch:
    """The step that adds ``tokens`` to a sequence's ``cached`` rows, all in ``pages``; the last ``wanted`` of
    them draw."""
    rows = len(tokens)
    return StepBatch(
        tokens=tokens,
        positions=np.arange(cached, cached + rows, dtype=np.int32),
        row_offsets=np.array([0, rows], np.int32),
        cached_rows=np.array([cached], np.int32),
        page_offsets=np.array([0, len(pages)], np.int32),
        pages=pages,
        logit_rows=np.arange(rows - wanted, rows, dtype=np.int32),
        sampling=greedy(wanted),
    )
