"""The seam of constraints: what the engine needs of one is which tokens may come next, and no more. It
knows no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tenfold.protocol import Constraint

UInt32s = npt.NDArray[np.uint32]


class ConstraintError(RuntimeError):
    """A matcher can go no further: its grammar exceeds a limit. The request ends with it, alone."""


class Matcher(Protocol):
    """The state of a constraint along one sequence: a function of the tokens accepted and not taken back."""

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end the sequence where its text is complete. They may be drawn, but never accepted."""
        ...

    def fill(self, mask: UInt32s) -> None:
        """Writes into ``mask`` [(vocab + 31) // 32] which tokens may come next; see
        `tenfold.backends.base.SamplingBatch.masks`. Raises ConstraintError."""
        ...

    def accept(self, token: int) -> None:
        """Goes on by a token that may come next. Raises ConstraintError."""
        ...

    def fitting(self, tokens: Sequence[int]) -> int:
        """How many first ones of the tokens may come next, one after another. The state stays."""
        ...

    def forced(self) -> list[int]:
        """Tokens that are likely to come next because little else can. A guess."""
        ...

    def rollback(self, count: int) -> None:
        """Takes back the last tokens accepted, and an error that came after them. Raises ConstraintError."""
        ...


class Matchers(Protocol):
    """Makes matchers."""

    compiled: int
    """Constraints compiled so far, ..."""
    compile_ms: float
    """... and how long that took."""

    def begin(self, constraint: Constraint) -> Matcher:
        """A matcher at the beginning of an answer. Raises `tenfold.limits.RequestError`."""
        ...
