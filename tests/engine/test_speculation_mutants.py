"""The identity suite can fail: each way in which engines got verification wrong is planted, and found.

They are those of rejection sampling, where a draft stands by chance. Here it stands if and only if it is the
token drawn, which makes some harmless: whether a drafter looks at its own confidence before it shows a draft
does not matter, and there is no residual to forget. Each of these has its counterpart that would do harm.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from tenfold.backends import sampling
from tenfold.backends.base import Program, StepBatch, StepOutput
from tenfold.backends.sampling import philox4x32, sample
from tenfold.engine import verify
from tenfold.engine.batch import BatchBuilder
from tenfold.engine.verify import standing
from tenfold.protocol import Request
from tenfold.speculate.fixed import FixedSpeculator
from tests.engine.test_speculation_identity import VOCAB, program
from tests.helpers.drafters import drafters
from tests.helpers.identity import any_requests, at_once, differences, play, texts_of
from tests.helpers.requests import request

Wrap = Callable[[Program], Program]


def wrong_in(requests: list[Request], name: str = "often right", wrap: Wrap | None = None) -> list[str]:
    """What the identity suite finds wrong in the answers to these requests."""
    law, _ = play(program(), at_once(requests))
    speculator = FixedSpeculator(drafters(texts_of(law), VOCAB)[name], 4)
    found, _ = play(program() if wrap is None else wrap(program()), at_once(requests), speculator)
    return differences(law, found)


def wrong() -> list[str]:
    """What it finds wrong in the answers to 20 requests of its own."""
    return [line for v in range(4) for line in wrong_in(any_requests(random.Random(50 + v), 5, VOCAB))]


def runs(batch: StepBatch) -> Iterator[tuple[int, int]]:
    """The wanted rows of each sequence that has a draft: the first and the one after the last."""
    owner = np.searchsorted(batch.row_offsets, batch.logit_rows, "right")
    for sequence in np.unique(owner).tolist():
        first, last = np.flatnonzero(owner == sequence)[[0, -1]].tolist()
        if last > first:
            yield first, last + 1


class Altered:
    """A program whose step is another's, altered."""

    def __init__(
        self, program: Program, alter: Callable[[StepBatch, StepOutput], npt.NDArray[np.int32]]
    ) -> None:
        self.info = program.info
        self.copy_rows, self.read_page = program.copy_rows, program.read_page
        self.write_page, self.close = program.write_page, program.close
        self._program = program
        self._alter = alter

    def step(self, batch: StepBatch) -> StepOutput:
        """The step with other tokens."""
        output = self._program.step(msgspec.structs.replace(batch, want_logits=True))
        return msgspec.structs.replace(output, tokens=self._alter(batch, output))


def test_without_a_fault_nothing_is_found() -> None:
    """What finds the faults below finds none where there is none."""
    assert wrong() == []


def test_a_draft_stands_because_its_drafter_is_sure_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the cut by a draft's own confidence: here the drafter may cut as it likes, but must not decide what
    is committed. (Sure of a token: here, if its id is even.)"""

    def by_confidence(draft: Sequence[int], drawn: list[int]) -> int:
        i = 0
        while i < len(draft) and (draft[i] == drawn[i] or draft[i] % 2 == 0):
            drawn[i] = draft[i]
            i += 1
        return i

    monkeypatch.setattr(verify, "standing", by_confidence)
    assert wrong() != []


Alter = Callable[[npt.NDArray[np.int64], int, int], None]


def plant_in_positions(monkeypatch: pytest.MonkeyPatch, alter: Alter) -> None:
    """Alters the noise's positions of the wanted rows of each sequence with a draft."""
    build = BatchBuilder.build

    def altered(*args: Any) -> StepBatch:
        batch = build(*args)
        for first, last in runs(batch):
            alter(batch.sampling.position, first, last)
        return batch

    monkeypatch.setattr(BatchBuilder, "build", altered)


