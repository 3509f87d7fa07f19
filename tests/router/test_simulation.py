"""The router in simulation: nothing is lost, whatever happens."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tenfold.bench.mooncake import TraceError, TraceRequest, read_trace
from tenfold.bench.simulate import Simulation
from tenfold.bench.simulate_base import Run, SimulationConfig
from tenfold.bench.simulate_faults import random_faults
from tenfold.cli import main
from tenfold.router.policies import Policy
from tenfold.router.split import TransferTiming
from tenfold.router.timing import mocker_timing

PAGES, PAGE_TOKENS = 128, 512


def conversations(seed: int, count: int, seconds: float) -> list[TraceRequest]:
    """Requests of a few conversations that grow and share a first page."""
    draw = random.Random(seed)
    talks = [[0] for _ in range(8)]
    fresh = iter(range(1, 1_000_000))
    requests = []
    for arrival in sorted(draw.uniform(0, seconds) for _ in range(count)):
        talk = draw.choice(talks)
        talk.extend(next(fresh) for _ in range(draw.randrange(1, 8)))
        requests.append(
            TraceRequest(
                arrival, len(talk) * PAGE_TOKENS + draw.randrange(1, 500), draw.randrange(1, 400), tuple(talk)
            )
        )
        if len(talk) > 40:
            del talk[1:]
    return requests


def trace_lines(count: int, apart_ms: int) -> list[dict[str, Any]]:
    """Of a trace file."""
    return [
        {
            "timestamp": apart_ms * n,
            "input_length": 1500 + n % 30,
            "output_length": 20,
            "hash_ids": [0, n % 3 + 1, n + 10],
        }
        for n in range(count)
    ]


def simulate(
    seed: int,
    faults: int,
    policy: Policy = "cache-aware",
    count: int = 30,
    workers: int = 3,
    prefill: int = 0,
) -> Run:
    trace = conversations(seed, count, 20.0)
    config = SimulationConfig(
        timing=mocker_timing(PAGES * PAGE_TOKENS),
        workers=workers,
        prefill=prefill,
        transfer=TransferTiming(page_s=0.002, start_s=0.02),
        pages=PAGES,
        page_tokens=PAGE_TOKENS,
        policy=policy,
        eviction="segmented" if seed % 2 else "lru",
        seed=seed,
        faults=tuple(random_faults(seed, faults, workers, 20.0)),
    )
    return Simulation(config, trace).run()


@pytest.mark.parametrize("block", range(10))
def test_a_thousand_seeds_of_faults(block: int) -> None:
    """Promise: with workers dying, stalling and slowing down, events lost and late, and the router restarted,
    at any moments: every request ends exactly once and complete, the index equals the workers' true pages
    once it has resynced, the books balance, and nothing waits beyond its deadline (`Simulation` raises
    otherwise)."""
    happened = 0
    for seed in range(100 * block, 100 * block + 100):
        run = simulate(seed, faults=6)
        assert all(outcome.ended == "finished" for outcome in run.outcomes), seed
        happened += run.resumed
    assert happened > 50


@pytest.mark.parametrize("block", range(3))
def test_faults_amid_handovers(block: int) -> None:
    """Promise: the same holds where workers prefill for others, whichever of them die, and when: before,
    within or after a handover."""
    happened, split = 0, 0
    for seed in range(50 * block, 50 * block + 50):
        run = simulate(seed, faults=6, count=60, workers=4, prefill=1 + seed % 3)
        assert all(outcome.ended == "finished" for outcome in run.outcomes), seed
        happened += run.resumed
        split += run.transfers.requests
    assert happened > 25 and split > 100


def test_prefill_apart_from_decode_spares_the_streams() -> None:
    """Promise: with the same workers and trace, gaps between tokens beside long prompts are shorter when
    prompts are computed apart; what was decided is counted, once for each decision."""
    mixed, apart = (simulate(3, 0, count=120, workers=4, prefill=prefill) for prefill in (0, 1))
    assert apart.transfers.requests == apart.choices["split: worth it"] > 0
    assert apart.transfers.ahead == apart.transfers.requests
    assert sum(apart.choices.values()) == 120
    assert late(apart) < late(mixed)


def late(run: Run) -> float:
    """The 99th percentile of the gaps between tokens, seconds."""
    gaps = sorted(gap for gap in run.gaps if gap[1])
    left = 0.01 * sum(rows for _, rows in gaps)
    while left > gaps[-1][1]:
        left -= gaps.pop()[1]
    return gaps[-1][0]


@pytest.mark.parametrize("prefill", [0, 1])
def test_the_same_seed_gives_the_same_run(prefill: int) -> None:
    """Promise: a simulation is a function of trace, configuration and seed."""
    one, other = (simulate(7, faults=8, prefill=prefill) for _ in range(2))
    assert one.outcomes == other.outcomes and one.gaps == other.gaps and one.routed == other.routed


def test_other_processes_give_the_same_figures(tmp_path: Path) -> None:
    """Promise: the same in any process: nothing depends on how Python hashes names. Only what a decision took
    is measured."""
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, trace_lines(60, 300))))
    command = ["simulate", "--trace", str(path), "--workers", "6", "--faults", "30", "--seed", "5", "--json"]
    found = []
    for seed in ("1", "2"):
        told = subprocess.run(
            [sys.executable, "-c", "from tenfold.cli import main; main()", *command],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        )
        found.append(json.loads(told.stdout))
        del found[-1]["decision_us"]
    assert found[0] == found[1]


def test_time_in_which_nothing_happens_costs_nothing(tmp_path: Path) -> None:
    """Promise: a trace may count its milliseconds from anywhere, and years may lie between two requests, with
    faults among them."""
    path = tmp_path / "trace.jsonl"
    lines = trace_lines(20, 1000)
    for number, line in enumerate(lines):
        line["timestamp"] += 1_733_000_000_000 + 10**11 * (number // 5)
    path.write_text("\n".join(map(json.dumps, lines)))
    command = ["simulate", "--trace", str(path), "--workers", "2", "--faults", "10", "--json"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output)
    assert (figures["finished"], figures["trace_s"]) == (20, 3e8 + 19)


@pytest.mark.parametrize(
    ("last", "options", "code", "says"),
    [
        (1e300, [], 1, "lasts 1e+297 s"),
        (1e5, ["--speedup", "1e-300"], 2, "--speedup"),
        (-1, [], 1, "line 20: lengths must be at least 1 and the timestamp at least 0"),
        (1e5, ["--page-tokens", "60"], 2, "--page-tokens"),
    ],
)
def test_what_cannot_be_simulated_is_said(
    tmp_path: Path, last: float, options: list[str], code: int, says: str
) -> None:
    """Promise: a trace that is at fault ends with exit code 1, an option with 2, each with the reason."""
    path = tmp_path / "trace.jsonl"
    lines = trace_lines(20, 1000)
    lines[-1]["timestamp"] = last
    path.write_text("\n".join(map(json.dumps, lines)))
    result = CliRunner().invoke(main, ["simulate", "--trace", str(path), *options])
    assert (result.exit_code, says in result.output) == (code, True), result.output
    assert "Usage:" not in result.output or code == 2


def test_cache_aware_beats_the_others() -> None:
    """Promise: on conversations the default policy finds more and answers sooner than any other."""
    means, found = {}, {}
    policies: tuple[Policy, ...] = ("cache-aware", "round-robin", "least-loaded", "random")
    for policy in policies:
        outcomes = simulate(1, 0, policy, count=60).outcomes
        means[policy] = sum(o.first - o.arrival for o in outcomes if o.first is not None)
        found[policy] = sum(o.cached or 0 for o in outcomes)
    assert min(means, key=means.__getitem__) == max(found, key=found.__getitem__) == "cache-aware"


def test_the_command_prints_what_was_measured(tmp_path: Path) -> None:
    """Promise: `tenfold simulate --json` prints one object with reuse, ideals, latencies and balance, and of
    what trace."""
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, trace_lines(20, 1000))))
    result = CliRunner().invoke(
        main, ["simulate", "--trace", str(path), "--workers", "2", "--faults", "3", "--json"]
    )
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output)
    assert figures["finished"] == 20
    assert figures["trace"] == str(path) and figures["trace_format"].startswith("Mooncake")
    assert (figures["trace_requests"], figures["trace_s"]) == (20, 19)
    assert 0 < figures["reuse"] <= figures["reuse_ideal_infinite"] < 1
    assert figures["ttft_ms"]["mean"] > 0 and figures["itl_ms"]["p99"] > 0
    command = ["simulate", "--trace", str(path), "--prefill", "1", "--json"]
    result = CliRunner().invoke(main, [*command, "--decode", "2"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output)
    assert (figures["workers"], figures["prefill"], figures["decode"]) == (3, 1, 2)
    assert sum(figures["choices"].values()) == figures["finished"] == 20
    assert CliRunner().invoke(main, command).exit_code == 2
    assert CliRunner().invoke(main, [*command, "--decode", "1", "--workers", "2"]).exit_code == 2


def test_a_bad_trace_names_its_line(tmp_path: Path) -> None:
    """Promise: what is no trace is refused with the line and the reason."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}\n')
    with pytest.raises(TraceError, match="line 1: 513 tokens need 2 hash ids"):
        read_trace(path, 64)
    path.write_text("\n{}\n")
    with pytest.raises(TraceError, match="line 2"):
        read_trace(path, 64)
    with pytest.raises(TraceError, match="must divide 512"):
        read_trace(path, 60)
