"""The head as a drafter: one call for all, the right noise, and nothing where it knows nothing."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tenfold.backends.base import Floats
from tenfold.protocol import SamplingParams
from tenfold.speculate.base import NO_DRAFT, Drafter
from tenfold.speculate.head import HeadDrafter
from tests.helpers.fake_recurrent import FakeRecurrent


class Sequence(msgspec.Struct):
    """A `DraftSequence`."""

    tokens: list[int]
    features: Floats | None
    params: SamplingParams = SamplingParams(temperature=0.7)
    seed: int = 2**64 - 1
    id: str = "s"
    prompt_length: int = 1
    namespace: str = ""


def features(value: float = 1.0) -> Floats:
    return np.full(6, value, np.float32)


def test_all_sequences_are_drafted_in_one_call_with_their_own_noise() -> None:
    """The unroll gets each sequence's newest token, the position after it, and its own seed, temperature,
    features and length; drafts come back in the order asked for."""
    program = FakeRecurrent([0.9, 0.5, 0.5])
    drafter: Drafter = HeadDrafter(program)
    sequences = [
        Sequence([5, 8], features(1.0)),
        Sequence([3, 1, 4], features(2.0), SamplingParams(temperature=0.0), seed=7),
    ]
    drafts = drafter.propose(sequences, [1, 3])
    assert [list(draft.tokens) for draft in drafts] == [[9], [5, 6, 7]]
    assert drafts[1].survival == pytest.approx([0.9, 0.45, 0.225])
    (batch,) = program.batches
    np.testing.assert_array_equal(batch.features, np.stack([features(1.0), features(2.0)]))
    assert batch.tokens.tolist() == [8, 4]
    assert batch.position.tolist() == [2, 3]
    assert batch.seed.tolist() == [2**64 - 1, 7]
    assert batch.temperature.tolist() == pytest.approx([0.7, 0.0])
    assert batch.lengths.tolist() == [1, 3]


def test_without_features_or_room_there_is_no_draft() -> None:
    """A sequence that was resumed has no features yet, one with no room wants no draft: the others are not
    held up, and a call for nobody is not made."""
    program = FakeRecurrent([0.9, 0.9])
    drafter = HeadDrafter(program)
    resumed, full, ready = Sequence([1], None), Sequence([2], features()), Sequence([3], features())
    drafts = drafter.propose([resumed, full, ready], [2, 0, 2])
    assert drafts[:2] == [NO_DRAFT, NO_DRAFT]
    assert list(drafts[2].tokens) == [4, 5]
    assert drafter.propose([resumed], [4]) == [NO_DRAFT]
    assert len(program.batches) == 1


def test_forbidden_tokens_are_not_drafted() -> None:
    """The target never draws a token that logit_bias forbids, so neither it nor what follows is verified."""
    drafter = HeadDrafter(FakeRecurrent([0.9] * 4))
    bias = {5: float("-inf"), 4: -3.0}
    params = SamplingParams(logit_bias=bias)
    middle, first = drafter.propose(
        [Sequence([2], features(), params), Sequence([4], features(), params)], [4, 4]
    )
    assert list(middle.tokens) == [3, 4]
    assert len(middle.survival) == 2
    assert first == NO_DRAFT


def test_drafts_end_at_the_floor() -> None:
    """What the head itself gives no chance is not drafted on: -1 ends a draft."""
    drafter = HeadDrafter(FakeRecurrent([0.5, 0.1, 0.9, 0.9]), floor=0.2)
    (draft,) = drafter.propose([Sequence([1], features())], [4])
    assert list(draft.tokens) == [2, 3]
    assert list(draft.survival) == pytest.approx([0.5, 0.05])


@pytest.mark.parametrize(("probability", "quality"), [(0.05, 0), (0.3, 1), (0.5, 2), (0.7, 3), (1.0, 4)])
def test_quality_tells_how_sure_the_head_is(probability: float, quality: int) -> None:
    """Controllers calibrate by it, so it is within the number announced and rises with the probability."""
    (draft,) = HeadDrafter(FakeRecurrent([probability])).propose([Sequence([1], features())], [1])
    assert draft.quality == quality
    assert 0 <= draft.quality < HeadDrafter.qualities
