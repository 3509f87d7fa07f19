"""The command `simulate`: many workers behind the router, in simulated time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import click

from tenfold.bench.simulate_cache import Eviction
from tenfold.cli.options import MAX_SEED, Number, say
from tenfold.router.policies import POLICIES, Policy

TRANSFER_TOKEN_S = 128 * 1024 / 10e9
"""Of a model with 128 KiB of KV a token (8 billion parameters or so), at 10 GB/s."""
TRANSFER_START_S = 0.02
MAX_WORKERS = 1000
"""What the simulation was measured with (docs/routing.md)."""


@click.command(short_help="Replay a trace on many workers, in simulated time.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    help="A trace in Mooncake's format: a JSON object a line.",
)
@click.option("--workers", type=click.IntRange(1, MAX_WORKERS), help="Equal workers. Default: 8.")
@click.option(
    "--prefill",
    type=click.IntRange(0, MAX_WORKERS - 1),
    default=0,
    help="With --decode, instead of --workers: so many compute long prompts for the others. 0: all do both.",
)
@click.option(
    "--decode", type=click.IntRange(0, MAX_WORKERS - 1), default=0, help="With --prefill: the others."
)
@click.option("--policy", type=click.Choice(POLICIES), default="cache-aware", help="How requests are routed.")
@click.option("--pages", type=click.IntRange(1), default=16_384, help="KV pages of each worker.")
@click.option("--page-tokens", type=click.IntRange(1), default=64, help="Tokens of a page; must divide 512.")
@click.option(
    "--eviction",
    type=click.Choice(get_args(Eviction)),
    default="lru",
    help="Which pages workers give up: the least recently used, or first those that nobody came back for.",
)
@click.option("--speedup", type=Number(0, min_open=True), default=1.0, help="Of the trace's arrivals.")
@click.option("--requests", type=click.IntRange(1), help="Only the first so many of the trace.")
@click.option(
    "--seed",
    type=click.IntRange(0, MAX_SEED),
    default=0,
    help="Of all that is random; the same seed gives the same run, and the same figures but for decision_us, "
    "which is measured.",
)
@click.option("--faults", type=click.IntRange(0), default=0, help="Random faults over the trace's time.")
@click.option("--event-lag", type=Number(0), default=0.0, help="Seconds that news of pages are late.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
def simulate(
    trace: Path,
    workers: int | None,
    prefill: int,
    decode: int,
    policy: Policy,
    pages: int,
    page_tokens: int,
    eviction: Eviction,
    speedup: float,
    requests: int | None,
    seed: int,
    faults: int,
    event_lag: float,
    as_json: bool,
) -> None:
    """Replay a trace on many workers behind the router, in simulated time.

    The router is the one that serves; the workers are timed by the cost curves of Dynamo's mocker. Prints
    what was found in the caches, against one shared cache of the same size and against one without bound, and
    latencies, balance and the cost of a decision.

    \b
    Examples:
      tenfold simulate --trace conversation_trace.jsonl --workers 8
      tenfold simulate --trace conversation_trace.jsonl --workers 64 --policy least-loaded --json
      tenfold simulate --trace conversation_trace.jsonl --prefill 4 --decode 4
      tenfold simulate --trace conversation_trace.jsonl --requests 500 --faults 20 --seed 7
    """
    from msgspec.structs import replace

    from tenfold.bench.mooncake import TRACE_BLOCK, TraceError, check_length, read_trace
    from tenfold.bench.simulate import Simulation
    from tenfold.bench.simulate_base import SimulationConfig
    from tenfold.bench.simulate_faults import random_faults
    from tenfold.bench.simulate_report import report, text
    from tenfold.router.split import TransferTiming
    from tenfold.router.timing import mocker_timing

    if bool(prefill) != bool(decode):
        raise click.UsageError("give --prefill and --decode, 1 or more of each, or neither")
    if prefill and workers is not None:
        raise click.UsageError("--workers is given beside --prefill and --decode; leave it out")
    count = prefill + decode if prefill else workers or 8
    if count > MAX_WORKERS:
        raise click.UsageError(f"--prefill and --decode make {count} workers; {MAX_WORKERS} can be simulated")
    if TRACE_BLOCK % page_tokens:
        raise click.BadParameter(
            f"{page_tokens} does not divide {TRACE_BLOCK}, the tokens of a trace's block",
            param_hint="--page-tokens",
        )
    read = read_trace(trace, page_tokens, requests)
    longest = max(request.prompt_tokens + request.output_tokens for request in read)
    if longest > pages * page_tokens:
        raise click.BadParameter(
            f"{pages} pages of {page_tokens} tokens cannot hold the longest request, {longest} tokens",
            param_hint="--pages",
        )
    try:
        check_length(read[-1].arrival / speedup, f"the trace at this speed ({speedup:g})")
    except TraceError as error:
        raise click.BadParameter(str(error), param_hint="--speedup") from None
    read = [replace(request, arrival=request.arrival / speedup) for request in read]
    config = SimulationConfig(
        timing=mocker_timing(pages * page_tokens),
        workers=count,
        prefill=prefill,
        transfer=TransferTiming(page_s=page_tokens * TRANSFER_TOKEN_S, start_s=TRANSFER_START_S),
        pages=pages,
        page_tokens=page_tokens,
        policy=policy,
        eviction=eviction,
        seed=seed,
        event_lag_s=event_lag,
        faults=tuple(random_faults(seed, faults, count, read[-1].arrival)),
    )
    figures = {
        "trace": str(trace),
        "trace_format": f"Mooncake: arrivals, lengths, names of {TRACE_BLOCK}-token blocks; no text",
        "trace_requests": len(read),
        "trace_s": round(read[-1].arrival, 3),
        "trace_speedup": speedup,
        "workers_timed_by": "the cost curves of Dynamo's mocker",
        **report(config, read, Simulation(config, read).run()),
    }
    say(json.dumps(figures) if as_json else text(figures))
