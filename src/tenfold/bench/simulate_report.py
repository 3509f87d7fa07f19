"""What a simulation is summed up to, and the ideals it is held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tenfold.bench.mooncake import TraceRequest
from tenfold.bench.simulate_base import Run, SimulationConfig
from tenfold.bench.simulate_cache import SimulatedCache


def shared_reuse(trace: Sequence[TraceRequest], pages: int | None, page_tokens: int) -> float:
    """Share of prompt tokens found when one cache of ``pages`` pages (None: without bound) serves all
    requests one after the other, the least recently used pages going first."""
    total = sum(request.prompt_tokens for request in trace)
    needed = sum(-(-request.prompt_tokens // page_tokens) for request in trace)
    cache = SimulatedCache(needed if pages is None else pages, "lru")
    found = 0
    for request in trace:
        names = request.names[: (request.prompt_tokens - 1) // page_tokens]
        hits = names[: cache.match(names)]
        found += len(hits) * page_tokens
        cache.share(hits)
        missing = len(request.names) - len(hits)
        if missing > cache.available:
            cache.release(hits, 0)
            continue
        cache.take(missing)
        cache.publish(request.names[len(hits) :])
        cache.release(request.names, 0)
        cache.events()
    return found / total


def report(config: SimulationConfig, trace: Sequence[TraceRequest], run: Run) -> dict[str, Any]:
    """All figures of a run, ready for JSON. Milliseconds, but for what says otherwise."""
    outcomes = run.outcomes
    answered = [outcome for outcome in outcomes if outcome.first is not None]
    ttft = np.array([1e3 * (o.first - o.arrival) for o in answered if o.first is not None])
    tpot = np.array(
        [1e3 * (o.last - o.first) / (o.tokens - 1) for o in answered if o.first is not None and o.tokens > 1]
    )
    prompt = sum(request.prompt_tokens for request in trace)
    cached = sum(outcome.cached or 0 for outcome in outcomes)
    reuse = cached / prompt
    same_size = shared_reuse(trace, config.workers * config.pages, config.page_tokens)
    infinite = shared_reuse(trace, None, config.page_tokens)
    names = [config.name(number) for number in range(config.workers)]
    busy = np.array([run.busy.get(name, 0.0) for name in names])
    routed = np.array([run.routed.get(name, 0) for name in names])
    counts = run.router.counts
    figures: dict[str, Any] = {
        "policy": config.policy,
        "eviction": config.eviction,
        "workers": config.workers,
        "pages": config.pages,
        "page_tokens": config.page_tokens,
        "seed": config.seed,
        "requests": len(outcomes),
        "finished": sum(outcome.ended == "finished" for outcome in outcomes),
        "past_deadline": sum(outcome.ended == "deadline" for outcome in outcomes),
        "resumed": run.resumed,
        "preempted": run.preemptions,
        "simulated_s": round(run.seconds, 3),
        "reuse": round(reuse, 4),
        "reuse_ideal_same_size": round(same_size, 4),
        "reuse_ideal_infinite": round(infinite, 4),
        "reuse_of_ideal": round(reuse / same_size, 4) if same_size else None,
        "ttft_ms": _spread(ttft),
        "tpot_ms": _spread(tpot),
        "itl_ms": _weighted(run.gaps),
        "busy_mean_over_max": round(float(busy.mean() / busy.max()), 4) if busy.max() > 0 else None,
        "routed_min_max": [int(routed.min()), int(routed.max())],
        "decision_us": _spread(1e6 * np.array(run.decision_s)),
        "spilled": counts.spilled,
        "gaps": counts.gaps,
        "resyncs": counts.resyncs,
        "asked": run.said,
    }
    if config.prefill:
        moved = run.transfers
        figures |= {
            "prefill": config.prefill,
            "decode": config.workers - config.prefill,
            "choices": dict(sorted(run.choices.items())),
            "transfers": moved.requests,
            "transferred_pages": moved.pages,
            "transfers_read_along": moved.ahead,
            "handover_ms": round(1e3 * moved.seconds / moved.requests, 3) if moved.requests else None,
        }
    return figures


def text(figures: dict[str, Any]) -> str:
    """The figures for people."""
    lines = []
    for name, value in figures.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {number}" for key, number in value.items()) or "none"
        lines.append(f"{name:24s} {value}")
    return "\n".join(lines)


def _spread(values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    if not len(values):
        return {}
    found = {"mean": float(values.mean())}
    found |= {f"p{part}": float(np.percentile(values, part)) for part in (50, 90, 99)}
    return {name: round(value, 3) for name, value in found.items()}


def _weighted(gaps: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Mean and percentiles of (seconds, how often), in ms."""
    table = np.array([gap for gap in gaps if gap[1]], np.float64).reshape(-1, 2)
    if not len(table):
        return {}
    table = table[np.argsort(table[:, 0])]
    below = np.cumsum(table[:, 1])
    found = {"mean": float((table[:, 0] * table[:, 1]).sum() / below[-1])}
    for part in (50, 90, 99):
        found[f"p{part}"] = float(table[np.searchsorted(below, part / 100 * below[-1]), 0])
    return {name: round(1e3 * value, 3) for name, value in found.items()}