def test_noise_of_a_position_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a sequence draw with the noise of the first."""

    def same(position: npt.NDArray[np.int64], first: int, last: int) -> None:
        position[first:last] = position[first]

    plant_in_positions(monkeypatch, same)
    assert wrong() != []


def test_the_token_after_the_draft_has_a_wrong_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bonus token draws with the noise of the position after its own."""

    def late(position: npt.NDArray[np.int64], first: int, last: int) -> None:
        position[last - 1] += 1

    plant_in_positions(monkeypatch, late)
    assert wrong() != []


def test_a_plausible_draft_stands() -> None:
    """For the missing residual: a draft is taken if it is among the target's three most likely tokens,
    without a look at what was drawn."""

    def lenient(batch: StepBatch, output: StepOutput) -> npt.NDArray[np.int32]:
        assert output.logits is not None
        tokens = output.tokens.copy()
        for first, last in runs(batch):
            for n in range(first, last - 1):
                draft = batch.tokens[batch.logit_rows[n] + 1]
                if draft in np.argsort(-output.logits[n])[:3]:
                    tokens[n] = draft
        return tokens

    requests = any_requests(random.Random(3), 8, VOCAB)
    plausible = FixedSpeculator(drafters({}, VOCAB)["random"], 4)
    law, _ = play(program(), at_once(requests))
    answers, _ = play(Altered(program(), lenient), at_once(requests), plausible)
    assert differences(law, answers) != []


def test_the_first_draft_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of a draft stands whatever was drawn."""

    def unverified(draft: Sequence[int], drawn: list[int]) -> int:
        drawn[: len(draft[:1])] = draft[:1]
        return standing(draft, drawn)

    monkeypatch.setattr(verify, "standing", unverified)
    assert wrong() != []


def test_penalties_forget_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of a sequence counts the tokens before the draft and no more."""
    history = BatchBuilder._history

    def stale(self: BatchBuilder, n: int, sequence: Any, draft: Sequence[int]) -> None:
        for i in range(1 + len(draft)):
            history(self, n + i, sequence, ())

    monkeypatch.setattr(BatchBuilder, "_history", stale)
    assert wrong() != []


SEED, POSITION, TOKEN = 24024, 64, 8
"""Where the noise is 20.04: one of 6e7 tokens has that much. Noise of 24 bits ends at 17.33."""


def rare() -> Request:
    """A request that draws `TOKEN` at `POSITION`, since its noise there is more than 24 bits can be."""
    prompt = [1 + i % 90 for i in range(POSITION - 6)]
    for bias in range(-30, 0):
        one = request("rare", prompt, seed=SEED, max_tokens=12, logit_bias={TOKEN: bias})
        law, _ = play(program(), at_once([one]))
        if law["rare"].tokens[6:7] == [TOKEN]:
            return one
    raise AssertionError("the token is never drawn")


def redrawn(batch: StepBatch, output: StepOutput) -> npt.NDArray[np.int32]:
    """The tokens that the reference sampler draws in the rows of sequences with a draft."""
    assert output.logits is not None
    tokens = output.tokens.copy()
    for first, last in runs(batch):
        drawn = sample(output.logits, batch.sampling).tokens
        tokens[first:last] = drawn[first:last]
    return tokens


def test_verification_draws_with_noise_of_24_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of drafts draw with another noise than rows without: too few bits, so that the rarest tokens are
    never drawn. (Were all noise of 24 bits, no answer would differ: then tests/backends compares it with its
    definition.)"""

    def coarse(counter: npt.NDArray[np.uint32], key: tuple[int, int]) -> npt.NDArray[np.uint32]:
        return philox4x32(counter, key) & np.uint32(0xFFFFFF00) | np.uint32(0x80)

    def wrap(program: Program) -> Program:
        return Altered(program, redrawn)

    one = rare()
    assert wrong_in([one], "oracle", wrap) == []
    monkeypatch.setattr(sampling, "philox4x32", coarse)
    assert wrong_in([one], "oracle", wrap) != []
