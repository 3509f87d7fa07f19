"""Counts of the front over the lives of its workers."""

from __future__ import annotations

from tenfold.protocol import LoadSnapshot, SpeculationCounts
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
    metrics.loads["w0"] = load(promoted=2, rolled_back=1)
    metrics.worker_gone("w0")
    metrics.loads["w0"] = load(promoted=1)
    metrics.loads["w1"] = load(refused=1)
    page = metrics.page().decode()
    name = "tenfold_speculation_head_swaps_total"
    assert f'{name}{{result="promoted"}} 3.0' in page
    assert f'{name}{{result="rolled back"}} 1.0' in page
    assert f'{name}{{result="refused"}} 1.0' in page
