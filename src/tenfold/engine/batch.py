"""Builds a StepBatch from the work of a step, in arrays that are made once and used again."""

from __future__ import annotations

from collections.abc import Sequence as Sized
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tenfold.backends.base import SamplingBatch, StepBatch
from tenfold.engine.scheduler import Work
from tenfold.kv.cache import pages_for

Number = TypeVar("Number", bound=np.generic)


class BatchBuilder:
    """Arrays for steps of at most ``max_rows`` rows of ``max_running`` sequences.

    A batch is made of views of them, so it is valid until the next one is built.
    """

    def __init__(self, max_rows: int, max_running: int) -> None:
        n = max_running
        self._tokens = np.zeros(max_rows, np.int32)
        self._positions = np.zeros(max_rows, np.int32)
        self._row_offsets = np.zeros(n + 1, np.int32)
        self._cached_rows = np.zeros(n, np.int32)
        self._page_offsets = np.zeros(n + 1, np.int32)
        self._pages = np.zeros(1024, np.int32)
        self._logit_rows = np.zeros(n, np.int32)
        self._temperature = np.zeros(n, np.float32)
        self._top_k = np.zeros(n, np.int32)
        self._top_p = np.zeros(n, np.float32)
        self._min_p = np.zeros(n, np.float32)
        self._repetition = np.zeros(n, np.float32)
        self._presence = np.zeros(n, np.float32)
        self._frequency = np.zeros(n, np.float32)
        self._seed = np.zeros(n, np.uint64)
        self._position = np.zeros(n, np.int64)
        self._history_offsets = np.zeros(n + 1, np.int32)
        self._history_tokens = np.zeros(1024, np.int32)
        self._history_counts = np.zeros(1024, np.int32)
        self._bias_offsets = np.zeros(n + 1, np.int32)
        self._bias_tokens = np.zeros(64, np.int32)
        self._bias_values = np.zeros(64, np.float32)
        self._logprobs = np.zeros(n, np.int32)

    def build(self, work: Sized[Work]) -> StepBatch:
        """The step that does ``work``. Logits are wanted of the last row of each sequence whose pending
        tokens are all in it, in the order of ``work``."""
        row = page = n = 0
        for s, (sequence, rows) in enumerate(work):
            table, computed = sequence.table, sequence.computed
            assert table is not None, "only a running sequence has work"
            end = computed + rows
            if rows == 1:
                self._tokens[row] = sequence.tokens[computed]
                self._positions[row] = computed
            else:
                self._tokens[row : row + rows] = sequence.tokens[computed:end]
                self._positions[row : row + rows] = np.arange(computed, end)
            self._cached_rows[s] = computed
            pages = table.pages[: pages_for(end)]
            self._pages = _put(self._pages, page, pages)
            row += rows
            page += len(pages)
            self._row_offsets[s + 1] = row
            self._page_offsets[s + 1] = page
            if rows == sequence.pending:
                self._logit_rows[n] = row - 1
                self._sample(n, work[s])
                n += 1
        s = len(work)
        return StepBatch(
            tokens=self._tokens[:row],
            positions=self._positions[:row],
            row_offsets=self._row_offsets[: s + 1],
            cached_rows=self._cached_rows[:s],
            page_offsets=self._page_offsets[: s + 1],
            pages=self._pages[:page],
            logit_rows=self._logit_rows[:n],
            sampling=SamplingBatch(
                temperature=self._temperature[:n],
                top_k=self._top_k[:n],
                top_p=self._top_p[:n],
                min_p=self._min_p[:n],
                repetition=self._repetition[:n],
                presence=self._presence[:n],
                frequency=self._frequency[:n],
                seed=self._seed[:n],
                position=self._position[:n],
                history_offsets=self._history_offsets[: n + 1],
                history_tokens=self._history_tokens[: self._history_offsets[n]],
                history_counts=self._history_counts[: self._history_offsets[n]],
                bias_offsets=self._bias_offsets[: n + 1],
                bias_tokens=self._bias_tokens[: self._bias_offsets[n]],
                bias_values=self._bias_values[: self._bias_offsets[n]],
                logprobs=self._logprobs[:n],
            ),
        )

    def _sample(self, n: int, work: Work) -> None:
        """Fills entry ``n`` of the sampling arrays."""
        sequence = work.sequence
        params = sequence.params
        self._temperature[n] = params.temperature
        self._top_k[n] = params.top_k
        self._top_p[n] = params.top_p
        self._min_p[n] = params.min_p
        self._repetition[n] = params.repetition_penalty
        self._presence[n] = params.presence_penalty
        self._frequency[n] = params.frequency_penalty
        self._seed[n] = sequence.seed
        self._position[n] = len(sequence.tokens)
        self._logprobs[n] = -1 if params.logprobs is None else params.logprobs
        seen = int(self._history_offsets[n])
        if (history := sequence.history) is not None:
            self._history_tokens = _put(self._history_tokens, seen, history.tokens)
            self._history_counts = _put(self._history_counts, seen, history.counts)
            seen += history.size
        self._history_offsets[n + 1] = seen
        biased = int(self._bias_offsets[n])
        if size := len(sequence.bias_tokens):
            self._bias_tokens = _put(self._bias_tokens, biased, sequence.bias_tokens)
            self._bias_values = _put(self._bias_values, biased, sequence.bias_values)
            biased += size
        self._bias_offsets[n + 1] = biased


def _put(buffer: npt.NDArray[Number], at: int, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Writes ``values`` at ``at`` and returns the buffer, a larger copy if they did not fit."""
    end = at + len(values)
    if end > len(buffer):
        larger = np.zeros(2 * end, buffer.dtype)
        larger[:at] = buffer[:at]
        buffer = larger
    buffer[at:end] = values
    return buffer
