"""Step batches for tests: sequences with their own page tables, greedy sampling."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from tenfold.backends.base import StepBatch
from tenfold.backends.steps import greedy as greedy


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one sequence does in a step. ``wanted`` are rows of this part; None means all of them."""

    tokens: Sequence[int]
    pages: Sequence[int]
    cached: int = 0
    wanted: Sequence[int] | None = None


def step_batch(*parts: Part) -> StepBatch:
    """One step with these sequences; positions are cache rows."""
    sizes = [len(part.tokens) for part in parts]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    wanted = [
        int(first) + row
        for first, part in zip(offsets, parts, strict=False)
        for row in (range(len(part.tokens)) if part.wanted is None else part.wanted)
    ]
    positions = [np.arange(part.cached, part.cached + size) for part, size in zip(parts, sizes, strict=True)]
    return StepBatch(
        tokens=np.array([token for part in parts for token in part.tokens], np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        row_offsets=offsets.astype(np.int32),
        cached_rows=np.array([part.cached for part in parts], np.int32),
        page_offsets=np.concatenate([[0], np.cumsum([len(part.pages) for part in parts])]).astype(np.int32),
        pages=np.array([page for part in parts for page in part.pages], np.int32),
        logit_rows=np.array(wanted, np.int32),
        sampling=greedy(len(wanted)),
        want_logits=True,
    )
