"""How a benchmark script ends when something goes wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tenfold.bench.peers import PeerError


def run_script(main: Callable[[], int]) -> None:
    """Runs ``main`` and exits with what it returns. An expected error is one line and exit code 1; Ctrl-C is
    exit code 130."""
    try:
        code = main()
    except (ValueError, OSError, PeerError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
