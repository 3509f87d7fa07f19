"""Which Tenfold a figure is of."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """This Tenfold's version, for beside the figures."""
    try:
        return metadata.version("tenfold")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"
