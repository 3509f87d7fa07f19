"""What a head is trained on: answers of the target, and the hidden states that led to each token of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tenfold.speculate.target import Fingerprint

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
    """Those that were drawn, from the first on, the one that ended it included."""
    temperature: float
    seed: int
    """Of the noise that drew it."""
    position: int
    """Index in its sequence of the first of ``tokens``: the length of the prompt."""
    group: str = ""
    """What it belongs to (its conversation, say): splits keep groups together."""


class FeatureSet:
    """Answers and their features. The features may lie in a file; nothing is copied."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        source: FeatureSource,
        answers: Sequence[Answer],
        starts: Sequence[int],
        features: BF16s,
    ) -> None:
        """Row ``starts[a] + i`` of ``features`` ``[rows, source.width]`` is of the target's row that drew
        token ``i`` of answer ``a``; there may be rows of other answers. ``folder`` is for messages.

        Raises ValueError where the parts do not fit together.
        """
        if features.ndim != 2 or features.shape[1] != source.width:
            raise ValueError(f"{folder}: features of shape {features.shape} are not {source.width} wide")
        if len(starts) != len(answers):
            raise ValueError(f"{folder}: {len(answers)} answers, but {len(starts)} starts")
        for answer, start in zip(answers, starts, strict=True):
            if not 0 <= start <= len(features) - len(answer.tokens):
                raise ValueError(
                    f"{folder}: an answer of {len(answer.tokens)} tokens from row {start} is not within the "
                    f"{len(features)} rows of features"
                )
        self.folder = Path(folder)
        self.source = source
        self.answers = tuple(answers)
        self.starts = tuple(starts)
        self.features = features

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
