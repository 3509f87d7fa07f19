"""Time to the first token of a long prompt after a restart: pages read from the disk tier against computing.

    python benchmarks/kv_tier.py smollm2 --tokens 4000 8000 --pairs 3

Each pair is two engines built anew (weights, page memory and index): one without a disk tier, one with the
folder that an earlier engine left behind. ``cold``: the files are first pushed out of the system's memory, so
they come from the device. Wall time, as reading is waiting, and the CPU time of the process beside it.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tenfold.checkpoint.locate import locate
from tenfold.engine.engine import Engine
from tenfold.protocol import EngineSettings, Request, SamplingParams
from tenfold.worker.build import build_engine

VOCAB = 40000
"""Prompts are made of tokens below this."""


class First(NamedTuple):
    """How a prompt's first token came."""

    wall_s: float
    cpu_s: float
    cached: int
    tokens: tuple[int, ...]


def settings(model: str, threads: int, tokens: int, disk: Path | None) -> EngineSettings:
    """An engine with room for the prompt alone."""
    return EngineSettings(
        model=str(locate(model)),
        threads=threads,
        kv_memory_bytes=1 << 30,
        max_running=4,
        kv_disk=None if disk is None else str(disk),
        kv_disk_bytes=None if disk is None else 4 << 30,
    )


def first_token(engine: Engine, prompt: tuple[int, ...]) -> First:
    """Serves the prompt up to four tokens; measures to the first."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, seed=1)
    wall, cpu = time.perf_counter(), time.process_time()
    engine.add(Request(id="r", prompt=prompt, params=params))
    first: First | None = None
    tokens: list[int] = []
    cached = 0
    while engine.has_work:
        for chunk in engine.step():
            tokens += chunk.tokens
            cached = cached if chunk.cached_tokens is None else chunk.cached_tokens
            if tokens and first is None:
                first = First(time.perf_counter() - wall, time.process_time() - cpu, cached, ())
    assert first is not None
    return first._replace(tokens=tuple(tokens))


def push_out(folder: Path) -> None:
    """Has the system forget the files' contents."""
    for path in folder.glob("*/*.kv"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def served(model: str, threads: int, prompt: tuple[int, ...], disk: Path | None) -> First:
    """The first token of a fresh engine, which ends in order."""
    engine, _ = build_engine(settings(model, threads, len(prompt), disk))
    try:
        return first_token(engine, prompt)
    finally:
        engine.close()


def main() -> None:
    """Prints a line for each length."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4000, 8000])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="Where the tier is; default: a temporary folder.")
    options = parser.parse_args()
    print(f"{options.model}, {options.threads} threads; medians of {options.pairs} pairs")
    print(
        f"{'tokens':>7}  {'files':5}  {'computed s':>10}  {'restored s':>10}  {'wall':>7}  {'CPU':>7}  "
        " MB/s  cached at least"
    )
    for length in options.tokens:
        drawn = random.Random(length)
        prompt = tuple(drawn.randrange(100, VOCAB) for _ in range(length))
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            folder = Path(name)
            served(options.model, options.threads, prompt, folder)
            size = sum(path.stat().st_size for path in folder.glob("*/*.kv"))
            computed: list[First] = []
            restored: dict[str, list[First]] = {"warm": [], "cold": []}
            for _ in range(options.pairs):
                computed.append(served(options.model, options.threads, prompt, None))
                for kind, found in restored.items():
                    if kind == "cold":
                        push_out(folder)
                    found.append(served(options.model, options.threads, prompt, folder))
            law = computed[0].tokens
            for kind, found in restored.items():
                if any(each.tokens != law for each in (*computed, *found)):
                    sys.exit("the texts differ")
                wall = statistics.median(each.wall_s for each in found)
                slow = statistics.median(each.wall_s for each in computed)
                cpu = statistics.median(a.cpu_s / b.cpu_s for a, b in zip(computed, found, strict=True))
                ratio = statistics.median(a.wall_s / b.wall_s for a, b in zip(computed, found, strict=True))
                print(
                    f"{length:7}  {kind:5}  {slow:10.3f}  {wall:10.3f}  {ratio:6.1f}x  {cpu:6.1f}x  "
                    f"{size / wall / 1e6:5.0f}  {min(each.cached for each in found)}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
