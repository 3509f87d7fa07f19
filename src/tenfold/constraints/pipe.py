"""What a front and the process that checks its constraints say to one another, and how."""

from __future__ import annotations

from typing import IO, TypeVar

import msgspec

from tenfold.protocol import Constraint

_LENGTH_BYTES = 4
T = TypeVar("T")


class VocabularyWords(msgspec.Struct, frozen=True, array_like=True):
    """The front's first message: what compiling needs of a vocabulary."""

    pieces: list[bytes]
    special_ids: list[int]
    eos_token_ids: list[int]
    rows: int
    """Of the model's output."""


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """An answer: the first says that the process is ready, each further one is about a constraint."""

    field: str | None = None
    """What is refused; None: nothing."""
    problem: str = ""
    unsupported: bool = False
    reason: str = "invalid"
    """One of `tenfold.constraints.checker.REASONS`."""


def send(file: IO[bytes], message: VocabularyWords | Constraint | Verdict) -> None:
    """Raises OSError when nobody reads any more."""
    data = msgspec.msgpack.encode(message)
    file.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    file.flush()


def receive(file: IO[bytes], kind: type[T]) -> T:
    """The next message. Raises EOFError when none will come."""
    head = file.read(_LENGTH_BYTES)
    data = file.read(int.from_bytes(head, "little"))
    if len(head) < _LENGTH_BYTES or len(data) < int.from_bytes(head, "little"):
        raise EOFError
    return msgspec.msgpack.decode(data, type=kind)
