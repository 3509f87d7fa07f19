"""Agent conversations against a real server with several workers: cache-aware routing beside round-robin.

    python benchmarks/fleet_routing.py --data TAU_BENCH_FOLDER
    python benchmarks/fleet_routing.py --data TAU_BENCH_FOLDER --against least-loaded --rounds 3

Two servers of the same model, workers and memory, which differ in --routing alone, take turns: in a round
the same conversations of tau-bench (benchmarks/agent_traffic.py makes the requests) are held with the one,
then with the other; who begins alternates. Conversations of a round run at once, each waiting for its answer,
and then as long as a user or a tool may take (--pause) before its next turn. Those of different rounds
differ; all share the system prompt, which some first turns of further conversations bring to both servers
before anything is counted.

The setting, unless told otherwise: two workers of one thread and 11,000 tokens of KV memory each; three
rounds of 4 conversations at once, of up to 20 turns and 22,000 characters, without a pause.

KV memory and the number of turns decide how much routing matters. 11,000 tokens are no room for all
conversations of a round: a router that keeps each where it began finds it there at every turn; one that
does not needs all of them in every worker, which evicts. Where every worker has room for all, only what is
new to a worker is saved. A first turn finds nothing but the system prompt, which both have, and each
further turn all before it: with few turns there is little to save.

Printed: time to first token (mean, over all turns) and prompt tokens that were computed (asked for and not
found in the cache, by the responses' usage), both ways, their ratio, and its 95 % interval by a bootstrap
over conversations. At most 6 minutes on two cores, most of them round-robin's.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from agent_traffic import agent_traffic

from tenfold.bench.figures import table, total_ratio
from tenfold.bench.script import run_script
from tenfold.bench.server import Server
from tenfold.checkpoint.locate import locate
from tenfold.checkpoint.open import open_checkpoint
from tenfold.config import PAGE_ROWS
from tenfold.models.registry import build_graph
from tenfold.router.policies import POLICIES
from tenfold.worker.build import kv_page_bytes

PATH = "/v1/chat/completions"


class Turn(msgspec.Struct, frozen=True):
    """One answered request."""

    conversation: str
    ttft_s: float
    prompt_tokens: int
    computed_tokens: int


def ask(address: tuple[str, int], body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Streams one answer to its end: seconds to its first token, and its usage. Raises ValueError for one
    that is not whole."""
    connection = http.client.HTTPConnection(*address, timeout=300)
    began = time.perf_counter()
    connection.request("POST", PATH, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"status {response.status}: {response.read()[:300]!r}")
    # The head comes with the first token.
    ttft_s = time.perf_counter() - began
    events = [line.removeprefix(b"data: ") for line in response.read().splitlines() if line]
    connection.close()
    if events[-1] != b"[DONE]":
        raise ValueError(f"a stream ended with {events[-1][:300]!r}")
    usage: dict[str, Any] = json.loads(events[-2])["usage"]
    return ttft_s, usage


