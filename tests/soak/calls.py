"""20,000 calls made of the OpenAPI document, right and wrong: no 5xx, no hang, every answer as documented.

python -m tests.soak.calls [--calls 20000]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.helpers.api_fuzz import fuzz
from tests.helpers.fake_engine import FakeConfig
from tests.helpers.server_process import running_server


def main() -> None:
    """Runs them against a server without a model, and prints how they ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, help="Where the random numbers begin; default: anywhere.")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(Path(folder) / "log", FakeConfig(faults=False)) as server,
    ):
        statuses = fuzz(server.url, given.calls, given.seed)
        left = server.metric("tenfold_requests_in_flight")
    for ended, count in sorted(statuses.items()):
        print(f"{count:7}  {ended}")
    print(f"{statuses.total():7}  calls")
    assert left == 0


if __name__ == "__main__":
    main()
