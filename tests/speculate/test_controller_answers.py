"""What drafters answer that is no answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tenfold.speculate.base import Draft, DraftSequence, Outcome
from tenfold.speculate.controller import Controller
from tests.helpers.speculation import FLAT, SimSequence, curve_of


class Says:
    """Answers what it is told to; an exception's type is raised."""

    name = "says"
    qualities = 2

    def __init__(self) -> None:
        self.answer: Any = None

    def begin(self, sequence: DraftSequence) -> None: ...

    def end(self, sequence: DraftSequence, learn: bool) -> None: ...

    def close(self) -> None: ...

    def propose(self, sequences: Sequence[DraftSequence], lengths: Sequence[int]) -> list[Draft]:
        if isinstance(self.answer, type):
            raise self.answer("planted")
        return self.answer  # type: ignore[no-any-return]


def started() -> tuple[Controller, Says, SimSequence]:
    """One sequence of four tokens, and a clock that stands still: drafting costs nothing."""
    drafter, sequence = Says(), SimSequence("s", 1000, [])
    controller = Controller([drafter], curve_of(FLAT), clock=lambda: 0.0)
    controller.begin(sequence)
    return controller, drafter, sequence


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ([], ValueError),
        ([Draft((4,), (1.0,)), Draft((4,), (1.0,))], ValueError),
        ([Draft((4, 5), (1.0,))], ValueError),
        ([Draft((4,), (1.0,), 2)], ValueError),
        ([Draft((4,), (1.0,), -1)], ValueError),
        ([Draft((0.5,), (1.0,))], TypeError),  # type: ignore[arg-type]
        ([Draft((4,), ("1",))], TypeError),  # type: ignore[arg-type]
        ([((4,), (1.0,))], TypeError),
        ([None], TypeError),
        (None, TypeError),
        (KeyError, KeyError),
    ],
    ids=str,
)
def test_no_answer_is_refused_and_the_next_step_goes_on(answer: Any, kind: type[Exception]) -> None:
    """Too few drafts or too many, chances missing, a quality there is not, what is no number, and what a
    drafter raises itself: an error, and the next step drafts as if nothing had been."""
    controller, drafter, sequence = started()
    drafter.answer = answer
    with pytest.raises(kind):
        controller.propose([sequence], 8, [8])
    controller.observe([Outcome(sequence, 0, 0, [4])], 1, 4.5)
    sequence.tokens.append(4)
    drafter.answer = [Draft((5, 6), (0.99, 0.98))]
    assert controller.propose([sequence], 8, [8]) == [[5, 6]]
    controller.observe([Outcome(sequence, 2, 2, [5, 6, 7])], 3, 4.9)
    report = controller.report()
    assert (report.steps, report.committed_tokens) == (2, 4)
    assert report.drafters[0][:4] == ("says", 1, 2, 2)


@pytest.mark.parametrize("number", [-1, -(2**31), -(2**70), 2**31, 2**70])
def test_numbers_that_are_no_tokens(number: int) -> None:
    """They come out as -1, which is no token either; what is before and behind them stays."""
    controller, drafter, sequence = started()
    drafter.answer = [Draft([4, number, 6], [0.99, 0.98, 0.97])]
    assert controller.propose([sequence], 8, [8]) == [[4, -1, 6]]


def test_drafts_of_any_sequence_type() -> None:
    """A draft may be an array of NumPy numbers and longer than was asked for."""
    controller, drafter, sequence = started()
    drafter.answer = [Draft(np.arange(4, 20), np.full(16, 0.99, np.float32), np.int64(1))]  # type: ignore[arg-type]
    assert controller.propose([sequence], 8, [3]) == [[4, 5, 6]]
