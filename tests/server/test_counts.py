"""Counts of a worker that comes back."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tenfold.protocol import ConstraintCounts, LoadSnapshot, SpeculationCounts, TierCounts
from tenfold.server.counts import counts_since
from tenfold.server.metrics import Metrics

counts = st.integers(0, 1000)
times = counts.map(float)
reasons = st.dictionaries(st.sampled_from(["load", "limit", "failed"]), counts)
snapshots = st.builds(
    LoadSnapshot,
    speculation=st.builds(
        SpeculationCounts,
        steps=counts,
        committed_tokens=counts,
        drafted_tokens=counts,
        accepted_tokens=counts,
        faults=counts,
        idle=reasons,
        head_swaps=reasons,
    ),
    constraints=st.builds(
        ConstraintCounts, compiled=counts, masks=counts, failures=counts, compile_ms=times, mask_ms=times
    ),
    tier=st.builds(
        TierCounts,
        pages=counts,
        page_bytes=st.just(8),
        size_bytes=st.just(80),
        stored_pages=counts,
        dropped_pages=counts,
        restored_pages=counts,
        corrupt=counts,
        restores=reasons,
        errors=reasons,
    ),
    transfer=st.none(),
    **dict.fromkeys(("running", "waiting", "pages_total", "pages_free", "steps", "kv_sequence"), counts),
    **dict.fromkeys(("prompt_tokens", "cached_tokens", "generated_tokens", "preemptions"), counts),
)


def grown(base: Any, more: Any) -> Any:
    """A later snapshot, as JSON, of an engine that has done ``more`` since ``base``; gauges are added too."""
    if isinstance(base, dict):
        keys = [*base, *(key for key in more if key not in base)]
        return {key: 8 if key == "page_bytes" else grown(base.get(key, 0), more.get(key, 0)) for key in keys}
    return base if base is None else base + more


@given(snapshots, snapshots)
def test_metrics_count_only_what_was_done_here(base: LoadSnapshot, more: LoadSnapshot) -> None:
    """Promise: whatever an engine had counted when it came, the metrics grow by what it does here alone; what
    it has now (pages, requests, steps) is shown as it is."""
    now = msgspec.convert(grown(msgspec.to_builtins(base), msgspec.to_builtins(more)), LoadSnapshot)
    shown = counts_since(base, now)
    for field in ("running", "waiting", "pages_total", "pages_free", "steps", "kv_sequence"):
        assert getattr(shown, field) == getattr(now, field)
    pages = []
    for load in (shown, more):
        metrics = Metrics()
        metrics.loads["far"] = load
        metrics.worker_gone("far")
        pages.append(
            {line for line in metrics.page().decode().splitlines() if not line.endswith((" 0.0", "_created"))}
        )
    assert pages[0] == pages[1]
