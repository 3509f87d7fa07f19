"""Curves that follow the steps that are made."""

from __future__ import annotations

import pytest

from tenfold.protocol import EnginePlan, StepTime
from tenfold.router.measured import KEPT, MeasuredTiming, guess_timing
from tenfold.router.timing import WorkerTiming

TRUTH = WorkerTiming(
    prefill_step=0.004, prefill_token=0.001, decode_step=0.003, decode_row=0.001, decode_context=1e-6
)


def steps(truth: WorkerTiming, factor: float = 1.0) -> list[StepTime]:
    """Of many sizes, mixed ones too."""
    found = []
    for tokens in (0, 3, 20, 100, 250, 512):
        for rows in (0, 1, 3, 8):
            context = rows * 200
            seconds = truth.chunk(tokens) + truth.decode(rows, context)
            found.append(StepTime(tokens, rows, context, rows, factor * seconds))
    return found


def test_curves_are_found_and_followed() -> None:
    """Promise: from steps of all sizes, prompts beside decodes too, come curves that tell what a step takes;
    and when the machine is twice as slow, they do so soon."""
    measured = MeasuredTiming(WorkerTiming(prefill_step=0.1, prefill_token=0.01, decode_step=0.1))
    assert not measured.fit()
    for factor in (1.0, 2.0):
        for _ in range(2 * KEPT):
            measured.add(steps(TRUTH, factor))
            measured.fit()
        found = measured.timing
        for tokens in (20, 512):
            assert found.chunk(tokens) == pytest.approx(factor * TRUTH.chunk(tokens), rel=0.15)
        for rows in (1, 8):
            assert found.decode(rows, 200 * rows) == pytest.approx(
                factor * TRUTH.decode(rows, 200 * rows), rel=0.15
            )
    assert not measured.fit()


def test_a_step_that_was_interrupted_counts_for_nothing() -> None:
    """Promise: one step of a minute (a process that was stopped) does not change the curves."""
    measured = MeasuredTiming(TRUTH)
    for _ in range(KEPT):
        measured.add(steps(TRUTH))
    measured.fit()
    before = measured.timing
    measured.add([StepTime(512, 0, 0, 0, 60.0), StepTime(0, 1, 200, 1, 60.0)])
    measured.fit()
    assert measured.timing.chunk(512) == pytest.approx(before.chunk(512), rel=0.05)
    assert measured.timing.decode(1, 200) == pytest.approx(before.decode(1, 200), rel=0.05)


def test_drafts_that_stand_make_tokens_cheaper() -> None:
    """Promise: a stream's seconds are those of its tokens, so two tokens a step halve them."""
    timings = []
    for tokens in (1, 2):
        measured = MeasuredTiming(TRUTH)
        measured.add([StepTime(512, 0, 0, 0, 0.5), *[StepTime(0, 1, 100, tokens, 0.01)] * 3])
        assert measured.fit()
        timings.append(measured.timing.decode(1, 100))
    assert timings[1] == pytest.approx(timings[0] / 2)


def test_the_guess_is_of_the_right_size() -> None:
    """Promise: before a step was made, the model's size and the threads say what steps may take; deadlines
    have room for ten times."""
    plan = EnginePlan(
        backend="native",
        threads=1,
        threads_why="",
        isa="avx512",
        isa_why="",
        vocab_size=49152,
        max_context=8192,
        kv_pages=100,
        kv_format="bf16",
        page_bytes=1,
        weight_bytes=96_400_000,
        format_bytes={},
        lossy_weights=0,
        weights=1,
        max_batch_tokens=512,
        max_running=64,
        load_ms=0,
    )
    guess = guess_timing(plan)
    assert guess.chunk_tokens == 512
    assert 0.15 < guess.chunk(512) < 15  # 1.5 s a thread of the reference machine
    assert 0.0006 < guess.decode(1, 0) < 0.06
