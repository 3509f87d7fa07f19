"""How two models of one server share the cores: all cores for each, as `tenfold serve` has it, beside half of
them for each, in turns.

    python benchmarks/two_models.py
    python benchmarks/two_models.py --rounds 11 --json

The same model twice, under two names. A round asks one of them alone, then both at once with one stream each,
then both with four. Tokens are counted from the first of any stream to the last of all.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from functools import partial
from typing import Any

from tqdm import tqdm

from tenfold.backends.cores import choose_threads
from tenfold.bench.figures import Comparison, compare, table
from tenfold.bench.http_streams import read_answer, read_streams
from tenfold.bench.peers import PeerError, Turns
from tenfold.bench.prompts import questions
from tenfold.bench.script import run_script
from tenfold.bench.server import Server

TOKENS = 128
SIDES = ("all cores", "half")
CASES = {"one model, 1 stream": ("a",), "both, 1 stream each": ("a", "b"), "both, 4 each": ("a", "b") * 4}
"""The model that each stream asks."""


def ask(server: Server, models: tuple[str, ...]) -> float:
    """Tokens/s over all streams."""
    bodies = [
        {
            "model": model,
            "messages": messages,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for model, messages in zip(models, questions(len(models)), strict=True)
    ]
    records = read_streams(server.address, "/v1/chat/completions", bodies)
    for record in records:
        if read_answer(b"".join(record.parts)).completion_tokens != TOKENS:
            raise PeerError("the server gave another number of tokens")
    seconds = max(record.last_at for record in records) - min(record.first_at for record in records)
    return len(bodies) * (TOKENS - 1) / seconds


def measure(model: str, rounds: int) -> tuple[dict[str, Any], dict[str, Comparison]]:
    """What was measured, and what was found by case. Raises ValueError, OSError or PeerError."""
    cores, _ = choose_threads(0)
    found: dict[str, dict[str, list[float]]] = {case: {side: [] for side in SIDES} for case in CASES}
    threads = {"all cores": cores, "half": max(1, cores // 2)}
    with ExitStack() as stack:
        servers = {
            side: stack.enter_context(
                Server(f"a={model}", f"b={model}", "--threads", str(count), "--speculate", "off")
            )
            for side, count in threads.items()
        }
        turns = Turns({side: server.pid for side, server in servers.items()})
        for server in servers.values():  # to warm up
            ask(server, ("a", "b"))
        for _ in tqdm(range(rounds), disable=not sys.stderr.isatty(), unit="round"):
            for case, models in CASES.items():
                for side, server in servers.items():
                    found[case][side].append(turns.turn(side, partial(ask, server, models)))
        turns.check()
    about = {"model": model, "threads": threads, "tokens": TOKENS, "idle_cpu_share": turns.idle_cpu_share}
    return about, {case: compare(sides) for case, sides in found.items()}


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a GGUF file, a folder, or a known name")
    parser.add_argument("--rounds", type=int, default=7, help="at least 5")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.rounds < 5:
        parser.error("--rounds: at least 5 are needed for an interval")
    about, found = measure(options.model, options.rounds)
    if options.json:
        figures = {case: comparison.to_json() for case, comparison in found.items()}
        print(json.dumps({**about, "decode_tokens_per_s": figures}))
        return 0
    print(f"{options.model} twice, {about['threads']} threads; {options.rounds} rounds in turns")
    print("decode tokens/s over all streams, median (p10 to p90)\n")
    rows = [(case, *comparison.cells()) for case, comparison in found.items()]
    print(table(("asked", *SIDES, "ratio (95 % interval)"), rows))
    return 0


if __name__ == "__main__":
    run_script(main)
