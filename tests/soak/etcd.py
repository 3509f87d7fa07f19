"""etcd stands still for a minute under a cluster at work.

    python -m tests.soak.etcd [--seconds 60]

No stream may end otherwise than on one machine, none may pause for long, and none of the cluster's processes
may end. Needs tenfold[dynamo], ai-dynamo and etcd; says so and does nothing where they are missing.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from tenfold.bench.server import Server
from tests.helpers.cluster import NAME, running_cluster, write_ascii_model
from tests.helpers.cluster_requests import missing
from tests.helpers.etcd_outage import over_an_outage

MOST_PAUSE_S = 5.0


def main() -> None:
    """Runs it, and prints what was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    lacks = missing or ("" if shutil.which("etcd") else "etcd is not installed (Debian: etcd-server)")
    if lacks:
        print(f"etcd: skipped: {lacks}")
        return
    with tempfile.TemporaryDirectory() as folder:
        model = write_ascii_model(Path(folder) / "tiny.gguf")
        options = ("--name", NAME, "--threads", "1", "--kv-memory", "64MiB")
        with (
            running_cluster(Path(folder), model, etcd=True) as cluster,
            Server(str(model), *options) as server,
        ):
            cluster.wait_for_workers(2)
            count, longest_s = over_an_outage(cluster, server.url, given.seconds)
    print(
        f"etcd stood still for {given.seconds:g} s: {count} streams whole and equal to one machine's, "
        f"longest pause {longest_s:.2f} s, no process ended"
    )
    assert longest_s < MOST_PAUSE_S, f"a stream paused for {longest_s:.1f} s"


if __name__ == "__main__":
    main()
