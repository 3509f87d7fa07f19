"""The recurrent head as a drafter."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import exp, inf

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
        self._batch = unroll_arrays(1, 0, floor)

    def begin(self, sequence: DraftSequence) -> None:
        """The head keeps nothing of a sequence."""

    def end(self, sequence: DraftSequence, learn: bool) -> None:
        """The head learns nothing while it serves."""

    def propose(self, sequences: Sequence[DraftSequence], lengths: Sequence[int]) -> list[Draft]:
        """A draft of at most so many tokens for each sequence; NO_DRAFT where the target's states are not at
        hand."""
        drafts = [NO_DRAFT] * len(sequences)
        ready = [
            index
            for index, sequence in enumerate(sequences)
            if sequence.features is not None and lengths[index] > 0
        ]
        if not ready:
            return drafts
        batch = self._filled([sequences[index] for index in ready], [lengths[index] for index in ready])
        output = self._program.unroll(batch)
        tokens, logprobs = output.tokens.tolist(), output.logprobs.tolist()
        for row, index in enumerate(ready):
            drafts[index] = _draft(tokens[row], logprobs[row], sequences[index].params.logit_bias)
        return drafts

    def close(self) -> None:
        """Frees the program."""
        self._program.close()

    def _filled(self, sequences: Sequence[DraftSequence], lengths: Sequence[int]) -> UnrollBatch:
        """What is to be drafted, in arrays that are made once: between two steps nothing of numpy is in the
        caches, and making seven arrays took as long as a third of a draft."""
        n = len(sequences)
        states = sequences[0].features
        assert states is not None, "only sequences with features are drafted for"
        batch = self._batch
        if batch.features.shape[1] != len(states) or len(batch.tokens) < n:
            batch = self._batch = unroll_arrays(max(n, len(batch.tokens)), len(states), self._floor)
        features, tokens, seed, position = batch.features, batch.tokens, batch.seed, batch.position
        for row, sequence in enumerate(sequences):
            features[row] = sequence.features
            tokens[row] = sequence.tokens[-1]
            seed[row] = sequence.seed
            position[row] = len(sequence.tokens)
            batch.temperature[row] = sequence.params.temperature
            batch.lengths[row] = lengths[row]
        if n == len(tokens):
            return batch
        return UnrollBatch(
            features=features[:n],
            tokens=tokens[:n],
            seed=seed[:n],
            position=position[:n],
            temperature=batch.temperature[:n],
            lengths=batch.lengths[:n],
            floor=batch.floor[:n],
        )


def unroll_arrays(sequences: int, width: int, floor: float) -> UnrollBatch:
    """A batch of zeros to be filled, for so many sequences with features of this width."""
    return UnrollBatch(
        features=np.zeros((sequences, width), np.float32),
        tokens=np.zeros(sequences, np.int32),
        seed=np.zeros(sequences, np.uint64),
        position=np.zeros(sequences, np.int64),
        temperature=np.zeros(sequences, np.float32),
        lengths=np.zeros(sequences, np.int32),
        floor=np.full(sequences, floor, np.float32),
    )


def _draft(tokens: list[int], logprobs: list[float], bias: dict[int, float]) -> Draft:
    """The draft up to the first place that has no token or a forbidden one."""
    survival: list[float] = []
    chance = 1.0
    for token, logprob in zip(tokens, logprobs, strict=True):
        if token < 0 or (bias and bias.get(token) == -inf):
            break
        chance *= exp(min(logprob, 0.0))
        survival.append(chance)
    if not survival:
        return NO_DRAFT
    return Draft(tokens[: len(survival)], survival, bisect_right(_SURE, survival[0]))
