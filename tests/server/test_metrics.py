"""Counts of the front over the lives of its workers."""

from __future__ import annotations

from msgspec.structs import replace

from tenfold.protocol import ConstraintCounts, LoadSnapshot, SpeculationCounts, TierCounts
from tenfold.server.metrics import Metrics
from tenfold.server.server_metrics import ServerMetrics


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


def test_the_disk_tier_is_counted_over_all_workers() -> None:
    """Pages and bytes add up over workers, those of now and those before. The folder is shared, so what is on
    disk is what the one knows of that knows of most."""
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
    metrics.loads["w0"] = replace(load(), tier=tier)
    metrics.worker_gone("w0")
    metrics.loads["w0"] = replace(load(), tier=replace(tier, pages=9))
    metrics.loads["w1"] = replace(load(), tier=tier)
    metrics.loads["w2"] = load()
    page = metrics.page().decode()
    for line in (
        "stored_bytes_total 1500.0",
        "restored_pages_total 9.0",
        "dropped_pages_total 3.0",
        'restores_total{result="restored"} 6.0',
        'errors_total{call="write"} 12.0',
        "corrupt_total 3.0",
        "pages 9.0",
    ):
        assert f"tenfold_kv_disk_{line}\n" in page


def test_constraints_are_counted_over_all_workers() -> None:
    """Those of workers that are gone stay, those of present ones add up; milliseconds become seconds."""
    counts = ConstraintCounts(compiled=2, compile_ms=500.0, masks=10, mask_ms=1.0, failures=1)
    metrics = Metrics()
    metrics.loads["w0"] = replace(load(), constraints=counts)
    metrics.worker_gone("w0")
    metrics.loads["w0"] = replace(load(), constraints=counts)
    metrics.loads["w1"] = replace(load(), constraints=counts)
    page = metrics.page().decode()
    for line in ("compiled_total 6.0", "compile_seconds_total 1.5", "masks_total 30.0", "failures_total 3.0"):
        assert f"tenfold_constraint_{line}\n" in page


def test_the_page_of_a_server_tells_models_apart() -> None:
    """Each family once, with a series for each model; a refusal of no model has no label."""
    first, second = Metrics(), Metrics()
    first.finished["stop"], second.finished["stop"] = 2, 3
    second.loads["b/w0"] = load(promoted=1)
    second.rejected["400"] = 5
    server = ServerMetrics(lambda: [("a", first), ("b", second)])
    server.rejected["404"] = 1
    page = server.page().decode()
    assert page.count("# HELP tenfold_requests_total ") == 1
    assert 'tenfold_requests_total{finish="stop",model="a"} 2.0' in page
    assert 'tenfold_requests_total{finish="stop",model="b"} 3.0' in page
    assert 'tenfold_requests_rejected_total{model="b",status="400"} 5.0' in page
    assert 'tenfold_requests_rejected_total{status="404"} 1.0' in page
    assert 'tenfold_time_to_first_token_seconds_bucket{le="+Inf",model="a"} 0.0' in page
    assert ServerMetrics(list).page() == (
        b"# HELP tenfold_requests_rejected_total Requests that never began\n"
        b"# TYPE tenfold_requests_rejected_total counter\n"
    )
