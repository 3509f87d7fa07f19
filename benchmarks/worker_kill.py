"""SIGKILL of the worker under load, again and again: how soon `/ready` says so, and how soon all is well.

``python benchmarks/worker_kill.py smollm2``. Bars: `/ready` turns red within 2 s and green again within 5 s,
and no stream ends without a terminal event. The streams go on on the new worker; their clients see a pause.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.soak import real_server
from tests.helpers.worker_kill import kill_under_load

RED_S, GREEN_S = 2.0, 5.0


def main() -> int:
    """Prints the figures; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    reports = []
    for _ in range(
        options.kills
    ):  # each time a fresh server: a worker that dies soon is started with a delay
        with (
            tempfile.TemporaryDirectory() as folder,
            real_server(Path(folder) / "log", options.model, "--kv-memory", "512MiB") as server,
        ):
            reports.append(kill_under_load(server, options.streams, options.tokens, "Once upon a time"))
    ends: Counter[str] = Counter()
    for report in reports:
        ends += report.ends
    red = [report.red_s for report in reports]
    green = [report.green_s for report in reports]
    if options.json:
        print(json.dumps({"red_s": red, "green_s": green, "ends": ends}))
    else:
        print("| kill | /ready red after, s | green after, s | streams |\n|---|---|---|---|")
        for number, report in enumerate(reports, 1):
            times = ["never" if at is None else f"{at:.3f}" for at in (report.red_s, report.green_s)]
            print(f"| {number} | {' | '.join(times)} | {dict(report.ends)} |")
    good = all(at is not None and at <= RED_S for at in red) and all(
        at is not None and at <= GREEN_S for at in green
    )
    return 0 if good and not ends["cut"] else 1


if __name__ == "__main__":
    sys.exit(main())
