"""A recurrent program that drafts from a script: a fake, for tests of who calls one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tenfold.backends.base import UnrollBatch, UnrollOutput


class FakeRecurrent:
    """Implements `tenfold.backends.base.RecurrentProgram`: drafts the token ``newest + 1, + 2, ...`` with the
    probabilities given, until the floor."""

    def __init__(self, probabilities: Sequence[float]) -> None:
        self.probabilities = probabilities
        self.closed = False
        self.batches: list[UnrollBatch] = []

    def unroll(self, batch: UnrollBatch) -> UnrollOutput:
        self.batches.append(batch)
        shape = (len(batch.tokens), int(batch.lengths.max()))
        tokens, logprobs = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
        for s, length in enumerate(batch.lengths):
            survival = 1.0
            for k in range(length):
                survival *= self.probabilities[k]
                tokens[s, k] = batch.tokens[s] + k + 1
                logprobs[s, k] = np.log(self.probabilities[k])
                if survival < batch.floor[s]:
                    break
        return UnrollOutput(tokens=tokens, logprobs=logprobs)

    def close(self) -> None:
        self.closed = True
