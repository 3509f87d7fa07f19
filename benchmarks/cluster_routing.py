"""Agent conversations through Dynamo's front with Tenfold workers, beside Tenfold's own front and router.

    python benchmarks/cluster_routing.py --data TAU_BENCH_FOLDER

A cluster (`tenfold cluster up --workers 2`) and a server (`tenfold serve --workers 2`) of the same model and
memory take turns, as benchmarks/fleet_routing.py has it (traffic, rounds and setting are described there):
the same conversations are held with the one, then with the other. Every answer is compared.

Printed: time to first token, prompt tokens that were computed, the ratio of both with its 95 % interval, and
how many texts differ. The exit code is 1 if one does. Needs tenfold[dynamo]; about 5 minutes on two cores.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from fleet_routing import conversation_options, conversations_of, kv_memory

from tenfold.bench.figures import table, total_ratio
from tenfold.bench.script import run_script
from tenfold.bench.server import Server
from tenfold.cluster.ports import free_ports
from tenfold.interpreter import python_command

START_S = 120.0
SIDES = ("cluster", "serve")


class Turn(msgspec.Struct, frozen=True):
    """One answered request."""

    conversation: str
    ttft_s: float
    prompt_tokens: int
    computed_tokens: int
    text: str


class ClusterUnderTest:
    """`tenfold cluster up`, from its start to its end."""

    def __init__(self, model: str, *options: str) -> None:
        (port,) = free_ports("127.0.0.1", 1)
        self.address = ("127.0.0.1", port)
        self._folder = Path(tempfile.mkdtemp(prefix="tenfold-cluster-"))
        command = python_command("from tenfold.cli import main\nmain()")
        self._process = subprocess.Popen(
            [*command, "cluster", "up", model, "--port", str(port), "--dir", str(self._folder), *options],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        began = time.monotonic()
        while not (line := self._process.stdout.readline()).startswith("Ready"):
            if not line or time.monotonic() > began + START_S:
                self._process.kill()
                raise ValueError(f"the cluster did not start; its logs are in {self._folder}/logs")

    def __enter__(self) -> ClusterUnderTest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        shutil.rmtree(self._folder, ignore_errors=True)


def ask(address: tuple[str, int], model: str, turn: dict[str, Any], max_tokens: int) -> Turn:
    """Streams one answer to its end. Raises ValueError for one that is not whole."""
    body = {
        "model": model,
        "messages": turn["messages"],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(*address, timeout=300)
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"status {response.status}: {response.read()[:300]!r}")
    ttft_s, text, usage = 0.0, "", None
    while line := response.readline():
        # Dynamo sends the head at once, and chunks without text first: a token is what counts.
        if line.startswith(b"data: {"):
            event = json.loads(line.removeprefix(b"data: "))
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                piece = choice["delta"].get("content") or ""
                if (piece or choice.get("finish_reason")) and not ttft_s:
                    ttft_s = time.perf_counter() - began
                text += piece
    connection.close()
    if usage is None:
        raise ValueError("a stream ended without its usage")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    prompt = usage["prompt_tokens"]
    return Turn(turn["conversation"], ttft_s, prompt, prompt - cached, text)


def hold(
    address: tuple[str, int], model: str, conversations: Sequence[list[dict[str, Any]]], max_tokens: int
) -> list[Turn]:
    """Holds all conversations of a round at once; their turns, conversation after conversation."""

    def converse(turns: list[dict[str, Any]]) -> list[Turn]:
        return [ask(address, model, turn, max_tokens) for turn in turns]

    with ThreadPoolExecutor(len(conversations)) as pool:
        return [turn for one in pool.map(converse, conversations) for turn in one]


def main() -> int:
    """Measures, compares and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    conversation_options(parser, max_tokens=16)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    warm_up = 2 * args.workers
    wanted = conversations_of(args.data, args.rounds * args.at_once + warm_up, args.most, args.turns)
    first_turns = [turns[:1] for turns in wanted[-warm_up:]]
    options = ["--workers", str(args.workers), "--threads", str(args.threads), "--name", "model"]
    options += ["--kv-memory", str(args.workers * kv_memory(args.model, args.kv_tokens))]
    found: dict[str, list[Turn]] = {side: [] for side in SIDES}
    with ClusterUnderTest(args.model, *options) as cluster, Server(args.model, *options) as server:
        addresses = {"cluster": cluster.address, "serve": server.address}
        for address in addresses.values():
            hold(address, "model", first_turns, args.max_tokens)
        for number in range(args.rounds):
            part = wanted[number * args.at_once : (number + 1) * args.at_once]
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                began = time.perf_counter()
                found[side] += hold(addresses[side], "model", part, args.max_tokens)
                print(f"round {number + 1}, {side}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    ours, theirs = found["cluster"], found["serve"]
    groups = [turn.conversation for turn in ours]
    ttft = total_ratio([turn.ttft_s for turn in ours], [turn.ttft_s for turn in theirs], groups)
    computed = total_ratio(
        [turn.computed_tokens for turn in ours], [turn.computed_tokens for turn in theirs], groups
    )
    different = sum(one.text != other.text for one, other in zip(ours, theirs, strict=True))
    means = {side: 1e3 * sum(turn.ttft_s for turn in turns) / len(turns) for side, turns in found.items()}
    sums = {side: sum(turn.computed_tokens for turn in turns) for side, turns in found.items()}
    if args.json:
        ratios = {"ttft_ratio": msgspec.to_builtins(ttft), "computed_ratio": msgspec.to_builtins(computed)}
        sides = {side: {"mean_ttft_ms": means[side], "computed_tokens": sums[side]} for side in SIDES}
        print(json.dumps({"turns": len(ours), "different": different, **sides, **ratios}))
    else:
        rows = [
            ["mean TTFT, ms", *(f"{means[side]:.0f}" for side in SIDES), ttft.text()],
            ["prompt tokens computed", *(str(sums[side]) for side in SIDES), computed.text()],
        ]
        print(f"{len(ours)} turns of {len(set(groups))} conversations; texts that differ: {different}")
        print(table(["", *SIDES, "ratio (95 % interval)"], rows))
    return 1 if different else 0


if __name__ == "__main__":
    run_script(main)
