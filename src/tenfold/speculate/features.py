"""What a head is trained on: answers of the target, and the hidden states that led to each of their tokens.

A folder with ``features.json`` (what the features are of), ``answers.jsonl`` (one line an answer) and
``features.bf16`` (a row for each token of the answers, in the same order). It only grows, an answer at a
time, features first: whatever interrupts its making, what `FeatureSet` finds is whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
import numpy.typing as npt

from tenfold.backends.base import Floats
from tenfold.formats.matrix import Format, Layout
from tenfold.formats.rounding import quantize
from tenfold.speculate.target import Fingerprint

_HEADER, _ANSWERS, _FEATURES = "features.json", "answers.jsonl", "features.bf16"
_BF16 = Layout(Format.BF16)

BF16s = npt.NDArray[np.uint16]
"""The high halves of float32 numbers."""


class FeatureSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What features are of."""

    target: Fingerprint
    taps: tuple[str, ...]
    """Values of the target's graph, see `TargetModel.taps`."""
    width: int
    """Of all taps together."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer that the target has written."""

    tokens: tuple[int, ...]
    """All that were drawn, the one that ended it included."""
    temperature: float
    seed: int
    """Of the noise that drew it."""
    position: int
    """Index in its sequence of the first of ``tokens``: the length of the prompt."""
    group: str = ""
    """What it belongs to (its conversation, say): splits keep groups together."""


class FeatureWriter:
    """Appends answers to a folder, a new one or one of the same source."""

    def __init__(self, folder: str | os.PathLike[str], source: FeatureSource) -> None:
        """Raises ValueError for a folder of another source."""
        self._folder = Path(folder)
        self._source = source
        self._folder.mkdir(parents=True, exist_ok=True)
        header = self._folder / _HEADER
        if header.exists():
            if _read_header(header) != source:
                raise ValueError(f"{header}: features of another target or other taps; use a new folder")
        else:
            header.write_bytes(msgspec.json.format(msgspec.json.encode(source)))
        answers, whole = _read_answers(self._folder / _ANSWERS)
        size = sum(len(answer.tokens) for answer in answers) * source.width * 2
        _check_size(self._folder / _FEATURES, size)
        self._answers = (self._folder / _ANSWERS).open("ab")
        self._answers.truncate(whole)
        self._features = (self._folder / _FEATURES).open("ab")
        self._features.truncate(size)

    def add(self, answer: Answer, features: Floats) -> None:
        """``features`` ``[tokens, width]``: row i is of the target's row that drew ``answer.tokens[i]``.

        Raises ValueError for another shape and for features that are not finite.
        """
        if features.shape != (len(answer.tokens), self._source.width):
            raise ValueError(
                f"features of an answer of {len(answer.tokens)} tokens have shape {features.shape}, "
                f"not ({len(answer.tokens)}, {self._source.width})"
            )
        self._features.write(quantize(features, _BF16).codes.tobytes())
        self._features.flush()
        self._answers.write(msgspec.json.encode(answer) + b"\n")
        self._answers.flush()

    def close(self) -> None:
        """Closes the files."""
        self._features.close()
        self._answers.close()

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FeatureSet:
    """Answers and their features, read in place. Several sets may look at one folder."""

    def __init__(
        self,
        folder: Path,
        source: FeatureSource,
        answers: Sequence[Answer],
        starts: Sequence[int],
        features: BF16s,
    ) -> None:
        self.folder = folder
        self.source = source
        self.answers = tuple(answers)
        self.starts = tuple(starts)
        """Row of ``features`` of each answer's first token."""
        self.features = features
        """``[rows of the folder, width]``"""

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> FeatureSet:
        """All answers of a folder. Raises ValueError for a folder that is none, or damaged."""
        path = Path(folder)
        source = _read_header(path / _HEADER)
        answers, _ = _read_answers(path / _ANSWERS)
        starts = np.cumsum([0, *(len(answer.tokens) for answer in answers)]).tolist()
        _check_size(path / _FEATURES, starts[-1] * source.width * 2)
        if starts[-1]:
            shape = (starts[-1], source.width)
            features: BF16s = np.memmap(path / _FEATURES, np.uint16, "r", shape=shape)
        else:
            features = np.empty((0, source.width), dtype=np.uint16)
        return cls(path, source, answers, starts[:-1], features)

    def select(self, indices: Iterable[int]) -> FeatureSet:
        """The set of some of its answers."""
        chosen = list(indices)
        return FeatureSet(
            self.folder,
            self.source,
            [self.answers[i] for i in chosen],
            [self.starts[i] for i in chosen],
            self.features,
        )

    @property
    def token_count(self) -> int:
        """Tokens of its answers."""
        return sum(len(answer.tokens) for answer in self.answers)


def distinct_share(tokens: Sequence[int], n: int = 4) -> float:
    """How many of an answer's n-grams are distinct: low where it repeats itself. 1 for a shorter one."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def _read_header(path: Path) -> FeatureSource:
    try:
        return msgspec.json.decode(path.read_bytes(), type=FeatureSource)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); no folder of features?") from error
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_size(path: Path, wanted: int) -> None:
    size = path.stat().st_size if path.exists() else 0
    if size < wanted:
        raise ValueError(f"{path}: has {size} bytes, the answers beside it need {wanted}; it is damaged")


def _read_answers(path: Path) -> tuple[list[Answer], int]:
    """The answers, and how many bytes of the file they are: a line cut short at the end is passed over."""
    if not path.exists():
        return [], 0
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    answers = []
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            answers.append(msgspec.json.decode(line, type=Answer))
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}: line {number}: {error}") from error
    return answers, whole
