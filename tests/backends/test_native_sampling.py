"""The native sampler draws what the definition in `tenfold.backends.sampling` says.

Its scores are float32 where the definition's are float64, so a draw may differ where the two best scores lie
within `MARGIN`, or a filter's sum within `THRESHOLD` of its limit; everywhere else it must be equal.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenfold import _native
from tenfold.backends.base import SamplingBatch, StepOutput
from tenfold.backends.sampling import adjusted, gumbel, kept, sample
from tests.backends.test_sampling import sampling
from tests.helpers.batches import Part, greedy, step_batch
from tests.helpers.native_programs import LEVELS, lookup_program, wrapped

MARGIN = 1e-4
"""Beside the rounding of a sum of scaled logit and noise to float32, which counts where logits are large."""
THRESHOLD = 1e-6
"""Relative: of top_p's share of the mass."""
ROWS = 8

Logits = npt.NDArray[np.float32]


@functools.cache
def core(vocab: int, isa: str, threads: int = 2) -> Any:
    return lookup_program(np.zeros((1, vocab), np.float32), vocab, ROWS, isa=isa, threads=threads)


def draw(logits: Logits, batch: SamplingBatch, isa: str = LEVELS[0]) -> StepOutput:
    """Rows of logits through a program that has them as its own."""
    rows, vocab = logits.shape
    program = core(vocab, isa)
    # Tokens are rows of the table, and there are no more tokens than the vocabulary has.
    assert rows <= vocab
    program.write_rows(0, 0, logits, None, None)
    step = step_batch(Part(tokens=list(range(rows)), pages=[0]))
    output = wrapped(program).step(msgspec.structs.replace(step, sampling=batch))
    np.testing.assert_array_equal(output.logits, logits)
    return output


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**63 - 1),
    first=st.one_of(st.integers(0, 300_000), st.integers(2**31 - 300, 2**31 - 200)),
    count=st.integers(0, 199),
)
def test_noise_is_that_of_the_definition(seed: int, position: int, first: int, count: int) -> None:
    """The noise is the definition's up to float32 rounding, for any seed, position and token, from any
    first token on, and the ISA levels are equal to the bit."""
    noise = [_native.gumbel(isa, seed, position, first, count) for isa in LEVELS]
    exact = gumbel(seed, position, np.arange(first, first + count))
    for one in noise:
        assert one.shape == (count,)
        np.testing.assert_array_equal(one, noise[0])
    # A few units in the last place; around 0, where -log cancels, of 1.
    np.testing.assert_allclose(noise[0], exact, rtol=3e-7, atol=3e-7)


def test_noise_over_the_whole_range() -> None:
    """Among 4 million words there are those that make the extremes; they are right at every ISA level."""
    exact = gumbel(5, 6, np.arange(1 << 22))
    assert exact.min() < -2.6
    assert exact.max() > 14
    for isa in LEVELS:
        noise = _native.gumbel(isa, 5, 6, 0, 1 << 22)
        np.testing.assert_allclose(noise, exact, rtol=3e-7, atol=3e-7)


def test_noise_that_does_not_exist_is_refused() -> None:
    """Unknown ISA levels and tokens beyond int32 are refused."""
    for arguments in (("none", 1, 1, 0, 1), (LEVELS[0], 1, 1, -1, 1), (LEVELS[0], 1, 1, 2**31 - 1, 1)):
        with pytest.raises(ValueError, match="gumbel"):
            _native.gumbel(*arguments)


