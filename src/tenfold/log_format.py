"""How a line of the log is written, whatever process writes it."""

from __future__ import annotations

import logging
import sys


class OneLine(logging.Formatter):
    """A line for a message, whatever a request has put into it (a path, a name, a field of a body): what is
    not to be printed is escaped, so nobody can end a line and write one of the server's own. The lines of a
    traceback follow."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))


def one_line(text: str) -> str:
    """``text`` with escapes, as Python writes them, for all that is not to be printed."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )


def log_to_stderr(format: str) -> None:
    """The log of a process that asks for no other: ``format`` is of `logging.Formatter`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(format))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
