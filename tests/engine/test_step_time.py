"""What the engine's own Python costs in a decode step."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tenfold.backends.base import StepBatch, StepOutput
from tenfold.engine.engine import Engine
from tests.helpers.fake_program import FakeProgram
from tests.helpers.requests import request


class NullProgram(FakeProgram):
    """Computes nothing, and counts the time spent in it."""

    seconds = 0.0

    def step(self, batch: StepBatch) -> StepOutput:
        """Draws token 5 for every row."""
        start = time.perf_counter()
        n = len(batch.logit_rows)
        output = StepOutput(
            tokens=np.full(n, 5, np.int32),
            logprobs=np.zeros(n, np.float32),
            top_tokens=np.zeros((n, 0), np.int32),
            top_logprobs=np.zeros((n, 0), np.float32),
        )
        self.seconds += time.perf_counter() - start
        return output


@pytest.mark.parametrize(("sequences", "limit_us"), [(1, 60), (8, 150)])
def test_python_time_of_a_decode_step(sequences: int, limit_us: float) -> None:
    """A decode step over 2000 cached rows a sequence, with penalties, costs less than its limit in the best
    of 20 rounds of 16 steps (one finished page a round)."""
    program = NullProgram(kv_pages=2000, max_context=4096)
    engine = Engine(program)
    for s in range(sequences):
        prompt = [(7 * s + i) % 39 + 1 for i in range(2000)]
        engine.add(request(f"r{s}", prompt, max_tokens=None, ignore_eos=True, repetition_penalty=1.1))
    while engine.load().generated_tokens < 16 * sequences:
        engine.step()
    rounds = []
    for _ in range(20):
        start, inside = time.perf_counter(), program.seconds
        for _ in range(16):
            assert len(engine.step()) == sequences
        rounds.append((time.perf_counter() - start - (program.seconds - inside)) / 16)
    assert min(rounds) * 1e6 < limit_us