def acceptable(logits: Logits, batch: SamplingBatch, n: int) -> set[int]:
    """Tokens that row ``n`` may draw: one, but for scores within the margin and filters at their limit."""
    row = adjusted(logits[n], batch, n)
    if batch.temperature[n] == 0:
        return {int(row.argmax())}
    found: set[int] = set()
    for nudge in (0.0, -1.0, 1.0):
        near = msgspec.structs.replace(
            batch,
            top_p=np.where(batch.top_p < 1, batch.top_p * (1 + nudge * THRESHOLD), 1),
            min_p=np.minimum(batch.min_p.astype(np.float64) * (1 + nudge * 1e-12), 1),
        )
        ids = np.sort(kept(row, near, n))
        scaled = (row[ids] / batch.temperature[n]).astype(np.float64)
        scores = scaled + gumbel(int(batch.seed[n]), int(batch.position[n]), ids)
        best = scores.max()
        found |= set(ids[scores >= best - MARGIN - abs(best) * 2.0**-22].tolist())
    return found


def check(logits: Logits, batch: SamplingBatch) -> None:
    """Native draws and log-probabilities against the definition's."""
    law = sample(logits, batch)
    outputs = [draw(logits, batch, isa) for isa in LEVELS]
    for output in outputs:
        np.testing.assert_array_equal(output.tokens, outputs[0].tokens)
        np.testing.assert_array_equal(output.logprobs, outputs[0].logprobs)
        np.testing.assert_array_equal(output.top_logprobs, outputs[0].top_logprobs)
        np.testing.assert_array_equal(output.top_tokens, law.top_tokens)
    found = outputs[0]
    np.testing.assert_allclose(found.top_logprobs, law.top_logprobs, rtol=1e-6, atol=1e-5)
    for n, token in enumerate(found.tokens.tolist()):
        if token != law.tokens[n]:
            assert token in acceptable(logits, batch, n)
        else:
            assert found.logprobs[n] == pytest.approx(law.logprobs[n], rel=1e-6, abs=1e-5)


PENALTIES = st.fixed_dictionaries(
    {
        "repetition": st.sampled_from([1.0, 1.0, 0.5, 1.3, 10.0]),
        "presence": st.sampled_from([0.0, 0.0, -2.0, 0.7]),
        "frequency": st.sampled_from([0.0, 0.0, -1.0, 0.3]),
    }
)
COLUMNS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.one_of(st.sampled_from([0.0, 1e-6, 0.1, 1.0, 100.0]), st.floats(0.125, 3, width=32)),
    "top_k": st.sampled_from([0, 0, 1, 2, 5, 40, 64, 65, 2**31 - 1]),
    "top_p": st.one_of(st.just(1.0), st.just(1e-9), st.floats(2.0**-10, 1, width=32)),
    "min_p": st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1, width=32)),
    "seed": st.integers(0, 2**64 - 1),
    "position": st.integers(0, 2**40),
    "logprobs": st.sampled_from([-1, -1, 0, 1, 5]),
}


