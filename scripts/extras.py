"""Prints what the extras named as arguments need, one requirement a line, as installed metadata has it.

So that they can be installed without building Tenfold again (see the Makefile).
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import requires


def requirements(extra: str) -> list[str]:
    """The extra's requirements, without the marker that says whose they are."""
    marker = re.compile(rf"""(;\s*|\s+and\s+)\(?extra == ['"]{re.escape(extra)}['"]\)?\s*$""")
    return [marker.sub("", line) for line in requires("tenfold") or [] if marker.search(line)]


if __name__ == "__main__":
    print("\n".join(line for extra in sys.argv[1:] for line in requirements(extra)))
