"""The seams of speculation.

A *drafter* guesses the next tokens of a sequence. A *speculator* decides per sequence and step which
drafter's guess is verified and how much of it. The engine verifies: the target computes a row for each
drafted token, draws every row's token with the noise of its own position, and a drafted token stands if and
only if it is the token that the target drew. So a text never depends on who drafted what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tenfold.backends.base import Floats
from tenfold.protocol import SamplingParams


class DraftSequence(Protocol):
    """What may be known of a sequence that runs. Read-only for drafters and speculators."""

    @property
    def id(self) -> str: ...

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far; the last one's KV row is not computed yet."""
        ...

    @property
    def prompt_length(self) -> int: ...

    @property
    def namespace(self) -> str:
        """Whose traffic it is: nothing learnt from one namespace may be seen in another."""
        ...

    @property
    def params(self) -> SamplingParams: ...

    @property
    def seed(self) -> int:
        """Of the noise: a coupled draft of the token at index ``i`` of ``tokens`` uses (seed, i, token)."""
        ...

    @property
    def features(self) -> Floats | None:
        """[width] the target's hidden states of the row that drew the last token; None where there are none
        (the program hands none back, or the sequence was resumed and its next step brings them)."""
        ...


class Draft(NamedTuple):
    """Guessed tokens, the next one first."""

    tokens: Sequence[int]
    survival: Sequence[float]
    """For each, the drafter's estimate that it and all before it stand; does not rise. As long as
    ``tokens``."""
    quality: int = 0
    """A small number that names the circumstance of the guess (length of a match, say). Controllers
    calibrate ``survival`` per drafter and quality."""


NO_DRAFT = Draft((), ())


class Drafter(Protocol):
    """Guesses. Holds no state that can go stale: what it needs of a sequence is in the sequence.

    What it learns from traffic (an index) is its own affair, bounded, and apart for each namespace.
    """

    name: str
    qualities: int
    """Values that ``Draft.quality`` can have: 0 to ``qualities - 1``."""

    def begin(self, sequence: DraftSequence) -> None:
        """The sequence starts (or is resumed)."""
        ...

    def end(self, sequence: DraftSequence, learn: bool) -> None:
        """The sequence leaves; ``learn``: it ended by itself and its tokens may be learnt from."""
        ...

    def propose(self, sequences: Sequence[DraftSequence], lengths: Sequence[int]) -> list[Draft]:
        """A draft of at most so many tokens for each sequence. One call for all, so that a head runs once."""
        ...

    def close(self) -> None:
        """Frees what it holds; nothing is called afterwards."""
        ...


class Outcome(NamedTuple):
    """What became of a draft in a step."""

    sequence: DraftSequence
    """As it is after the step."""
    drafted: int
    """Tokens verified, by whoever drafted them."""
    accepted: int
    """How many of them stood."""
    drawn: Sequence[int]
    """What the target committed: the accepted ones and one more, or fewer where the sequence ended."""
    features: Floats | None = None
    """[len(drawn), width] the target's hidden states of the rows that drew them, if the speculator wants
    features; overwritten by the next step."""


class Speculator(Protocol):
    """Decides what to verify. One thread calls all methods, in the order of the steps.

    Whatever it raises is caught: the engine drops the drafts of that step, counts the fault and goes on.
    """

    @property
    def wants_features(self) -> bool:
        """Whether sequences shall have ``features``; the same for good."""
        ...

    def begin(self, sequence: DraftSequence) -> None:
        """Before `propose` is asked about the sequence for the first time. One that ends with its first token
        has no beginning and no end here."""
        ...

    def end(self, sequence: DraftSequence, learn: bool) -> None:
        """The sequence leaves, after its last step was observed; see `Drafter.end`."""
        ...

    def propose(
        self, sequences: Sequence[DraftSequence], rows: int, limits: Sequence[int]
    ) -> list[Sequence[int]]:
        """Draft tokens for each sequence that decodes in the coming step; empty: none.

        ``rows``: rows that the step may have in all beyond one a sequence. ``limits``: the most draft tokens
        that each sequence has use for (what it may still generate, less one).

        A draft is cut before a token that would end the sequence (the row before it draws that anyway) and
        before a number that is no token (so -1 may fill up), to its limit, and where rows or free KV pages
        run out: `observe` tells what was left.
        """
        ...

    def observe(self, outcomes: Sequence[Outcome], rows: int, step_ms: float) -> None:
        """After a step: outcomes of all sequences that `propose` was asked about, the step's rows (prefill
        included) and how long the program took for it. A step that failed is not observed."""
        ...

    def report(self) -> SpeculationReport:
        """Counts so far, for metrics and the log."""
        ...

    def close(self) -> None:
        """Frees what it and its drafters hold; nothing is called afterwards."""
        ...


class DrafterReport(NamedTuple):
    """Counts of one drafter."""

    name: str
    drafts: int
    drafted_tokens: int
    accepted_tokens: int
    asks: int = 0
    """How often it was asked about a sequence, ..."""
    asking_ms: float = 0.0
    """... and how long that took in all."""


class SpeculationReport(NamedTuple):
    """What speculation did so far."""

    steps: int
    """Steps of a sequence in which it decoded."""
    committed_tokens: int
    drafters: tuple[DrafterReport, ...]
    idle: dict[str, int]
    """Why nothing was drafted in such a step, and how often: "load", "no draft", "not worth it" ..."""
    head_swaps: dict[str, int] | None = None
    """See `tenfold.protocol.SpeculationCounts`; None: no head is trained while serving."""
