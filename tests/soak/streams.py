"""64 streams for ten minutes, a third of which hang up at random.

    python -m tests.soak.streams [--minutes 10] [--streams 64] [--model smollm2] [--threads 0]

Every stream that reaches its end must have the bytes of the same request run alone, with the same seed; no
page and no request may be left; the memory of front and worker may grow by less than 5 % after a quarter of
the time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from pathlib import Path

from tests.helpers.soak import real_server, soak

MOST_GROWTH = 0.05


def main() -> None:
    """Runs it, and prints what was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kv-memory", default="128MiB")
    parser.add_argument("--threads", default="0")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    seconds = given.minutes * 60
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        options = ("--kv-memory", given.kv_memory, "--threads", given.threads)
        with real_server(log, given.model, *options) as server:
            report = asyncio.run(soak(server, given.streams, seconds, random.Random(given.seed)))
            preemptions = server.metric("tenfold_preemptions_total")
    growth = report.growth(seconds / 4)
    print(
        f"{given.streams} streams, {given.minutes:g} min: {report.ends['whole']} whole and equal to the "
        f"request alone, {report.ends['left']} hung up, {report.tokens} tokens, {preemptions:.0f} "
        f"preemptions; memory {report.resident_bytes[-1][1] / 2**20:.0f} MiB, growth {growth:+.2%} after "
        f"{seconds / 4:.0f} s"
    )
    assert growth < MOST_GROWTH, f"memory grew by {growth:.1%}"


if __name__ == "__main__":
    main()
