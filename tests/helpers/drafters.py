"""Drafters for tests: some know the text that will be, others spoil it, and some break the rules."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from tenfold.speculate.base import Draft, DraftSequence, Outcome, SpeculationReport
from tenfold.speculate.fixed import FixedSpeculator

Texts = Mapping[str, Sequence[int]]
"""By request: what it generates, from its prompt on."""
Guess = Callable[[DraftSequence, int], list[int]]
"""What to draft for a sequence that wants so many tokens."""


class FunctionDrafter:
    """Drafts what a function says, and remembers what it was told."""

    qualities = 1

    def __init__(self, name: str, guess: Guess) -> None:
        self.name = name
        self.begun: list[str] = []
        self.ended: list[tuple[str, bool, list[int]]] = []
        """Of each end: the request, whether to learn, and the output."""
        self.closed = False
        self._guess = guess

    def begin(self, sequence: DraftSequence) -> None:
        """Every sequence begins once before it ends."""
        assert sequence.id not in self.begun
        self.begun.append(sequence.id)

    def end(self, sequence: DraftSequence, learn: bool) -> None:
        """An id may be used again after its end."""
        self.begun.remove(sequence.id)
        self.ended.append((sequence.id, learn, sequence.tokens[sequence.prompt_length :]))

    def close(self) -> None:
        """Once."""
        assert not self.closed
        self.closed = True

    def propose(self, sequences: Sequence[DraftSequence], lengths: Sequence[int]) -> list[Draft]:
        """Only of sequences that have begun, and at least one token of each."""
        drafts = []
        for sequence, length in zip(sequences, lengths, strict=True):
            assert sequence.id in self.begun
            assert length > 0
            tokens = self._guess(sequence, length)
            drafts.append(Draft(tokens, [0.5 ** (i + 1) for i in range(len(tokens))]))
        return drafts


def truth(texts: Texts, sequence: DraftSequence, k: int) -> list[int]:
    """The next ``k`` tokens of the sequence, or as many as there will be."""
    at = len(sequence.tokens) - sequence.prompt_length
    return list(texts[sequence.id][at : at + k])


def drafters(texts: Texts, vocab: int) -> dict[str, FunctionDrafter]:
    """One of every kind, by name; each knows ``texts``."""
    dice = random.Random(1)

    def ask(sequence: DraftSequence, k: int) -> list[int]:
        return truth(texts, sequence, k)

    def wrong(sequence: DraftSequence, k: int) -> list[int]:
        return [(token + 1) % vocab for token in ask(sequence, k)]

    def every_third_wrong(sequence: DraftSequence, k: int) -> list[int]:
        at = len(sequence.tokens)
        return [
            (token + 1) % vocab if i % 3 == 0 else token for i, token in enumerate(ask(sequence, k), at + 1)
        ]

    def often_right(sequence: DraftSequence, k: int) -> list[int]:
        return [
            token if dice.random() < 0.7 else dice.randrange(vocab)
            for token in ask(sequence, dice.randint(0, k))
        ]

    def ending(sequence: DraftSequence, k: int) -> list[int]:
        """End of sequence (token 0) or a stop token among what is right."""
        tokens = ask(sequence, k)
        if tokens:
            stop = dice.choice([0, *sequence.params.stop_token_ids])
            tokens[dice.randrange(len(tokens))] = stop
        return tokens

    def outside(sequence: DraftSequence, k: int) -> list[int]:
        """A number that is no token, first or behind what is right."""
        tokens = ask(sequence, k)
        tokens.insert(dice.randint(0, len(tokens)), dice.choice([-1, vocab, -(2**40), 2**40]))
        return tokens

    def too_long(sequence: DraftSequence, k: int) -> list[int]:
        return [*ask(sequence, k + 50), *range(200)]

    return {
        drafter.name: drafter
        for drafter in (
            FunctionDrafter("random", lambda sequence, k: [dice.randrange(vocab) for _ in range(k)]),
            FunctionDrafter("wrong", wrong),
            FunctionDrafter("oracle", ask),
            FunctionDrafter("every third wrong", every_third_wrong),
            FunctionDrafter("often right", often_right),
            FunctionDrafter("ending", ending),
            FunctionDrafter("outside", outside),
            FunctionDrafter("too long", too_long),
        )
    }


class FailingSpeculator(FixedSpeculator):
    """Fails in the calls that ``fails`` says: the name of a method and how often it was called before."""

    def __init__(self, drafter: FunctionDrafter, k: int, fails: Callable[[str, int], bool]) -> None:
        super().__init__(drafter, k)
        self.failures = 0
        self._fails = fails
        self._calls: dict[str, int] = {}

    def _maybe(self, method: str) -> None:
        calls = self._calls.get(method, 0)
        self._calls[method] = calls + 1
        if self._fails(method, calls):
            self.failures += 1
            raise RuntimeError(f"planted in {method}")

    def begin(self, sequence: DraftSequence) -> None:
        """Fails, or begins."""
        super().begin(sequence)
        self._maybe("begin")

    def end(self, sequence: DraftSequence, learn: bool) -> None:
        """Fails, or ends."""
        super().end(sequence, learn)
        self._maybe("end")

    def propose(
        self, sequences: Sequence[DraftSequence], rows: int, limits: Sequence[int]
    ) -> list[Sequence[int]]:
        """Fails, or proposes for one sequence too few, or what is no list of integers."""
        self._maybe("propose")
        drafts = super().propose(sequences, rows, limits)
        if self._fails("few", self._calls["propose"]):
            self.failures += 1
            return drafts[1:]
        if self._fails("floats", self._calls["propose"]):
            self.failures += 1
            return [[0.5] for _ in drafts]  # type: ignore[list-item]
        return drafts

    def observe(self, outcomes: Sequence[Outcome], rows: int, step_ms: float) -> None:
        """Fails, or observes."""
        self._maybe("observe")
        super().observe(outcomes, rows, step_ms)

    def report(self) -> SpeculationReport:
        """Fails, or reports."""
        self._maybe("report")
        return super().report()
