"""A stand-in for a compiled model, for tests of whatever schedules steps and pages.

It has no weights, but it has memory: every KV row holds a number made of its token, its position and all rows
before it *as read through the page table of the step*. The logits of a row are made of that number, and the
token is drawn from them by the reference sampler. So a wrong page, a stale row, a wrong copy, a wrong
position, or wrong sampling parameters change the text.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tenfold.backends.base import PAGE_ROWS, ProgramInfo, StepBatch, StepOutput
from tenfold.backends.sampling import sample

UInt64s = npt.NDArray[np.uint64]


def mix(values: UInt64s) -> UInt64s:
    """Scrambles 64-bit numbers (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def numbers(count: int, salt: int) -> UInt64s:
    """``count`` fixed odd numbers."""
    return mix(np.arange(count, dtype=np.uint64) + np.uint64(salt << 32)) | np.uint64(1)


STATE_WIDTH = 8
"""Of the final hidden states."""


def states_of(rows: UInt64s) -> npt.NDArray[np.float32]:
    """[M] numbers of rows as states, [M, STATE_WIDTH]: both signs, of very different sizes."""
    bits = mix(rows[:, None] ^ numbers(STATE_WIDTH, 4)[None, :])
    return np.ldexp(
        (bits >> np.uint64(40)).astype(np.float32) - 2**23, (bits % np.uint64(40)).astype(np.int32) - 40
    )


class FakeProgram:
    """See the head of this file. Checks every batch against the promises of
    `tenfold.backends.base.StepBatch`."""

    def __init__(
        self,
        *,
        kv_pages: int = 64,
        vocab_size: int = 40,
        max_context: int = 512,
        max_rows: int = 512,
        max_logit_rows: int = 64,
    ) -> None:
        self.info = ProgramInfo(
            backend="fake",
            threads=1,
            isa="none",
            isa_why="a fake",
            threads_why="a fake",
            max_rows=max_rows,
            max_logit_rows=max_logit_rows,
            vocab_size=vocab_size,
            max_context=max_context,
            kv_pages=kv_pages,
            kv_format="bf16",
            page_bytes=PAGE_ROWS * 8,
            weight_bytes=0,
            weights=(),
            state_width=STATE_WIDTH,
        )
        self.failures: list[Exception] = []
        """Raised by the next steps, one each, before anything is written."""
        self.copy_failures: list[Exception] = []
        self.batches = 0
        self.rows_computed = 0
        self._weights = numbers(max_context + 1, 1)
        self._vocab = numbers(vocab_size, 2)
        # Garbage, not zeros: nobody may rely on what a page held before.
        self._rows = numbers(kv_pages * PAGE_ROWS, 3).reshape(kv_pages, PAGE_ROWS)

    def step(self, batch: StepBatch) -> StepOutput:
        """Runs one step."""
        if self.failures:
            raise self.failures.pop(0)
        self._check(batch)
        sums = np.zeros(len(batch.tokens), np.uint64)
        for s, cached in enumerate(batch.cached_rows.tolist()):
            first, last = batch.row_offsets[s], batch.row_offsets[s + 1]
            pages = batch.pages[batch.page_offsets[s] : batch.page_offsets[s + 1]]
            before = self._rows[pages].reshape(-1)[:cached]
            # Arrays of one: they wrap around without a warning.
            total = (before * self._weights[:cached]).sum(dtype=np.uint64, keepdims=True)
            for i in range(first, last):
                row = cached + i - first
                identity = np.array([int(batch.tokens[i]) << 32 | int(batch.positions[i])], np.uint64)
                value = mix(mix(identity) ^ total)
                self._rows[pages[row // PAGE_ROWS], row % PAGE_ROWS] = value[0]
                total = total + value * self._weights[row : row + 1]
                sums[i] = total[0]
        wanted = sums[batch.logit_rows]
        noise = mix(wanted[:, None] ^ self._vocab[None, :])
        logits = (noise >> np.uint64(40)).astype(np.float32) * np.float32(6 / 2**24)
        draws = sample(logits, batch.sampling)
        self.batches += 1
        self.rows_computed += len(batch.tokens)
        return StepOutput(
            tokens=draws.tokens,
            logprobs=draws.logprobs,
            top_tokens=draws.top_tokens,
            top_logprobs=draws.top_logprobs,
            logits=logits if batch.want_logits else None,
            states=None if batch.state_rows is None else states_of(sums[batch.state_rows]),
        )

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copies the first ``rows`` lines of a page."""
        if self.copy_failures:
            raise self.copy_failures.pop(0)
        assert source != target
        assert 0 < rows <= PAGE_ROWS
        self._rows[target, :rows] = self._rows[source, :rows]

    def read_page(self, page: int) -> bytes:
        """The page's bytes."""
        return bytes(self._rows[page].tobytes())

    def write_page(self, page: int, data: bytes) -> None:
        """Overwrites a page."""
        self._rows[page] = np.frombuffer(data, np.uint64)

    def view_page(self, page: int) -> memoryview:
        """The page's own bytes."""
        view: memoryview = self._rows[page].data.cast("B")
        return view

    def close(self) -> None:
        """Nothing to free."""

    def _check(self, batch: StepBatch) -> None:
        rows, sequences, wanted = len(batch.tokens), len(batch.cached_rows), len(batch.logit_rows)
        assert 0 < rows <= self.info.max_rows
        assert wanted <= self.info.max_logit_rows
        for name in (
            "tokens",
            "positions",
            "row_offsets",
            "cached_rows",
            "page_offsets",
            "pages",
            "logit_rows",
        ):
            array = getattr(batch, name)
            assert array.dtype == np.int32, name
            assert array.flags.c_contiguous, name
        assert len(batch.positions) == rows
        assert len(batch.row_offsets) == len(batch.page_offsets) == sequences + 1
        assert batch.row_offsets[0] == batch.page_offsets[0] == 0
        assert batch.row_offsets[-1] == rows
        assert batch.page_offsets[-1] == len(batch.pages)
        assert (np.diff(batch.row_offsets) > 0).all()
        assert (np.diff(batch.logit_rows) > 0).all()
        assert not wanted or 0 <= batch.logit_rows[0] <= batch.logit_rows[-1] < rows
        if batch.state_rows is not None:
            assert batch.state_rows.dtype == np.int32
            assert (np.diff(batch.state_rows) > 0).all()
            assert 0 <= batch.state_rows[0] <= batch.state_rows[-1] < rows
        assert ((batch.pages >= 0) & (batch.pages < self.info.kv_pages)).all()
        assert ((batch.tokens >= 0) & (batch.tokens < self.info.vocab_size)).all()
        written: list[int] = []
        for s, cached in enumerate(batch.cached_rows.tolist()):
            end = cached + int(batch.row_offsets[s + 1] - batch.row_offsets[s])
            pages = batch.pages[batch.page_offsets[s] : batch.page_offsets[s + 1]].tolist()
            assert len(pages) * PAGE_ROWS >= end, "the page table is too short"
            assert len(set(pages)) == len(pages), "a page stands twice in a table"
            written += pages[cached // PAGE_ROWS : (end - 1) // PAGE_ROWS + 1]
        for page in written:
            assert batch.pages.tolist().count(page) == 1, "a page that is written is shared"
        sampling = batch.sampling
        for name in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency"):
            assert getattr(sampling, name).dtype == np.float32, name
        for name in sampling.__struct_fields__:
            array = getattr(sampling, name)
            if array is None:
                assert sampling.masks is None
                assert sampling.mask_rows is None
                continue
            assert array.flags.c_contiguous, name
            if name.endswith("_offsets"):
                assert len(array) == wanted + 1, name
                assert array[0] == 0, name
            elif name == "masks":
                assert array.dtype == np.uint32
                assert array.shape[1] == (self.info.vocab_size + 31) // 32
                assert sampling.mask_rows is not None
                assert array.shape[0] > sampling.mask_rows.max(initial=-1) >= -1
            elif not name.startswith(("history_", "bias_")):
                assert len(array) == wanted, name
        assert len(sampling.history_tokens) == len(sampling.history_counts) == sampling.history_offsets[-1]
        assert len(sampling.bias_tokens) == len(sampling.bias_values) == sampling.bias_offsets[-1]
