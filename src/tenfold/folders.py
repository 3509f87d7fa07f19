"""Making folders."""

from __future__ import annotations

from pathlib import Path


def make_private(folder: Path) -> None:
    """Makes a folder, and those around it, for the owner alone, where they are not there: `Path.mkdir` gives
    its mode to the last alone. Raises OSError."""
    for path in reversed((folder, *folder.parents)):
        if not path.is_dir():
            path.mkdir(mode=0o700, exist_ok=True)