@st.composite
def batches(draw: st.DrawFn, rows: int, vocab: int) -> SamplingBatch:
    """Any parameters a row, with history and bias of its own."""
    columns = {
        name: np.array([draw(one) for _ in range(rows)], getattr(sampling(), name).dtype)
        for name, one in COLUMNS.items()
    }
    columns["logprobs"] = np.minimum(columns["logprobs"], vocab)
    penalties = [draw(PENALTIES) for _ in range(rows)]
    for name in ("repetition", "presence", "frequency"):
        columns[name] = np.array([one[name] for one in penalties], np.float32)
    tokens = st.integers(0, vocab - 1)
    history = [draw(st.dictionaries(tokens, st.integers(0, 5), max_size=8)) for _ in range(rows)]
    values = st.one_of(st.sampled_from([-np.inf, -100.0, 100.0]), st.floats(-3, 3, width=32))
    # A token may stand in a bias twice. The lowest is never forbidden, so that something is left.
    bias = [
        draw(st.lists(st.tuples(st.integers(min(1, vocab - 1), vocab - 1), values), max_size=8))
        for _ in range(rows)
    ]
    if vocab == 1:
        bias = [[] for _ in range(rows)]

    mask_rows = [draw(st.integers(-1, 2)) for _ in range(rows)]
    words = (vocab + 31) // 32
    masks = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2**32, (3, words), np.uint32)
    masks[0] = draw(st.sampled_from([0, 2**32 - 1]))
    masks[:, 0] |= 1  # the lowest, so that something is left

    def offsets(lists: list[Any]) -> Any:
        return np.cumsum([0, *(len(one) for one in lists)]).astype(np.int32)

    return SamplingBatch(
        **columns,
        history_offsets=offsets(history),
        history_tokens=np.array([token for one in history for token in one], np.int32),
        history_counts=np.array([count for one in history for count in one.values()], np.int32),
        bias_offsets=offsets(bias),
        bias_tokens=np.array([token for one in bias for token, _ in one], np.int32),
        bias_values=np.array([value for one in bias for _, value in one], np.float32),
        mask_rows=np.array(mask_rows, np.int32),
        masks=masks,
    )


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), vocab=st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 100, 130, 1000]))
def test_draws_are_those_of_the_definition(data: st.DataObject, vocab: int) -> None:
    """Greedy or not, with any filters, penalties, bias and log-probabilities, over any logits: some peaked,
    some flat, many equal, of any vocabulary."""
    rows = data.draw(st.integers(1, min(ROWS, vocab)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = rng.standard_normal((rows, vocab)) * data.draw(st.sampled_from([0.1, 1.0, 5.0, 30.0]))
    grid = data.draw(st.sampled_from([0.0, 0.0, 0.25, 2.0]))
    if grid:
        logits = np.round(logits / grid) * grid
    check(logits.astype(np.float32), data.draw(batches(rows, vocab)))


@settings(max_examples=300, deadline=None)
@given(
    value=st.floats(-20, 20, width=32),
    repetition=st.floats(0.5, 2, width=32),
    presence=st.floats(-2, 2, width=32),
    frequency=st.floats(-2, 2, width=32),
    count=st.integers(0, 9),
    bias=st.one_of(st.just(0.0), st.floats(-9, 9, width=32)),
)
def test_bias_and_penalties_are_equal_to_the_bit(
    value: float, repetition: float, presence: float, frequency: float, count: int, bias: float
) -> None:
    """The adjusted logit is the definition's, bit for bit: a rival with a lower id wins with that very
    number, and loses with the next smaller one."""
    batch = sampling(
        2,
        temperature=0.0,
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        history_offsets=[0, 1, 2],
        history_tokens=[1, 1],
        history_counts=[count, count],
        bias_offsets=[0, 1, 2],
        bias_tokens=[1, 1],
        bias_values=[bias, bias],
    )
    exact = adjusted(np.array([0, value], np.float32), batch, 0)[1]
    smaller = np.nextafter(exact, np.float32(-np.inf))
    logits = np.array([[exact, value], [smaller, value]], np.float32)
    for isa in LEVELS:
        assert draw(logits, batch, isa).tokens.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("logits", "changes"),
    [
        ([0, 0, 0, 0, -50, -50], {"top_p": 0.5}),  # two of four, exactly
        ([0, 0, 0, 0, -50, -50], {"top_p": 0.5000001}),
        ([0, 0, 0, 0, -50, -50], {"top_p": 0.4999999}),
        ([1, 1, 1, 1, 1, 1], {"top_k": 3}),  # ties go to the lowest ids
        ([0, 1, 1, 0, 1, 1], {"top_k": 3}),
        ([1, 1, 0.999, 1, 0, 0], {"min_p": 1.0}),  # only those equal to the best
        ([2, 2, 1, 1, 2, 0], {"min_p": np.nextafter(np.float32(np.exp(-1)), np.float32(0))}),
        ([2, 2, 1, 1, 2, 0], {"min_p": np.nextafter(np.float32(np.exp(-1)), np.float32(1))}),
        ([2, 2, 1, 1, 2, 0], {"top_k": 4, "top_p": 0.75, "temperature": 5.0}),
        ([0, 0, 0, 0, 0, 0], {"top_p": 1e-9}),  # one is always left
        ([3, 3, 3, 3, 3, 3], {"top_k": 5, "top_p": 0.99, "min_p": 0.5}),
        ([0, 0, 0, -np.inf, -np.inf, 0], {"top_p": 0.9}),
    ],
)
def test_filters_keep_the_same_tokens_at_their_limits(logits: list[float], changes: dict[str, Any]) -> None:
    """Where weights tie or sums meet a limit, what can be drawn is exactly what the definition keeps."""
    row = np.array(logits, np.float32)
    wanted = kept(row, sampling(**changes), 0)
    weights = np.exp((row[wanted] - row.max()) / changes.get("temperature", 1.0))
    assert weights.min() / weights.sum() > 0.05  # or the draws below might miss it
    seen: set[int] = set()
    for start in range(0, 600, 6):
        batch = sampling(6, **changes)
        batch.position[:] = np.arange(start, start + 6)
        seen |= set(draw(np.tile(row, (6, 1)), batch, LEVELS[start // 6 % len(LEVELS)]).tokens.tolist())
    assert seen == set(wanted.tolist())


def test_large_vocabularies_and_many_kept_tokens() -> None:
    """A nucleus of thousands of tokens, found by sorting a part at a time, is the definition's."""
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((ROWS, 3001)).astype(np.float32)
    batch = sampling(ROWS, top_p=0.97)
    batch.temperature[:] = [0.3, 0.5, 0.7, 1, 1.5, 2, 5, 50]
    check(logits, batch)


def test_far_away_tokens_win_when_the_noise_says_so() -> None:
    """No token is passed over that its noise can lift above the rest: 20 below the best, the token with the
    largest noise of thousands of positions is drawn."""
    token, vocab = 100, 130
    noise = np.array([gumbel(7, position, [0, token]) for position in range(8_000)])
    position = int((noise[:, 1] - noise[:, 0]).argmax())
    lead = float(noise[position, 1] - noise[position, 0]) - 0.01
    assert lead > 7
    logits = np.full((1, vocab), -1e4, np.float32)
    logits[0, [0, token]] = [0, -lead]
    batch = sampling(1)
    batch.position[:] = position
    for isa in LEVELS:
        assert draw(logits, batch, isa).tokens[0] == token


def test_nan_is_never_better_than_a_number() -> None:
    """A NaN among the logits is neither drawn greedily nor hides a larger logit before or after it."""
    for vocab in (17, 64, 100):
        for place in (0, 7, 15, 16):
            row = np.zeros((1, vocab), np.float32)
            row[0, place] = np.nan
            row[0, (place + 1) % 16] = 3
            row[0, vocab - 1] = 2
            for isa in LEVELS:
                token = int(draw_raw(row, isa).tokens[0])
                assert row[0, token] == 3


def test_where_nothing_can_be_drawn_nothing_is() -> None:
    """All logits NaN, or all forbidden: the token is -1 everywhere, as the definition says."""
    for value in (np.nan, -np.inf):
        row = np.full((1, 70), value, np.float32)
        assert sample(row, greedy(1)).tokens[0] == -1
        for isa in LEVELS:
            assert draw_raw(row, isa).tokens[0] == -1


def draw_raw(logits: Logits, isa: str) -> StepOutput:
    """Greedy, without a comparison of logits."""
    program = core(logits.shape[1], isa)
    program.write_rows(0, 0, logits, None, None)
    return wrapped(program).step(step_batch(Part(tokens=[0], pages=[0])))


def test_masks_that_do_not_fit_are_refused() -> None:
    """A row beyond the masks, or masks of another vocabulary: never a read outside of them."""
    logits = np.zeros((1, 64), np.float32)
    for row, words in ((1, 2), (-2, 2), (0, 1), (0, 3)):
        batch = msgspec.structs.replace(
            sampling(), mask_rows=np.array([row], np.int32), masks=np.ones((1, words), np.uint32)
        )
        with pytest.raises(ValueError, match="mask"):
            draw(logits, batch)
