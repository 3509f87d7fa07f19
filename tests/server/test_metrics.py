"""Counts of the front over the lives of its workers."""

from __future__ import annotations

from msgspec.structs import replace

from tenfold.protocol import LoadSnapshot, SpeculationCounts, TierCounts
from tenfold.server.metrics import Metrics


def load(**swaps: int) -> LoadSnapshot:
    counts = SpeculationCounts(
        steps=1,
        committed_tokens=1,
        drafted_tokens=0,
        accepted_tokens=0,
        idle={},
        faults=0,
        head_swaps={name.replace("_", " "): count for name, count in swaps.items()},
    )
    return LoadSnapshot(
        running=0,
        waiting=0,
        pages_total=1,
        pages_free=1,
        steps=1,
        prompt_tokens=0,
        cached_tokens=0,
        generated_tokens=0,
        preemptions=0,
        speculation=counts,
    )


def test_heads_trained_while_serving_are_counted_over_all_workers() -> None:
    """A worker's counts end with it, the page's go on."""
    metrics = Metrics()
    metrics.load = load(promoted=2, rolled_back=1)
    metrics.worker_gone()
    metrics.load = load(promoted=1, refused=1)
    page = metrics.page().decode()
    name = "tenfold_speculation_head_swaps_total"
    assert f'{name}{{result="promoted"}} 3.0' in page
    assert f'{name}{{result="rolled back"}} 1.0' in page
    assert f'{name}{{result="refused"}} 1.0' in page


def test_the_disk_tier_is_counted_over_all_workers() -> None:
    """Pages and bytes add up over workers; what is on disk is the present worker's word."""
    tier = TierCounts(
        pages=7,
        page_bytes=100,
        size_bytes=10**6,
        stored_pages=5,
        dropped_pages=1,
        restored_pages=3,
        restores={"restored": 2},
        corrupt=1,
        errors={"write": 4},
    )
    metrics = Metrics()
    metrics.load = replace(load(), tier=tier)
    metrics.worker_gone()
    metrics.load = replace(load(), tier=replace(tier, pages=9))
    page = metrics.page().decode()
    for line in (
        "stored_bytes_total 1000.0",
        "restored_pages_total 6.0",
        "dropped_pages_total 2.0",
        'restores_total{result="restored"} 4.0',
        'errors_total{call="write"} 8.0',
        "corrupt_total 2.0",
        "pages 9.0",
    ):
        assert f"tenfold_kv_disk_{line}\n" in page