def converse(
    address: tuple[str, int], turns: Sequence[dict[str, Any]], max_tokens: int, pause_s: float
) -> list[Turn]:
    """Holds one conversation, with a pause after each answer."""
    done = []
    for number, turn in enumerate(turns):
        if number:
            time.sleep(pause_s)
        body = {
            "messages": turn["messages"],
            "temperature": 0,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        ttft_s, usage = ask(address, body)
        prompt = usage["prompt_tokens"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        done.append(Turn(turn["conversation"], ttft_s, prompt, prompt - cached))
    return done


def hold(
    server: Server, conversations: Sequence[list[dict[str, Any]]], max_tokens: int, pause_s: float
) -> list[Turn]:
    """Holds all conversations of a round at once; their turns, conversation after conversation."""
    with ThreadPoolExecutor(len(conversations)) as pool:
        held = [pool.submit(converse, server.address, turns, max_tokens, pause_s) for turns in conversations]
        return [turn for one in held for turn in one.result()]


def conversations_of(data: Path, count: int, most: int, turns: int) -> list[list[dict[str, Any]]]:
    """The first turns of the first conversations that have at least three."""
    recorded = json.loads((data / "gpt-4o-airline.json").read_text(encoding="utf-8"))
    found: dict[str, list[dict[str, Any]]] = {}
    for request in agent_traffic(recorded, len(recorded), most):
        found.setdefault(request["conversation"], []).append(request)
    long = [requests[:turns] for requests in found.values() if len(requests) >= 3]
    if len(long) < count:
        raise ValueError(f"{data} has {len(long)} conversations, and {count} are wanted; take fewer rounds")
    return long[:count]


def kv_memory(model: str, tokens: int) -> int:
    """Bytes of KV memory for so many tokens."""
    checkpoint = open_checkpoint(locate(model))
    try:
        return -(-tokens // PAGE_ROWS) * kv_page_bytes(build_graph(checkpoint.config), "bf16")
    finally:
        checkpoint.close()


def conversation_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """What decides which conversations are held, and with what servers. ``max_tokens``: of an answer, unless
    told otherwise."""
    parser.add_argument("--data", type=Path, required=True, help="folder of tau-bench's conversations")
    parser.add_argument("--model", default="smollm2", help="a GGUF file, a folder, or a known name")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=4, help="conversations of a round")
    parser.add_argument("--turns", type=int, default=20, help="most turns of a conversation")
    parser.add_argument("--most", type=int, default=22_000, help="characters of a request's messages")
    parser.add_argument("--kv-tokens", type=int, default=11_000, help="that a worker holds")
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="of an answer")


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    conversation_options(parser, max_tokens=4)
    parser.add_argument("--against", choices=POLICIES, default="round-robin")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds from an answer to the next turn")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    policies = ("cache-aware", args.against)
    warm_up = 2 * args.workers
    wanted = conversations_of(args.data, args.rounds * args.at_once + warm_up, args.most, args.turns)
    first_turns = [turns[:1] for turns in wanted[-warm_up:]]
    options = ["--workers", str(args.workers), "--threads", str(args.threads)]
    options += ["--kv-memory", str(args.workers * kv_memory(args.model, args.kv_tokens))]
    found: dict[str, list[Turn]] = {policy: [] for policy in policies}
    spent = dict.fromkeys(policies, 0.0)
    with (
        Server(args.model, *options, "--routing", policies[0]) as first,
        Server(args.model, *options, "--routing", policies[1]) as second,
    ):
        servers = dict(zip(policies, (first, second), strict=True))
        for server in servers.values():
            hold(server, first_turns, args.max_tokens, args.pause)
        for number in range(args.rounds):
            part = wanted[number * args.at_once : (number + 1) * args.at_once]
            for policy in policies if number % 2 == 0 else policies[::-1]:
                began = time.perf_counter()
                found[policy] += hold(servers[policy], part, args.max_tokens, args.pause)
                spent[policy] += time.perf_counter() - began
                print(f"round {number + 1}, {policy}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        routed = {policy: server.metrics() for policy, server in servers.items()}
    ours, theirs = found.values()
    groups = [turn.conversation for turn in ours]
    ttft = total_ratio([turn.ttft_s for turn in ours], [turn.ttft_s for turn in theirs], groups)
    computed = total_ratio(
        [turn.computed_tokens for turn in ours], [turn.computed_tokens for turn in theirs], groups
    )
    report = {
        policy: {
            "turns": len(turns),
            "mean_ttft_ms": 1e3 * sum(turn.ttft_s for turn in turns) / len(turns),
            "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
            "computed_tokens": sum(turn.computed_tokens for turn in turns),
            "seconds": spent[policy],
            "moved": routed[policy]["router_moved_total"],
            "gaps": routed[policy]["router_gaps_total"],
        }
        for policy, turns in found.items()
    }
    if args.json:
        ratios = {"ttft_ratio": msgspec.to_builtins(ttft), "computed_ratio": msgspec.to_builtins(computed)}
        print(json.dumps({**report, **ratios}))
        return 0
    rows = [
        ["mean TTFT, ms", *(f"{one['mean_ttft_ms']:.0f}" for one in report.values()), ttft.text()],
        [
            "prompt tokens computed",
            *(str(one["computed_tokens"]) for one in report.values()),
            computed.text(),
        ],
        ["prompt tokens asked for", *(str(one["prompt_tokens"]) for one in report.values()), ""],
        ["seconds", *(f"{one['seconds']:.0f}" for one in report.values()), ""],
    ]
    print(f"{len(ours)} turns of {len(set(groups))} conversations, {args.at_once} at once")
    print(table(["", *policies, "ratio (95 % interval)"], rows))
    return 0


if __name__ == "__main__":
    run_script(main)
