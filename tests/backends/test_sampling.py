"""The reference sampler draws what its definition says."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.backends import sampling as reference
from tenfold.backends.base import SamplingBatch
from tenfold.backends.sampling import Draws, adjusted, gumbel, kept, log_softmax, philox4x32, sample

ONES = 0xFFFFFFFF


def sampling(n: int = 1, **changes: Any) -> SamplingBatch:
    """``n`` rows at temperature 1 without filters, but for the changes."""
    fields: dict[str, Any] = {
        "temperature": np.ones(n, np.float32),
        "top_k": np.zeros(n, np.int32),
        "top_p": np.ones(n, np.float32),
        "min_p": np.zeros(n, np.float32),
        "repetition": np.ones(n, np.float32),
        "presence": np.zeros(n, np.float32),
        "frequency": np.zeros(n, np.float32),
        "seed": np.full(n, 7, np.uint64),
        "position": np.arange(n, dtype=np.int64),
        "history_offsets": np.zeros(n + 1, np.int32),
        "history_tokens": np.zeros(0, np.int32),
        "history_counts": np.zeros(0, np.int32),
        "bias_offsets": np.zeros(n + 1, np.int32),
        "bias_tokens": np.zeros(0, np.int32),
        "bias_values": np.zeros(0, np.float32),
        "logprobs": np.full(n, -1, np.int32),
    }
    for name, value in changes.items():
        like = fields[name]
        assert isinstance(like, np.ndarray)
        is_column = not name.startswith(("history_", "bias_"))
        fields[name] = np.full(n, value, like.dtype) if is_column else np.array(value, like.dtype)
    return SamplingBatch(**fields)


def draw(row: npt.ArrayLike, **changes: Any) -> Draws:
    """Draws once from one row."""
    return sample(np.array([row], np.float32), sampling(**changes))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ONES] * 4, (ONES, ONES), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: tuple[int, int], expected: list[int]) -> None:
    """The generator is Philox4x32-10: the known answers published with Random123."""
    assert philox4x32(np.array([counter], np.uint32), key)[0].tolist() == expected


def test_noise_is_wired_to_the_words_that_the_definition_names() -> None:
    """Seed, position and token each reach their own word of key and counter, high halves too."""
    seed, position, token = 0x0123456789ABCDEF, 0x1122334455667788, 4 * 1000 + 3
    counter = np.array([[1000, 0x55667788, 0x11223344, 0]], np.uint32)
    word = int(philox4x32(counter, (0x89ABCDEF, 0x01234567))[0, 3])
    v = float(np.float32(word) * np.float32(2.0**-32))
    assert word > 2**25  # so that the half does not show
    assert gumbel(seed, position, [token])[0] == pytest.approx(-math.log(-math.log1p(-v)), rel=1e-14)


def test_noise_of_a_token_does_not_depend_on_the_others() -> None:
    """The noise is a function of (seed, position, token): asked alone, together, in any order, twice."""
    together = gumbel(3, 5, np.arange(100))
    mixed = np.array([99, 0, 42, 42, 7])
    assert (gumbel(3, 5, mixed) == together[mixed]).all()
    assert [gumbel(3, 5, [token])[0] for token in (0, 42, 99)] == together[[0, 42, 99]].tolist()


@pytest.mark.parametrize(
    ("word", "noise"),
    [
        (0, -math.log(-math.log1p(-(2.0**-33)))),
        (1, -math.log(-math.log1p(-1.5 * 2.0**-32))),
        (1 << 23, -math.log(-math.log1p(-float(np.float32(2**23 + 0.5)) * 2.0**-32))),
        (1 << 31, -math.log(math.log(2))),
        (ONES - 300, -math.log(-math.log(2.0**-24))),
        (ONES, -math.log(-math.log(2.0**-24))),
    ],
)
def test_noise_of_extreme_words(monkeypatch: pytest.MonkeyPatch, word: int, noise: float) -> None:
    """The smallest words make finite, distinct, large noise; the largest, whose v would round to 1, noise
    that is finite."""
    words = np.full((1, 4), word, np.uint32)
    monkeypatch.setattr(reference, "philox4x32", lambda counter, key: words)
    assert gumbel(1, 2, [3])[0] == pytest.approx(noise, rel=1e-14)


def test_upper_tail_of_the_noise_is_fine_grained() -> None:
    """Among 2**22 numbers the largest do not coincide, and the maximum lies where a Gumbel's would."""
    top = np.sort(gumbel(11, 0, np.arange(1 << 22)))[-1000:]
    assert len(np.unique(top)) >= 999
    assert abs(top[-1] - 22 * math.log(2)) < 7  # log n + Gumbel: outside with probability 1e-3


