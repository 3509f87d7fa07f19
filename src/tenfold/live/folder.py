"""What live learning keeps beside a drafter, in its folder's ``live``.

=====================  ================================================================================
``answers-*``          recent answers, see `tenfold.live.store`
``heads/0001`` ...     heads that were trained here, each a drafter's folder with ``verdict.json``
``state.json``         how much was seen, and which head is live
``work``, ``log.txt``  of the training under way, or the last one
=====================  ================================================================================

The drafter itself is never written to: without ``--learn`` it is served as it was trained.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

log = logging.getLogger(__name__)

LIVE = "live"
VERDICT = "verdict.json"
WORK = "work"
LOG = "log.txt"
_HEADS, _STATE, _LOCK = "heads", "state.json", "lock"


class LiveState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``state.json``."""

    version: int = 1
    seen: int = 0
    """Tokens that were kept so far, those that are gone by now included."""
    tried: int = 0
    """``seen`` at the latest training, whatever came of it."""
    last: int = 0
    """Number of the latest head that was trained."""
    live: int = 0
    """Number of the head that is live; 0: the drafter's own."""
    before: int = 0
    """Of the one before it."""


class LiveFolder:
    """``live`` in the drafter's folder ``drafter``; for one server at a time. Close it, or use ``with``."""

    def __init__(self, drafter: Path) -> None:
        """Raises ValueError where another server uses it or there is no drafter, OSError where it cannot be
        made."""
        if not drafter.is_dir():
            raise ValueError(f"{drafter}: not a drafter's folder; make one with `tenfold train-drafter`")
        self.drafter = drafter
        self.path = drafter / LIVE
        self.path.mkdir(mode=0o700, exist_ok=True)
        # It has what users were answered. An earlier umask or copy must not have opened it.
        self.path.chmod(0o700)
        self._lock: BinaryIO = (self.path / _LOCK).open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ValueError(
                f"{self.path} is in use by another server that learns; give each a copy of the drafter's "
                "folder"
            ) from None
        self.state = self._read()

    def __enter__(self) -> LiveFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Another server may use it now."""
        self._lock.close()

    def head(self, number: int) -> Path:
        """The folder of a head: that of the drafter itself for 0."""
        return self.path / _HEADS / f"{number:04}" if number else self.drafter

    def save(self) -> None:
        """Writes the state, whole or not at all. What the disk refuses is logged: a restart goes on from what
        was written last."""
        part = self.path / (_STATE + ".part")
        try:
            part.write_bytes(msgspec.json.encode(self.state))
            os.replace(part, self.path / _STATE)
        except OSError as error:
            log.error("%s cannot be written: %s", self.path / _STATE, error)

    def drop_heads(self) -> None:
        """Removes all heads but the live one and the one before it."""
        kept = {self.head(self.state.live), self.head(self.state.before)}
        with suppress(OSError):
            for path in (self.path / _HEADS).iterdir():
                if path not in kept:
                    shutil.rmtree(path, ignore_errors=True)

    def _read(self) -> LiveState:
        path = self.path / _STATE
        try:
            state = msgspec.json.decode(path.read_bytes(), type=LiveState)
        except FileNotFoundError:
            return LiveState()
        except (msgspec.MsgspecError, OSError) as error:
            log.warning(
                "%s cannot be read (%s): learning starts anew from the drafter's own head", path, error
            )
            return LiveState()
        for number in (state.live, state.before):
            if number and not self.head(number).is_dir():
                log.warning("%s is gone: learning starts anew from the drafter's own head", self.head(number))
                return LiveState(last=state.last)
        return state
