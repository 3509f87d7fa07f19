"""Opening what should be a file, and may be anything: a named pipe would keep whoever opens it waiting."""

from __future__ import annotations

import os
import stat
from typing import BinaryIO

from tenfold.checkpoint.base import CheckpointError


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """The file at ``path``, for reading. Raises CheckpointError if it is none or cannot be read."""
    try:
        file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise CheckpointError(f"{os.fspath(path)}: cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(f"{os.fspath(path)}: not a regular file")
    return file


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """All of the file at ``path``. Raises CheckpointError as `open_regular` does."""
    with open_regular(path) as file:
        try:
            return file.read()
        except OSError as error:
            raise CheckpointError(f"{os.fspath(path)}: cannot be read ({error.strerror})") from error


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # of no effect on a regular file