LOGITS = np.array([2.0, 1.0, 0.5, 0.5, 0.0, -0.5, -1.0, -3.0], np.float32)


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({}, range(8)),
        ({"temperature": 0.7}, range(8)),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_p": 0.9}, [0, 1, 2, 3, 4]),
        ({"min_p": 0.2}, [0, 1, 2, 3]),
        ({"top_k": 5, "top_p": 0.8, "min_p": 0.1, "temperature": 1.3}, [0, 1, 2, 3]),
    ],
)
def test_draws_follow_the_softmax_of_what_is_left(changes: dict[str, Any], ids: list[int]) -> None:
    """Over many positions the draws are a sample of the filtered softmax (chi-square at 99.9 %)."""
    n = 20_000
    tokens = sample(np.tile(LOGITS, (n, 1)), sampling(n, **changes)).tokens
    counts = np.bincount(tokens, minlength=len(LOGITS))
    weights = np.zeros(len(LOGITS))
    weights[list(ids)] = np.exp(LOGITS[list(ids)].astype(np.float64) / float(changes.get("temperature", 1.0)))
    expected = n * weights / weights.sum()
    assert counts[expected == 0].sum() == 0
    left = expected > 0
    chi2 = float(((counts[left] - expected[left]) ** 2 / expected[left]).sum())
    critical = {3: 13.8, 4: 16.3, 5: 18.5, 8: 24.3}[int(left.sum())]
    assert chi2 < critical


def test_neighbouring_seeds_and_positions_are_independent() -> None:
    """Draws at (seed, position) and (seed + 1, position), (seed, position + 1) agree only as often as chance
    has it."""
    n, vocab = 4000, 16
    flat = np.zeros((n, vocab), np.float32)
    one = sample(flat, sampling(n)).tokens
    other = sample(flat, sampling(n, seed=8)).tokens
    for pair in ((one, other), (one[1:], one[:-1])):
        assert abs((pair[0] == pair[1]).mean() - 1 / vocab) < 5 * math.sqrt(1 / vocab / n)


def test_ties_go_to_the_lowest_ids() -> None:
    """Of equal logits greedy takes the lowest id, top_k keeps exactly k, top_p no more than it needs."""
    row = np.array([0, 3, 3, 3, 3], np.float32)
    assert draw(row, temperature=0.0).tokens[0] == 1
    assert kept(row, sampling(top_k=2), 0).tolist() == [1, 2]
    assert kept(row, sampling(top_p=0.4), 0).tolist() == [1, 2]


