"""Whether there is room for a file, before any of it is written."""

from __future__ import annotations

import shutil
from pathlib import Path

from tenfold.config import format_bytes


def check_disk_room(path: Path, need: int) -> None:
    """Raises ValueError when ``need`` bytes are more than the disk of ``path`` has free; OSError when its
    folder is not there."""
    free = shutil.disk_usage(path.parent).free
    if need > free:
        raise ValueError(f"{path}: {format_bytes(need)} are needed, the disk has {format_bytes(free)}")
