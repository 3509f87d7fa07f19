"""Raw steps, streams through an engine, and the text they are made of."""

from __future__ import annotations

import pytest

from tenfold.bench.engine_streams import run_streams
from tenfold.bench.prompts import questions, windows
from tenfold.bench.stepping import OneSequence, joined
from tenfold.engine.engine import Engine
from tests.helpers.fake_program import FakeProgram
from tests.helpers.requests import request, run

IDS = [1 + i * 7 % 39 for i in range(100)]


def last_token(program: FakeProgram, first_page: int) -> int:
    """The token after `IDS`, with a prefill of 60 and single steps from there."""
    sequence = OneSequence(program, first_page, IDS)
    for batch in sequence.prefill(60):
        program.step(batch)
    return int([program.step(batch) for batch in sequence.decode(60, 40)][-1].tokens[0])


@pytest.mark.parametrize(("max_rows", "first_page"), [(512, 0), (7, 0), (60, 9)])
def test_a_measured_sequence_is_the_real_one(max_rows: int, first_page: int) -> None:
    """What is measured gives the token that an engine gives, in whatever chunks, and again when it is
    repeated over the same pages."""
    served = run(Engine(FakeProgram()), [request("a", IDS, max_tokens=1, temperature=0.0)])["a"].tokens
    program = FakeProgram(max_rows=max_rows)
    assert [last_token(program, first_page) for _ in range(2)] == [served[0]] * 2


def test_every_row_of_a_verify_step_is_drawn() -> None:
    """A step of several rows with logits of all draws what the steps of one row draw."""
    program = FakeProgram()
    sequence = OneSequence(program, 0, IDS)
    for batch in sequence.prefill(60):
        program.step(batch)
    singly = [int(program.step(batch).tokens[0]) for batch in sequence.decode(60, 8)]
    assert program.step(sequence.batch(60, 8, wanted=8)).tokens.tolist() == singly


def test_sequences_together_draw_what_each_draws_alone() -> None:
    """A joined step keeps every sequence's own pages, position and length."""
    program = FakeProgram()
    together = [OneSequence(program, 7 * number, IDS[number : 60 + 9 * number]) for number in range(4)]
    cached = [59 + 8 * number - 1 for number in range(4)]
    for one, rows in zip(together, cached, strict=True):
        one.time(one.prefill(rows))
    batches = [one.batch(rows, 1, wanted=1) for one, rows in zip(together, cached, strict=True)]
    alone = [int(program.step(batch).tokens[0]) for batch in batches]
    assert program.step(joined(batches)).tokens.tolist() == alone
    assert len(set(alone)) > 1


def test_a_prompt_beyond_the_context_is_refused() -> None:
    """With the context's size and what would be needed."""
    with pytest.raises(ValueError, match="64 tokens; this measurement needs 100"):
        OneSequence(FakeProgram(max_context=64), 0, IDS)


def test_streams_give_all_their_tokens() -> None:
    """Each stream gets its tokens, with end of sequence ignored, and leaves nothing behind."""
    engine = Engine(FakeProgram())
    prompts = [IDS[:20], IDS[5:40], IDS[:33]]
    found = run_streams(engine, prompts, 30)
    assert [len(output) for output in found.outputs] == [30, 30, 30]
    assert found.tokens_per_s > 0
    alone = [run_streams(Engine(FakeProgram()), [prompt], 30).outputs[0] for prompt in prompts]
    assert found.outputs == alone
    assert not engine.has_work


def test_a_stream_that_fails_is_no_measurement() -> None:
    """The error is raised, not averaged in."""
    program = FakeProgram()
    engine = Engine(program)
    program.failures.append(RuntimeError("out of luck"))
    with pytest.raises(RuntimeError, match="out of luck"):
        run_streams(engine, [IDS[:20]], 5)


def test_texts_differ_and_are_long_enough() -> None:
    """Windows do not overlap; questions are all different; too much is refused."""
    parts = windows(lambda text: [ord(char) for char in text], 8, 300)
    assert [len(part) for part in parts] == [300] * 8
    assert len({tuple(part) for part in parts}) == 8
    assert len({chat[0]["content"] for chat in questions(500)}) == 500
    with pytest.raises(ValueError, match="800000 are needed"):
        windows(lambda text: [ord(char) for char in text], 8, 100_000)
