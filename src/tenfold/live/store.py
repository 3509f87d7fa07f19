"""Recent answers on disk, never more than so many bytes: stores in a row, of which the oldest goes whole."""

from __future__ import annotations

import logging
import shutil
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from tenfold.traffic.store import Answer, AnswerStore, Features, Identity, Origin, read_answers

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 30
RETRY_S = 60.0
"""After an error of the disk nothing is kept for so long."""
_PREFIX = "answers-"
_ANSWER_BYTES = 8
"""What a token takes beside its features, about."""


class LiveStore:
    """Keeps answers of the target ``identity`` in ``folder``, which it shares with nobody.

    Half of ``max_bytes`` is one store (`traffic.store`); when it is full the next is begun and the last but
    one removed. Faults of the disk cost answers and nothing else: they are logged, and it is tried again
    after `RETRY_S`.
    """

    def __init__(self, folder: Path, identity: Identity, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._identity = identity
        self._row_bytes = 2 * identity.width + _ANSWER_BYTES
        self.capacity = max(1, max_bytes // 2 // self._row_bytes)
        """Rows that are kept at least, once there were as many; twice as many at most."""
        self._store: AnswerStore | None = None
        self._retry_at = 0.0
        self._number = 0
        self._open()

    def add(
        self,
        tokens: Sequence[int],
        finish: Literal["stop", "length"],
        features: Features,
        origin: Origin,
    ) -> int:
        """Keeps an answer. How many rows were kept: none where the disk fails."""
        if self._store is None:
            if time.monotonic() < self._retry_at:
                return 0
            self._open()
            if self._store is None:
                return 0
        try:
            if self._store.rows and self._store.rows + len(features) > self.capacity:
                self._begin_next()
            self._store.add(uuid.uuid4().hex, tuple(tokens), finish, features, origin)
        except OSError as error:
            self._failed(error)
            return 0
        return len(features)

    def close(self) -> None:
        """Nothing can be added afterwards."""
        if self._store is not None:
            self._store.close()
        self._store, self._retry_at = None, float("inf")

    def _open(self) -> None:
        """Goes on in the newest store; removes what is of another target or damaged."""
        try:
            names = numbered(self._folder)
            for path in names[:-2]:
                shutil.rmtree(path)
            for path in names[-2:]:
                if self._store is not None:
                    self._store.close()
                    self._store = None
                try:
                    self._store = AnswerStore(path, self._identity)
                except (ValueError, msgspec.MsgspecError) as error:
                    log.warning("recent answers in %s are of no use and are removed: %s", path, error)
                    shutil.rmtree(path)
            self._number = number_of(names[-1]) if names else 0
            if self._store is None:
                self._begin_next()
        except OSError as error:
            self._failed(error)

    def _begin_next(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
        for path in numbered(self._folder)[:-1]:
            shutil.rmtree(path)
        self._number += 1
        self._store = AnswerStore(self._folder / f"{_PREFIX}{self._number:06}", self._identity)

    def _failed(self, error: OSError) -> None:
        log.error(
            "recent answers cannot be kept (%s): serving goes on without; it is tried again in %g s. "
            "Is there room in %s, and may it be written?",
            error,
            RETRY_S,
            self._folder,
        )
        if self._store is not None:
            with suppress(OSError):
                self._store.close()
        self._store = None
        self._retry_at = time.monotonic() + RETRY_S


def numbered(folder: Path) -> list[Path]:
    """The stores in a folder, oldest first. Raises OSError."""
    return sorted(path for path in folder.iterdir() if path.name.startswith(_PREFIX))


def number_of(path: Path) -> int:
    """The number of a store; 0 for a name that has none."""
    text = path.name.removeprefix(_PREFIX)
    return int(text) if text.isdecimal() else 0


def read_live(folder: Path) -> tuple[Identity, list[tuple[Answer, Features]]]:
    """All answers that are kept, oldest first, each with its features [rows, width]; also while they are
    added to. Raises OSError, ValueError where there is none."""
    found: list[tuple[Answer, Features]] = []
    identity: Identity | None = None
    for path in numbered(folder):
        try:
            identity, answers, features = read_answers(path)
        except (FileNotFoundError, ValueError):
            continue  # just begun, or just removed
        found += [(answer, features[answer.first_row : answer.first_row + answer.rows]) for answer in answers]
    if identity is None:
        raise ValueError(f"{folder} has no answers")
    return identity, found
