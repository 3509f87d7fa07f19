"""A cluster's folder: one cluster at a time has it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

LOCK = "lock"


def lock_folder(folder: Path) -> BinaryIO:
    """Takes a folder for this process's cluster, until the file that is returned is closed or the process
    ends: with file discovery a second front there would find the workers of the first. Raises ValueError for
    one that another cluster has, OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / LOCK).open("a+b")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        process = lock.read().decode(errors="replace")
        lock.close()
        raise ValueError(
            f"{folder} is used by another cluster (process {process}); choose another --dir"
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()).encode())
    lock.flush()
    return lock
