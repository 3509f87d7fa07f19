"""Which tokens a sequence gains in a step: the one rule of speculation.

A draft stands if and only if it is the token that the target drew in its place, with the noise of that
place. So what is committed is what would have been drawn one step at a time, whoever drafted what; no
distribution of the drafter is needed, no second random number and no correction of what was refused (M.
Daliri, C. Musco, A. T. Suresh, "Coupling without communication and drafter-invariant speculative decoding",
2024).
"""

from __future__ import annotations

from collections.abc import Sequence as Sized

import msgspec

from tenfold.constraints.base import ConstraintError
from tenfold.engine.sequence import Sequence
from tenfold.protocol import FinishReason

NOTHING_TO_DRAW = (
    "no token can be drawn: the model's logits are not numbers, or logit_bias forbids every token (that the "
    "constraint leaves)"
)


class Gain(msgspec.Struct, frozen=True):
    """What a step brought a sequence."""

    sequence: Sequence
    tokens: list[int]
    """Committed: drafts that stood, then one more token. Without that one when none could be drawn."""
    first: int
    """Which of the step's draws is that of the first of ``tokens``; the others follow it."""
    drafted: int
    finish: FinishReason | None
    error: str | None
    error_field: str | None = None
    """Of the request, where it is at fault."""

    @property
    def accepted(self) -> int:
        """How many drafts stood."""
        return len(self.tokens) - (self.error is None)


def standing(draft: Sized[int], drawn: Sized[int]) -> int:
    """How many first tokens of ``draft`` the target drew itself. ``drawn`` has one token more."""
    for i, token in enumerate(draft):
        if token != drawn[i]:
            return i
    return len(draft)


def commit(sequence: Sequence, draft: Sized[int], drawn: list[int], first: int) -> Gain:
    """Appends to the sequence what stands of ``draft`` and the token that the target drew after it; nothing
    after the sequence's end.

    ``drawn`` are the step's draws for the sequence, ``first`` on: for its last token and for each of the
    draft. ``computed`` is raised by the rows of the drafts that stand, and by no other.
    """
    tokens = drawn[: 1 + standing(draft, drawn)] if draft else drawn
    for i, token in enumerate(tokens):
        if token < 0:
            sequence.computed += i
            return Gain(sequence, tokens[:i], first, len(draft), "error", NOTHING_TO_DRAW)
        try:
            sequence.append(token)
        except ConstraintError as error:
            sequence.computed += i
            constraint = sequence.params.constraint
            assert constraint is not None
            return Gain(
                sequence, tokens[:i], first, len(draft), "error", str(error), error_field=constraint.field
            )
        finish = sequence.finish()
        if finish is not None:
            sequence.computed += i
            return Gain(sequence, tokens[: i + 1], first, len(draft), finish, None)
    sequence.computed += len(tokens) - 1
    return Gain(sequence, tokens, first, len(draft), None, None)
