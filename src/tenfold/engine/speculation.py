"""The engine's side of a speculator: what it is asked and told, and what of its answers is used.

A speculator is not trusted. What is no token of the vocabulary is cut off, and what it raises costs the
drafts of a step and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Sized
from contextlib import contextmanager
from operator import index

import msgspec

from tenfold.constraints.base import Matcher
from tenfold.engine.sequence import Sequence
from tenfold.protocol import SpeculationCounts
from tenfold.speculate.base import Outcome, Speculator

log = logging.getLogger(__name__)


def forced_or(draft: Sized[int], matcher: Matcher, limit: int) -> Sized[int]:
    """The tokens that a constraint all but leaves no choice of, unless the draft has them and more. They
    cost no drafter; that text may be cut into other tokens, so they are verified as any."""
    forced = matcher.forced() if limit > 0 else []
    return draft if list(draft[: len(forced)]) == forced else forced


class Speculation:
    """One speculator and the sequences that it knows."""

    def __init__(self, speculator: Speculator, vocab_size: int) -> None:
        self.wants_features = speculator.wants_features
        self._speculator = speculator
        self._vocab_size = vocab_size
        self._known: set[Sequence] = set()
        self._faults = 0
        self._last = SpeculationCounts(
            steps=0, committed_tokens=0, drafted_tokens=0, accepted_tokens=0, idle={}, faults=0
        )

    def guess(self, sequences: list[Sequence], rows: int) -> list[Sized[int]]:
        """Drafts for sequences that decode: ``rows`` tokens in all at most, all of the vocabulary, none that
        would end its sequence, none beyond what the sequence may still generate, less one."""
        try:
            for sequence in sequences:
                if sequence not in self._known:
                    self._known.add(sequence)
                    self._speculator.begin(sequence)
            # Tuples: what is checked against afterwards must be what it was.
            limits = tuple([sequence.max_length - len(sequence.tokens) - 1 for sequence in sequences])
            proposed = self._speculator.propose(tuple(sequences), rows, limits)
            drafts: list[Sized[int]] = []
            for sequence, draft, limit in zip(sequences, proposed, limits, strict=True):
                if sequence.matcher is not None:
                    draft = forced_or(draft, sequence.matcher, limit)
                drafts.append(self._usable(sequence, draft, min(rows, limit)) if len(draft) else ())
                rows -= len(drafts[-1])
            return drafts
        except Exception:
            self._fault("propose")
            return [()] * len(sequences)

    def observe(self, outcomes: list[Outcome], rows: int, step_ms: float) -> None:
        """Tells of a step; see `tenfold.speculate.base.Speculator.observe`."""
        try:
            self._speculator.observe(outcomes, rows, step_ms)
        except Exception:
            self._fault("observe")

    def end(self, sequence: Sequence, learn: bool) -> None:
        """The sequence leaves."""
        if sequence in self._known:
            self._known.remove(sequence)
            with self._guard("end"):
                self._speculator.end(sequence, learn)

    def counts(self) -> SpeculationCounts:
        """What the speculator reports."""
        with self._guard("report"):
            report = self._speculator.report()
            self._last = SpeculationCounts(
                steps=report.steps,
                committed_tokens=report.committed_tokens,
                drafted_tokens=sum(drafter.drafted_tokens for drafter in report.drafters),
                accepted_tokens=sum(drafter.accepted_tokens for drafter in report.drafters),
                idle=dict(report.idle),
                faults=0,
                head_swaps=dict(report.head_swaps or {}),
            )
        return msgspec.structs.replace(self._last, faults=self._faults)

    def close(self) -> None:
        """Frees what the speculator holds."""
        with self._guard("close"):
            self._speculator.close()

    def _usable(self, sequence: Sequence, draft: Sized[int], most: int) -> list[int]:
        """The draft up to what is no token, does not fit the constraint, or would be the sequence's last:
        the row before draws that anyway."""
        usable = []
        for token in map(index, draft[: max(0, most)]):
            if not 0 <= token < self._vocab_size or token in sequence.stop_tokens:
                break
            usable.append(token)
        # A token that the constraint forbids cannot stand, nor can what is behind it.
        return usable if sequence.matcher is None else usable[: sequence.matcher.fitting(usable)]

    @contextmanager
    def _guard(self, call: str) -> Iterator[None]:
        """Whatever goes wrong inside is a fault. Not for what is called in every step: it costs too much."""
        try:
            yield
        except Exception:
            self._fault(call)

    def _fault(self, call: str) -> None:
        """Counts what is being handled, and logs the first time."""
        if not self._faults:
            log.exception(
                "the speculator failed in %s: its drafts are dropped, requests go on; "
                "further faults are counted and not logged",
                call,
            )
        self._faults += 1
