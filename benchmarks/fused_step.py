"""A step as one fused call beside the same program op by op, each op a call of its own, in turns.

    python benchmarks/fused_step.py
    python benchmarks/fused_step.py --model model.gguf --json

Both give the same bits (tests/backends/test_native_kv_formats.py). Times are of one decode step at depth 256.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from tenfold.bench.figures import compare, table
from tenfold.bench.prompts import windows
from tenfold.bench.script import run_script
from tenfold.bench.stepping import OneSequence, compile_model, pages_of
from tenfold.checkpoint.locate import locate
from tenfold.config import ServeConfig
from tenfold.server.text import load_text

DEPTH, STEPS = 256, 40


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a GGUF file, a folder, or a known name")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core that may be used")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", dest="as_json")
    args = parser.parse_args()
    config = ServeConfig(model=args.model, threads=args.threads)
    (prompt,) = windows(load_text(str(locate(args.model))).encode_prompt, 1, 512)
    rounds: dict[str, list[float]] = {"op by op": [], "fused": []}
    sides = {}
    for name, fused in (("op by op", False), ("fused", True)):
        sequence = OneSequence(compile_model(config, pages_of(512), fused=fused), 0, prompt)
        sequence.time(sequence.prefill(DEPTH))
        sides[name] = sequence, [sequence.batch(DEPTH, 1, wanted=1)]
    for _ in range(args.rounds):
        for name, (sequence, step) in sides.items():
            rounds[name].append(float(np.median([sequence.time(step) for _ in range(STEPS)])) * 1e3)
    found = compare(rounds)
    if args.as_json:
        print(json.dumps({"model": args.model, **found.to_json()}, indent=2))
    else:
        print(table(["op by op, ms", "fused, ms", "speed of fused / op by op"], [found.cells(3)]))
    return 0


if __name__ == "__main__":
    run_script(main)
