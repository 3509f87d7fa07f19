"""Law 1 for the native backend: what a row computes depends on its sequence and on nothing else, to the bit.

Pages are full of NaN before every run, so a line that is read before it was written shows.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenfold.backends.native import NativeProgram
from tests.helpers.batches import Part, step_batch
from tests.helpers.native_programs import FORMATS, LEVELS, FormatName, spoil, tiny_model
from tests.helpers.tiny_models import CONFIGS

POOL = 40
LONGEST = 150
MODELS = {
    # GQA of 2, three layers with a window of 7, less than a page.
    "mistral": tiny_model({**CONFIGS["mistral"], "max_position_embeddings": 256}),
    # Windows of 20 between full layers, norms of q and k, norms after the blocks.
    "gemma3": tiny_model({**CONFIGS["gemma3"], "max_position_embeddings": 256, "sliding_window": 20}),
    # 14 query heads of one KV head: more than an attention tile holds. Biases, and a soft-cap on the logits.
    "gemma3-one-kv-head": tiny_model(
        {**CONFIGS["gemma3-one-kv-head"], "max_position_embeddings": 256, "num_attention_heads": 14}
    ),
}

Lines = list[npt.NDArray[Any]]
CHUNKS = st.one_of(st.integers(1, 40), st.sampled_from([15, 16, 17, 31, 32, 33, 64, 65, 130]))


@functools.cache
def program(name: str, weights: FormatName, threads: int, max_rows: int, isa: str) -> NativeProgram:
    return MODELS[name].native(weights, threads=threads, max_rows=max_rows, isa=isa, kv_pages=POOL)


def alone(
    name: str, weights: FormatName, text: list[int], isa: str = LEVELS[0]
) -> tuple[npt.NDArray[np.float32], Lines]:
    """Logits after every token, and K and V, of one sequence in one step with nobody beside it."""
    single = program(name, weights, 1, LONGEST, isa)
    spoil(single)
    pages = list(range(-(-len(text) // 16)))
    output = single.step(step_batch(Part(tokens=text, pages=pages)))
    assert output.logits is not None
    return output.logits, MODELS[name].lines(single, pages, len(text))


class Running:
    """A sequence on its way through steps, and the logits it got so far."""

    def __init__(self, text: list[int], pages: list[int], cached: int = 0) -> None:
        self.text, self.pages, self.done = text, pages, cached
        self.logits: list[npt.NDArray[np.float32]] = []

    def part(self, rows: int) -> Part:
        return Part(tokens=self.text[self.done : self.done + rows], pages=self.pages, cached=self.done)


def run(data: st.DataObject, to: NativeProgram, running: list[Running], most: int) -> None:
    """Steps to the end, each with some of the sequences, in any order, by any number of rows."""
    while left := [one for one in running if one.done < len(one.text)]:
        room = most
        parts: list[tuple[Running, Part]] = []
        for one in data.draw(st.permutations(left)):
            rows = min(data.draw(CHUNKS), room, len(one.text) - one.done)
            if rows > 0:
                parts.append((one, one.part(rows)))
                room -= rows
        output = to.step(step_batch(*(part for _, part in parts)))
        assert output.logits is not None
        at = 0
        for one, part in parts:
            size = len(part.tokens)
            one.logits.append(output.logits[at : at + size])
            one.done += size
            at += size


def assert_same(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> None:
    assert one.dtype == other.dtype
    assert not np.issubdtype(one.dtype, np.floating) or np.isfinite(one).all()
    np.testing.assert_array_equal(one, other)


def texts(data: st.DataObject, count: int, longest: int = LONGEST) -> list[list[int]]:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    lengths = [data.draw(st.integers(1, longest)) for _ in range(count)]
    return [rng.integers(0, 96, length).tolist() for length in lengths]


case = given(
    data=st.data(),
    name=st.sampled_from(sorted(MODELS)),
    threads=st.integers(1, 4),
    max_rows=st.sampled_from([5, 17, 64, 200]),
)
many = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("weights", FORMATS)
@many
@case
def test_neighbours_chunks_pages_and_threads_change_no_bit(
    weights: FormatName, data: st.DataObject, name: str, threads: int, max_rows: int
) -> None:
    """Up to four sequences in any chunks, in any batches, over any pages, on any team have the logits, K and
    V that each has alone."""
    isa = data.draw(st.sampled_from(LEVELS))
    found = program(name, weights, threads, max_rows, isa)
    spoil(found)
    free = data.draw(st.permutations(range(POOL)))
    running = []
    for text in texts(data, data.draw(st.integers(1, 4))):
        size = -(-len(text) // 16)
        if size > len(free):
            break
        running.append(Running(text, free[:size]))
        free = free[size:]
    run(data, found, running, max_rows)
    for one in running:
        logits, lines = alone(name, weights, one.text)
        assert_same(np.concatenate(one.logits), logits)
        for mine, theirs in zip(MODELS[name].lines(found, one.pages, len(one.text)), lines, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("weights", FORMATS)
@many
@case
def test_shared_and_copied_pages_change_no_bit(
    weights: FormatName, data: st.DataObject, name: str, threads: int, max_rows: int
) -> None:
    """A sequence that begins as another one shares its full pages, copies the begun one (copy_rows, into a
    page of NaN), and goes on beside it; both have what each has alone, and the shared pages are unchanged."""
    found = program(name, weights, threads, max_rows, LEVELS[0])
    spoil(found)
    first, tail = texts(data, 2, 70)
    shared = data.draw(st.integers(1, len(first)))
    second = first[:shared] + tail
    pages = data.draw(st.permutations(range(POOL)))
    own = pages[: -(-len(first) // 16)]
    one = Running(first, own)
    ahead = data.draw(st.integers(shared, len(first)))
    other = Running(second, [], shared)
    one.text = first[:ahead]
    run(data, found, [one], max_rows)
    one.text = first
    fresh = pages[10 : 10 + -(-len(second) // 16) - shared // 16]
    if shared % 16:
        found.copy_rows(own[shared // 16], fresh[0], shared % 16)
    other.pages = own[: shared // 16] + fresh
    run(data, found, [one, other], max_rows)
    for sequence, cached in ((one, 0), (other, shared)):
        logits, lines = alone(name, weights, sequence.text)
        assert_same(np.concatenate(sequence.logits), logits[cached:])
        rows = len(sequence.text)
        for mine, theirs in zip(MODELS[name].lines(found, sequence.pages, rows), lines, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("weights", FORMATS)
def test_every_number_of_rows(weights: FormatName) -> None:
    """The last rows of a step are the same whether the step has 1 row, 2, ... or crosses any tile's size."""
    text = np.random.default_rng(1).integers(0, 96, LONGEST).tolist()
    for name in MODELS:
        logits, _ = alone(name, weights, text)
        for threads in (1, 3):
            found = program(name, weights, threads, 200, LEVELS[0])
            spoil(found)
            pages = list(range(10, 20))
            for rows in [*range(1, 41), 64, 65, 130]:
                if rows < LONGEST:
                    found.step(step_batch(Part(tokens=text[:-rows], pages=pages, wanted=[])))
                part = Part(tokens=text[-rows:], pages=pages, cached=LONGEST - rows)
                output = found.step(step_batch(part))
                assert output.logits is not None
                assert_same(output.logits, logits[-rows:])
