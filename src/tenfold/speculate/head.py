"""The recurrent head as a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from tenfold.backends.base import RecurrentProgram, UnrollBatch
from tenfold.speculate.base import NO_DRAFT, Draft, DraftSequence

_SURE = (0.2, 0.4, 0.6, 0.8)
"""Where the probability of a draft's first token passes from one quality to the next."""


class HeadDrafter:
    """See `tenfold.speculate.base.Drafter`. One unroll drafts for all sequences.

    Drafts are drawn with the noise that the target will draw with, from the head's own distribution: of a
    sequence's parameters only the temperature matters, as filters and penalties would change few drafts.
    Tokens that ``logit_bias`` forbids are not drafted, nor what would follow them. Owns the
    program.
    """

    name = "head"
    qualities = len(_SURE) + 1

    def __init__(self, program: RecurrentProgram, floor: float = 0.05) -> None:
        """A draft ends where the head itself gives it less than ``floor`` of standing."""
        self._program = program
        self._floor = floor

    def begin(self, sequence: DraftSequence) -> None:
        """The head keeps nothing of a sequence."""

    def end(self, sequence: DraftSequence, learn: bool) -> None:
        """The head learns nothing while it serves."""

    def propose(self, sequences: Sequence[DraftSequence], lengths: Sequence[int]) -> list[Draft]:
        """A draft of at most so many tokens for each sequence; NO_DRAFT where the target's states are not at
        hand."""
        drafts = [NO_DRAFT] * len(sequences)
        ready, features = [], []
        for index, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            states = sequence.features
            if states is not None and length > 0:
                ready.append(index)
                features.append(states)
        if not ready:
            return drafts
        chosen = [sequences[index] for index in ready]
        output = self._program.unroll(
            UnrollBatch(
                features=np.ascontiguousarray(np.stack(features), dtype=np.float32),
                tokens=np.array([sequence.tokens[-1] for sequence in chosen], dtype=np.int32),
                seed=np.array([sequence.seed for sequence in chosen], dtype=np.uint64),
                position=np.array([len(sequence.tokens) for sequence in chosen], dtype=np.int64),
                temperature=np.array([sequence.params.temperature for sequence in chosen], dtype=np.float32),
                lengths=np.array([lengths[index] for index in ready], dtype=np.int32),
                floor=np.full(len(ready), self._floor, dtype=np.float32),
            )
        )
        probabilities = np.exp(output.logprobs.astype(np.float64)).clip(max=1.0)
        for row, index in enumerate(ready):
            drafts[index] = _draft(
                output.tokens[row].tolist(), probabilities[row].tolist(), sequences[index].params.logit_bias
            )
        return drafts

    def close(self) -> None:
        """Frees the program."""
        self._program.close()


def _draft(tokens: list[int], probabilities: list[float], bias: dict[int, float]) -> Draft:
    """The draft up to the first place that has no token or a forbidden one."""
    count = next(
        (i for i, token in enumerate(tokens) if token < 0 or bias.get(token) == float("-inf")), len(tokens)
    )
    if count == 0:
        return NO_DRAFT
    return Draft(
        tokens=tokens[:count],
        survival=list(accumulate(probabilities[:count], mul)),
        quality=int(np.searchsorted(_SURE, probabilities[0], side="right")),
    )
