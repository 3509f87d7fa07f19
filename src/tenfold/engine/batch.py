"""Builds a StepBatch from the work of a step, in arrays that are made once and used again."""

from __future__ import annotations

from collections.abc import Sequence as Sized
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tenfold.backends.base import SamplingBatch, StepBatch
from tenfold.engine.masks import Masks
from tenfold.engine.scheduler import Work
from tenfold.engine.sequence import Sequence
from tenfold.kv.cache import pages_for

Number = TypeVar("Number", bound=np.generic)


class BatchBuilder:
    """Arrays for steps of at most ``max_rows`` rows of ``max_running`` sequences, with logits of at most
    ``max_logit_rows``.

    A batch is made of views of them, so it is valid until the next one is built.
    """

    def __init__(self, max_rows: int, max_logit_rows: int, max_running: int) -> None:
        n = max_running
        self._tokens = np.zeros(max_rows, np.int32)
        self._positions = np.zeros(max_rows, np.int32)
        self._row_offsets = np.zeros(n + 1, np.int32)
        self._cached_rows = np.zeros(n, np.int32)
        self._page_offsets = np.zeros(n + 1, np.int32)
        self._pages = np.zeros(1024, np.int32)
        n = max_logit_rows
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
        self._mask_rows = np.zeros(n, np.int32)
        self._state_rows = np.zeros(max_rows, np.int32)

    def build(self, work: Sized[Work], masks: Masks, want_features: bool = False) -> StepBatch:
        """The step that does ``work``, for which ``masks`` were filled. Of each sequence whose pending
        tokens are all in it, in the order of ``work``, logits are wanted of the row of the last one and of
        the rows of its draft; of those with a pool, the states of the rows that it wants."""
        row = page = n = stated = 0
        for s, (sequence, rows, draft) in enumerate(work):
            table, computed = sequence.table, sequence.computed
            assert table is not None, "only a running sequence has work"
            draws = 1 + len(draft) if rows == sequence.pending and sequence.pool is None else 0
            end = computed + rows
            if sequence.pool is not None:
                wanted_states = sequence.pool.wanted(computed, end)
                more, after = len(wanted_states), row + rows
                self._state_rows[stated : stated + more] = np.arange(after - more, after)
                stated += more
            if rows == 1:
                self._tokens[row] = sequence.tokens[computed]
                self._positions[row] = computed
            else:
                self._tokens[row : row + rows] = sequence.tokens[computed:end]
                self._positions[row : row + rows] = np.arange(computed, end)
            row += rows
            if draft:
                self._tokens[row : row + len(draft)] = draft
                self._positions[row : row + len(draft)] = np.arange(end, end + len(draft))
                row += len(draft)
            self._cached_rows[s] = computed
            pages = table.pages[: pages_for(end + len(draft))]
            self._pages = _put(self._pages, page, pages)
            page += len(pages)
            self._row_offsets[s + 1] = row
            self._page_offsets[s + 1] = page
            if draws:
                if draft:
                    wanted: int | slice = slice(n, n + draws)
                    self._logit_rows[wanted] = np.arange(row - draws, row)
                    self._position[wanted] = np.arange(end, end + draws)
                else:  # most often; an index costs less than a slice
                    wanted = n
                    self._logit_rows[n] = row - 1
                    self._position[n] = end
                self._sample(wanted, sequence)
                self._history(n, sequence, draft)
                self._bias(n, sequence, draws)
                first = masks.first(sequence)
                if first is None:
                    self._mask_rows[wanted] = -1
                else:
                    self._mask_rows[n : n + draws] = np.arange(first, first + draws)
            n += draws
        s = len(work)
        return StepBatch(
            tokens=self._tokens[:row],
            positions=self._positions[:row],
            row_offsets=self._row_offsets[: s + 1],
            cached_rows=self._cached_rows[:s],
            page_offsets=self._page_offsets[: s + 1],
            pages=self._pages[:page],
            logit_rows=self._logit_rows[:n],
            want_features=want_features,
            state_rows=self._state_rows[:stated] if stated else None,
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
                mask_rows=self._mask_rows[:n],
                masks=masks.masks,
            ),
        )

    def _sample(self, rows: int | slice, sequence: Sequence) -> None:
        """Fills the entries of one wanted row, or of several of a sequence: what is the same for all."""
        params = sequence.params
        self._temperature[rows] = params.temperature
        self._top_k[rows] = params.top_k
        self._top_p[rows] = params.top_p
        self._min_p[rows] = params.min_p
        self._repetition[rows] = params.repetition_penalty
        self._presence[rows] = params.presence_penalty
        self._frequency[rows] = params.frequency_penalty
        self._seed[rows] = sequence.seed
        self._logprobs[rows] = -1 if params.logprobs is None else params.logprobs

    def _history(self, n: int, sequence: Sequence, draft: Sized[int]) -> None:
        """What the rows from ``n`` on have seen: the first the sequence's tokens, each further one also the
        drafted tokens up to its own."""
        at = int(self._history_offsets[n])
        history = sequence.history
        if history is None:
            for i in range(n + 1, n + 2 + len(draft)):
                self._history_offsets[i] = at
            return
        self._history_tokens = _put(self._history_tokens, at, history.tokens)
        self._history_counts = _put(self._history_counts, at, history.counts)
        size = history.size
        self._history_offsets[n + 1] = at + size
        slots: dict[int, int] = {}
        for i, token in enumerate(draft, n + 2):
            seen = slice(at, at + size)
            at += size
            self._history_tokens = _put(self._history_tokens, at, self._history_tokens[seen])
            self._history_counts = _put(self._history_counts, at, self._history_counts[seen])
            slot = history.slot(token)
            if slot is None:
                slot = slots.setdefault(token, size)
            if slot == size:
                self._history_tokens = _put(self._history_tokens, at + slot, np.array([token], np.int32))
                self._history_counts = _put(self._history_counts, at + slot, np.zeros(1, np.int32))
                size += 1
            self._history_counts[at + slot] += 1
            self._history_offsets[i] = at + size

    def _bias(self, n: int, sequence: Sequence, rows: int) -> None:
        """The sequence's biases, for ``rows`` rows from ``n`` on."""
        at, size = int(self._bias_offsets[n]), len(sequence.bias_tokens)
        for i in range(n + 1, n + 1 + rows):
            if size:
                self._bias_tokens = _put(self._bias_tokens, at, sequence.bias_tokens)
                self._bias_values = _put(self._bias_values, at, sequence.bias_values)
                at += size
            self._bias_offsets[i] = at


def _put(buffer: npt.NDArray[Number], at: int, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Writes ``values`` at ``at`` and returns the buffer, a larger copy if they did not fit."""
    end = at + len(values)
    if end > len(buffer):
        larger = np.zeros(2 * end, buffer.dtype)
        larger[:at] = buffer[:at]
        buffer = larger
    buffer[at:end] = values
    return buffer
