"""What loading takes: memory relative to the packed weights, and the time until `tenfold serve` is ready.

    python benchmarks/load_memory.py
    python benchmarks/load_memory.py --model model.gguf --format q8

Each of the 5 runs has two fresh processes, one after the other. The first compiles the model, with one KV
page, for steps of up to 512 tokens; its peak is of all resident memory, the mapped file included, and what it
keeps is its own memory afterwards without the file (so the activations' buffers and what numpy holds on to
are in both). Prints JSON: bytes, and their ratio to the packed weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import msgspec
from tqdm import tqdm

from tenfold.bench.figures import figure
from tenfold.bench.script import run_script
from tenfold.bench.server import Server
from tenfold.bench.worker import start_worker
from tenfold.config import FORMATS, ServeConfig


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a GGUF file, a folder, or a known name")
    parser.add_argument("--format", choices=FORMATS, default="auto")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    if options.runs < 1:
        parser.error("--runs: must be positive")
    config = ServeConfig(model=options.model, format=options.format)
    loads: list[dict[str, Any]] = []
    ready_s: list[float] = []
    for _ in tqdm(range(options.runs), disable=not sys.stderr.isatty(), unit="run"):
        worker, about = start_worker(config, raw_tokens=1)
        worker.close()
        loads.append(about)
        with Server(options.model, "--format", options.format) as server:
            ready_s.append(server.ready_s)
    packed = loads[0]["packed_bytes"]
    figures = {
        "load_s": figure([load["load_s"] for load in loads]),
        "peak_growth_bytes": figure([load["peak_growth_bytes"] for load in loads]),
        "peak_growth_ratio": figure([load["peak_growth_bytes"] / packed for load in loads]),
        "kept_growth_bytes": figure([load["kept_growth_bytes"] for load in loads]),
        "kept_growth_ratio": figure([load["kept_growth_bytes"] / packed for load in loads]),
        "serve_ready_s": figure(ready_s),
    }
    about = {"model": options.model, "format": options.format, "runs": options.runs, "packed_bytes": packed}
    print(json.dumps({**about, **msgspec.to_builtins(figures)}, indent=2))
    return 0


if __name__ == "__main__":
    run_script(main)
