"""Opening what should be a file, and may be anything: a named pipe would keep whoever opens it waiting."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

from tenfold.checkpoint.base import CheckpointError


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """The file at ``path``, for reading. Raises CheckpointError if it is none or cannot be read."""
    try:
        return open(path, "rb", opener=descriptor)
    except NotRegular:
        raise CheckpointError(f"{os.fspath(path)}: not a regular file") from None
    except OSError as error:
        raise CheckpointError(f"{os.fspath(path)}: cannot be read ({error.strerror})") from error


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """All of the file at ``path``. Raises CheckpointError as `open_regular` does."""
    with open_regular(path) as file:
        try:
            return file.read()
        except OSError as error:
            raise CheckpointError(f"{os.fspath(path)}: cannot be read ({error.strerror})") from error


class NotRegular(OSError):
    """There is something at this path, and no regular file."""


def descriptor(path: str | os.PathLike[str], flags: int) -> int:
    """The open file at ``path``. Raises OSError, NotRegular among them."""
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)  # of no effect on a regular file
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise NotRegular(errno.EINVAL, "not a regular file", os.fspath(path))
    return file