@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=12),
    top_k=st.integers(0, 14),
    top_p=st.floats(2.0**-20, 1, width=32),
    min_p=st.floats(0, 1, width=32),
    temperature=st.sampled_from([1e-6, 0.1, 1.0, 5.0]),
)
def test_filters_keep_what_their_words_say(
    logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    """Each filter against its own sentence, on a plain sorted list; at least one token is always left."""
    row = np.array(logits, np.float32)
    scaled = [float(value / np.float32(temperature)) for value in row]
    ids = sorted(range(len(row)), key=lambda i: (-row[i], i))
    ids = ids[:top_k] if top_k else ids
    weight = {i: math.exp(scaled[i] - scaled[ids[0]]) for i in ids}
    total = sum(weight.values())
    if top_p < 1:
        reached, nucleus = 0.0, []
        for i in ids:
            if reached >= top_p * total:
                break
            nucleus.append(i)
            reached += weight[i]
            if abs(reached - top_p * total) < 1e-9 * total:
                return  # within rounding of the threshold: either is right
        ids = nucleus
    expected = [i for i in ids if weight[i] >= min_p]
    changes: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
    result = kept(row, sampling(**changes), 0).tolist()
    assert result
    assert result == expected


def test_bias_and_penalties() -> None:
    """Bias is added first; repetition divides a positive and multiplies a negative logit of any token seen;
    presence and frequency count the output only."""
    row = np.array([2, -2, 4, 1, 0], np.float32)
    batch = sampling(
        repetition=2.0,
        presence=0.5,
        frequency=0.25,
        history_offsets=[0, 3],
        history_tokens=[0, 1, 2],
        history_counts=[0, 3, 1],
        bias_offsets=[0, 3],
        bias_tokens=[2, 2, 4],
        bias_values=[-1.0, -1.0, -np.inf],
    )
    assert adjusted(row, batch, 0).tolist() == [1, -4 - 0.75 - 0.5, 1 - 0.25 - 0.5, 1, -np.inf]
    assert row.tolist() == [2, -2, 4, 1, 0]


def test_forbidden_tokens_are_never_drawn() -> None:
    """A bias of -inf forbids a token, however hot the sampling and however likely the token."""
    n = 500
    offsets = np.arange(n + 1)
    batch = sampling(
        n, temperature=50.0, bias_offsets=offsets, bias_tokens=[3] * n, bias_values=[-np.inf] * n
    )
    logits = np.tile(np.array([0, 0, 0, 30], np.float32), (n, 1))
    assert 3 not in sample(logits, batch).tokens


def test_rows_have_their_own_history_and_bias() -> None:
    """The offsets give each row its own slice."""
    logits = np.tile(np.array([1, 1, 1, 1], np.float32), (3, 1))
    batch = sampling(
        3,
        temperature=0.0,
        presence=0.5,
        history_offsets=[0, 1, 1, 3],
        history_tokens=[0, 0, 1],
        history_counts=[1, 1, 1],
        bias_offsets=[0, 0, 1, 1],
        bias_tokens=[3],
        bias_values=[2.0],
    )
    assert sample(logits, batch).tokens.tolist() == [1, 3, 2]


def test_logprobs_are_the_models_own() -> None:
    """Log-probabilities ignore bias, penalties, temperature and filters; rows that ask for none or fewer are
    padded."""
    logits = np.array([[0, 2, 1, 2], [3, 0, 0, 1], [0, 0, 0, 9]], np.float32)
    batch = sampling(
        3, temperature=0.0, bias_offsets=[0, 1, 1, 1], bias_tokens=[0], bias_values=[50.0], logprobs=-1
    )
    batch.logprobs[:] = [3, 0, -1]
    draws = sample(logits, batch)
    own = log_softmax(logits[0])
    assert draws.tokens.tolist() == [0, 0, 3]
    assert draws.top_tokens.tolist() == [[1, 3, 2], [-1] * 3, [-1] * 3]
    assert draws.top_logprobs[0].tolist() == pytest.approx(own[[1, 3, 2]].tolist(), rel=1e-6)
    assert draws.logprobs[0] == pytest.approx(own[0], rel=1e-6)
    assert draws.logprobs[1] == pytest.approx(3 - math.log(math.exp(3) + 2 + math.e), rel=1e-5)
    assert draws.logprobs[2] == 0
    assert math.fsum(np.exp(own)) == pytest.approx(1)


def test_rows_must_match() -> None:
    """A batch with a different number of rows is refused."""
    with pytest.raises(ValueError, match="2 rows of logits, but 3"):
        sample(np.zeros((2, 4), np.float32), sampling(3))


def test_a_mask_comes_after_bias_and_before_every_filter() -> None:
    """What it forbids no bias brings back, and it takes no place in top_k, no share in top_p and is no
    measure for min_p. Log-probabilities are the model's own, as if there were none."""
    row = np.array([[5.0, 4.0, 3.0, 2.0, 1.0]], np.float32)
    mask: dict[str, Any] = {"mask_rows": [0], "masks": [[0b11100]]}

    def masked(**changes: Any) -> SamplingBatch:
        batch = sampling(**changes)
        return msgspec.structs.replace(
            batch, mask_rows=np.array(mask["mask_rows"], np.int32), masks=np.array(mask["masks"], np.uint32)
        )

    assert sample(row, masked(temperature=0.0)).tokens.tolist() == [2]
    for filters in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0}):
        assert sample(row, masked(**filters)).tokens.tolist() == [2]
    biased = masked(temperature=0.0, bias_offsets=[0, 1], bias_tokens=[0], bias_values=[100.0])
    assert sample(row, biased).tokens.tolist() == [2]
    forbidden = masked(bias_offsets=[0, 3], bias_tokens=[2, 3, 4], bias_values=[-np.inf] * 3)
    assert sample(row, forbidden).tokens.tolist() == [-1]
    with_logprobs = sample(row, masked(temperature=0.0, logprobs=2))
    own = log_softmax(row[0])
    assert with_logprobs.logprobs[0] == pytest.approx(own[2])
    assert with_logprobs.top_tokens.tolist() == [[0, 1]]
    seen = {int(sample(row, masked(position=position)).tokens[0]) for position in range(200)}
    assert seen == {2, 3, 4}
    mask["mask_rows"] = [-1]
    assert sample(row, masked(temperature=0.0)).tokens.tolist() == [0]
