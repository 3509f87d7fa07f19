"""The target's answers to traffic on disk, as they come: whatever ends the work, nothing finished is lost.

Two files that only grow. ``features.bf16`` holds the features of answer after answer, raw. ``answers.jsonl``
has a line for each answer, a checksum before its JSON; it is written after the features, and says where they
are and what their checksum is. Whatever a crash left half written is cut off when the store is opened.
"""

from __future__ import annotations

import fcntl
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from tenfold.backends.base import ProgramInfo
from tenfold.checkpoint.fingerprint import fingerprint
from tenfold.graph.graph import Graph

Features = npt.NDArray[np.uint16]
"""[rows, width] of bfloat16: some models have states beyond what float16 can hold."""
ANSWERS = "answers.jsonl"
FEATURES = "features.bf16"
VERSION = 1


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must be the same for answers to be of use again."""

    version: int = VERSION
    model: str
    """`checkpoint.fingerprint` of the target."""
    format: str
    """What its weights are held in: another one gives other answers."""
    kv_format: str
    taps: tuple[str, ...]
    """Values of its graph that the features are made of, side by side."""
    width: int
    """Of a row of features."""

    @classmethod
    def of(cls, model: Path, info: ProgramInfo, graph: Graph, taps: tuple[str, ...]) -> Identity:
        """That of a target: a program of ``graph``, compiled with these taps from the model at ``model``."""
        return cls(
            model=fingerprint(model),
            format="+".join(sorted({weight.format for weight in info.weights})),
            kv_format=info.kv_format,
            taps=taps,
            width=sum(graph.widths[tap] for tap in taps),
        )


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must be known of an answer whose request is not at hand any more."""

    temperature: float
    seed: int
    """Of the noise that drew it."""
    position: int
    """Length of the prompt."""
    conversation: str
    time: float
    """When it ended, in seconds since 1970."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the target said to one request."""

    key: str
    """Of the request: its prompt and parameters."""
    tokens: tuple[int, ...]
    """With the one that ended it, if one did."""
    finish: Literal["stop", "length"]
    first_row: int
    """Of its features in the store: row ``first_row + i`` drew ``tokens[i]``."""
    rows: int
    """How many of the tokens have features, from the first on."""
    checksum: int
    """CRC-32 of the features' bytes."""
    origin: Origin | None = None


class AnswerStore:
    """See the head of this file. One process uses a store at a time. Close it, or use ``with``."""

    def __init__(self, folder: Path, identity: Identity) -> None:
        """Opens the store in ``folder``, or begins one. Raises ValueError for a store of another model or
        other settings, and for one that another process uses; OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self.identity = identity
        self.answers: dict[str, Answer] = {}
        """By key, in the order in which they were finished."""
        self._folder = folder
        self._rows = 0
        self._lines: BinaryIO = (folder / ANSWERS).open("a+b")
        try:
            try:
                fcntl.flock(self._lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"{folder} is in use by another process; wait for it, or use another folder"
                ) from None
            self._features: BinaryIO = (folder / FEATURES).open("a+b")
            try:
                self._recover()
            except BaseException:
                self._features.close()
                raise
        except BaseException:
            self._lines.close()
            raise

    def __enter__(self) -> AnswerStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing can be added afterwards. Arrays from `features` stay valid."""
        self._features.close()
        self._lines.close()

    def add(
        self,
        key: str,
        tokens: tuple[int, ...],
        finish: Literal["stop", "length"],
        features: Features,
        origin: Origin | None = None,
    ) -> Answer:
        """Writes an answer; ``features`` is [rows, width]. Raises OSError, ValueError for another width."""
        if features.shape[1:] != (self.identity.width,):
            raise ValueError(f"features are {features.shape}; they must have {self.identity.width} columns")
        data = features.tobytes()
        answer = Answer(
            key=key,
            tokens=tokens,
            finish=finish,
            first_row=self._rows,
            rows=len(features),
            checksum=zlib.crc32(data),
            origin=origin,
        )
        self._features.write(data)
        self._features.flush()
        self._write(msgspec.json.encode(answer))
        self._rows += answer.rows
        self.answers[key] = answer
        return answer

    @property
    def rows(self) -> int:
        """Of features, so far."""
        return self._rows

    def features(self) -> Features:
        """[rows, width], all that was written so far, mapped from the file."""
        return _mapped(self._folder, self._rows, self.identity.width)

    def _write(self, content: bytes) -> None:
        self._lines.write(b"%08x %b\n" % (zlib.crc32(content), content))
        self._lines.flush()

    def _recover(self) -> None:
        """Takes in what is whole, and cuts off the rest of both files."""
        row_bytes = 2 * self.identity.width
        self._lines.seek(0)
        self._features.seek(0)
        head = self._lines.readline()
        end = len(head)
        content = _checked(head)
        if content is None and head.endswith(b"\n"):
            raise ValueError(f"{self._folder / ANSWERS} is no store of answers; use another folder")
        if content is None:  # new, or it was never begun
            self._lines.truncate(0)
            self._features.truncate(0)
            self._write(msgspec.json.encode(self.identity))
            return
        self._compare(content)
        for answer, size in _whole(self._lines, self._features, row_bytes):
            self.answers[answer.key] = answer
            self._rows += answer.rows
            end += size
        self._lines.truncate(end)
        self._features.truncate(self._rows * row_bytes)

    def _compare(self, content: bytes) -> None:
        try:
            found = msgspec.json.decode(content, type=Identity)
        except msgspec.ValidationError as error:
            raise ValueError(
                f"{self._folder} was made by another version of Tenfold ({error}); use another folder, or "
                "remove it"
            ) from None
        for name in Identity.__struct_fields__:
            was, is_ = getattr(found, name), getattr(self.identity, name)
            if was != is_:
                raise ValueError(
                    f"{self._folder} has answers that were made with {name} {was}; this is {name} {is_}. Use "
                    "another folder, or remove it"
                )


def read_answers(folder: Path) -> tuple[Identity, list[Answer], Features]:
    """What is whole in a store, in its order, also while another process adds to it. Raises OSError,
    ValueError for a folder that is no store."""
    with (folder / ANSWERS).open("rb") as lines, (folder / FEATURES).open("rb") as features:
        content = _checked(lines.readline())
        if content is None:
            raise ValueError(f"{folder / ANSWERS} is no store of answers")
        identity = msgspec.json.decode(content, type=Identity)
        answers = [answer for answer, _ in _whole(lines, features, 2 * identity.width)]
    rows = sum(answer.rows for answer in answers)
    return identity, answers, _mapped(folder, rows, identity.width)


def _whole(lines: BinaryIO, features: BinaryIO, row_bytes: int) -> Iterator[tuple[Answer, int]]:
    """Answers up to the first that is not whole, each with the length of its line."""
    for line in lines:
        content = _checked(line)
        if content is None:
            return
        answer = msgspec.json.decode(content, type=Answer)
        data = features.read(answer.rows * row_bytes)
        if len(data) != answer.rows * row_bytes or zlib.crc32(data) != answer.checksum:
            return
        yield answer, len(line)


def _mapped(folder: Path, rows: int, width: int) -> Features:
    if not rows:
        return np.zeros((0, width), np.uint16)
    return np.memmap(folder / FEATURES, np.uint16, "r", shape=(rows, width))


def _checked(line: bytes) -> bytes | None:
    """The line's content, None if it is not whole."""
    checksum, space, content = line.partition(b" ")
    if not space or not content.endswith(b"\n"):
        return None
    content = content[:-1]
    return content if checksum == b"%08x" % zlib.crc32(content) else None
