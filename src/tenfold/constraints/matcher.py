"""A grammar's state along one answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tenfold.constraints.base import ConstraintError, UInt32s
from tenfold.constraints.messages import error_of


class GrammarMatcher:
    """See `tenfold.constraints.base.Matcher`. Made of a prototype that is at the beginning of its grammar."""

    def __init__(self, prototype: Any, vocab_size: int, ends: frozenset[int]) -> None:
        self._prototype = prototype
        self._matcher = prototype.deep_copy()
        self._accepted: list[int] = []
        self._bytes = (vocab_size + 31) // 32 * 4
        self.ends = ends
        """Tokens that end an answer which is complete. They are never accepted here: nothing follows them."""

    def fill(self, mask: UInt32s) -> None:
        """Writes which tokens may come next."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, self._bytes)
        self._raise()

    def accept(self, token: int) -> None:
        """Goes on by a token."""
        self._matcher.consume_token(token)
        self._raise()
        self._accepted.append(token)

    def fitting(self, tokens: Sequence[int]) -> int:
        """How many first tokens can come next, one after another. The state stays."""
        count: int = self._matcher.validate_tokens(list(tokens))
        return 0 if self._recovered() else count

    def forced(self) -> list[int]:
        """Tokens of the text that must come next, as the tokenizer writes it: a guess, no more. Empty where
        the text is open."""
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return [] if self._recovered() else tokens

    def rollback(self, count: int) -> None:
        """Takes back the last tokens accepted, and with them the error of what came after."""
        del self._accepted[len(self._accepted) - count :]
        if not self._recovered() and count:
            self._matcher.rollback(count)
        self._raise()

    def _recovered(self) -> bool:
        """Whether there was an error. It is for good, so that another matcher takes its place."""
        if not self._matcher.is_error():
            return False
        self._matcher = self._prototype.deep_copy()
        self._matcher.consume_tokens(self._accepted)
        return True

    def _raise(self) -> None:
        if self._matcher.is_error():
            what = error_of(self._matcher.get_error())
            raise ConstraintError(
                f"the constraint cannot be followed: it exceeds a limit of the compiler ({what})"
            )
