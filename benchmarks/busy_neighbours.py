"""Decode tokens/s beside two processes that only burn CPU, and without them, in turns.

    python benchmarks/busy_neighbours.py
    python benchmarks/busy_neighbours.py --neighbours 1 --threads 2 --json

The share is what is left of the quiet speed. With as many neighbours as threads and cores a fair system
leaves half; an engine whose threads wait for each other gets less, for a step is as late as its last thread.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from tenfold.bench.figures import compare, table
from tenfold.bench.peers import SETTLE_S
from tenfold.bench.prompts import manual_text
from tenfold.bench.script import run_script
from tenfold.bench.worker import start_worker
from tenfold.config import ISAS, ServeConfig

DEPTH, DECODE = 256, 128

# Ends by itself when its parent is gone.
_BURN = """import os
while os.getppid() == {parent}:
    for _ in range(1000000): pass"""


class Neighbours:
    """Processes that are stopped, or burn CPU."""

    def __init__(self, count: int) -> None:
        code = _BURN.format(parent=os.getpid())
        self._processes = [
            subprocess.Popen([sys.executable, "-c", code], start_new_session=True) for _ in range(count)
        ]
        self._signal(signal.SIGSTOP)

    @contextmanager
    def burning(self) -> Iterator[None]:
        """They burn within."""
        self._signal(signal.SIGCONT)
        time.sleep(SETTLE_S)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Ends them."""
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a GGUF file, a folder, or a known name")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core that may be used")
    parser.add_argument("--isa", choices=ISAS, default="auto")
    parser.add_argument("--neighbours", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11, help="at least 5")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.rounds < 5:
        parser.error("--rounds: at least 5 are needed for an interval")
    if options.neighbours < 1:
        parser.error("--neighbours: must be positive")
    config = ServeConfig(model=options.model, threads=options.threads, isa=options.isa)
    found: dict[str, list[float]] = {"busy": [], "quiet": []}
    worker, about = start_worker(config, raw_tokens=DEPTH + DECODE)
    neighbours = Neighbours(options.neighbours)
    try:
        ids = worker.ask("tokenize", text=manual_text()[: 8 * (DEPTH + DECODE)])[: DEPTH + DECODE]

        def decode() -> float:
            return DECODE / float(worker.ask("decode", ids=ids, depth=DEPTH))

        decode()  # to warm up
        for _ in tqdm(range(options.rounds), disable=not sys.stderr.isatty(), unit="round"):
            found["quiet"].append(decode())
            with neighbours.burning():
                found["busy"].append(decode())
    finally:
        neighbours.close()
        worker.close()
    comparison = compare(found)
    if options.json:
        print(
            json.dumps(
                {
                    "model": options.model,
                    **about,
                    "neighbours": options.neighbours,
                    "decode_tokens_per_s": comparison.to_json(),
                    "share": comparison.ratio.median,
                }
            )
        )
        return 0
    print(
        f"{options.model}, {about['threads']} threads, {options.neighbours} neighbours, "
        f"{options.rounds} rounds in turns; decode tokens/s at depth {DEPTH}, median (p10 to p90)\n"
    )
    print(table(("busy", "quiet", "share (95 % interval)"), [comparison.cells()]))
    return 0


if __name__ == "__main__":
    run_script(main)
