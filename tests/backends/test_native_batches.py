"""Batches and programs that lie are refused with words, before anything is read or written by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.backends.base import SamplingBatch, StepBatch, StepOutput
from tenfold.backends.native import NativeProgram
from tenfold.graph.builder import GraphBuilder
from tests.backends.test_sampling import sampling
from tests.helpers.batches import Part, step_batch
from tests.helpers.native_programs import TinyModel, core_program, spoil, tiny_model
from tests.helpers.tiny_models import CONFIGS, random_weights

MODEL = tiny_model(CONFIGS["mistral"])
PROGRAM = MODEL.native("q8", threads=2, max_rows=40, max_logit_rows=8)
LOW, HIGH = -(2**31), 2**31 - 1


def good() -> StepBatch:
    """Two sequences, one of them begun, with five rows, three of them wanted."""
    return step_batch(
        Part(tokens=[1, 2, 3], pages=[3], wanted=[0, 2]),
        Part(tokens=[4, 5], pages=[5, 4], cached=15, wanted=[1]),
    )


def check_drawn(output: StepOutput) -> None:
    """Tokens of the vocabulary; -1 in exactly the rows whose logits hold no number above -inf."""
    assert output.logits is not None
    drawable = (output.logits > -np.inf).any(axis=1)
    np.testing.assert_array_equal(output.tokens >= 0, drawable)
    assert ((output.tokens >= -1) & (output.tokens < 96)).all()


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def replaced(**changes: object) -> Callable[[StepBatch], StepBatch]:
    return lambda batch: msgspec.structs.replace(batch, **changes)


def drawing(**changes: Any) -> Callable[[StepBatch], StepBatch]:
    return lambda batch: msgspec.structs.replace(batch, sampling=sampling(3, **changes))


def many_rows(rows: int, wanted: int) -> Callable[[StepBatch], StepBatch]:
    part = Part(tokens=[1] * rows, pages=[0, 1, 2], wanted=range(wanted))
    return lambda _: step_batch(part)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (replaced(tokens=ints(1, 2, 96, 4, 5)), "token 96"),
        (replaced(tokens=ints(1, -1, 2, 4, 5)), "token -1"),
        (replaced(tokens=ints(1, HIGH, 2, 4, 5)), "token 2147483647"),
        (replaced(tokens=ints(), positions=ints()), "0 rows"),
        (replaced(positions=ints(0, 1)), "positions has 2 entries, expected 5"),
        (replaced(row_offsets=ints(0, 3)), "row_offsets has 2"),
        (replaced(row_offsets=ints(0, 3, 4)), "row_offsets do not cover"),
        (replaced(row_offsets=ints(1, 3, 5)), "row_offsets do not cover"),
        (replaced(row_offsets=ints(0, 5, 5)), "no rows"),
        (replaced(row_offsets=ints(0, -1, 5)), "descend"),
        (replaced(row_offsets=ints(0, HIGH, 5)), "too short"),
        (replaced(row_offsets=ints(0, LOW, 5)), "descend"),
        (replaced(cached_rows=ints(-1, 15)), "cached_rows is negative"),
        (replaced(cached_rows=ints(0, 31)), "page table is too short"),
        (replaced(cached_rows=ints(14, 15)), "page table is too short"),
        (replaced(cached_rows=ints(HIGH, 15)), "page table is too short"),
        (replaced(cached_rows=ints(0)), "row_offsets has 3 entries, expected 2"),
        (replaced(page_offsets=ints(0, 1, 2)), "page_offsets do not cover"),
        (replaced(page_offsets=ints(0, 4, 3)), "page_offsets descend"),
        (replaced(page_offsets=ints(0, -1, 3)), "page_offsets descend"),
        (replaced(page_offsets=ints(0, LOW, 3)), "page_offsets descend"),
        (replaced(page_offsets=ints(0, 0, 3)), "page table is too short"),
        (replaced(pages=ints(3, 5, 12)), "page out of range"),
        (replaced(pages=ints(3, -1, 4)), "page out of range"),
        (replaced(pages=ints(LOW, 5, 4)), "page out of range"),
        (replaced(pages=ints(4, 5, 4)), "same cache line"),
        (replaced(pages=ints(3, 4, 4), cached_rows=ints(0, 15), page_offsets=ints(0, 1, 3)), None),
        (replaced(logit_rows=ints(0, 0, 1)), "ascend"),
        (replaced(logit_rows=ints(0, 2, 1)), "ascend"),
        (replaced(logit_rows=ints(0, 1, 5)), "within the rows"),
        (replaced(logit_rows=ints(-1, 1, 2)), "within the rows"),
        (replaced(logit_rows=ints(0, 1)), "temperature has 3 entries, expected 2"),
        (many_rows(41, 1), "41 rows, the program takes 1 to 40"),
        (many_rows(20, 9), "more wanted rows"),
        (drawing(logprobs=97), "logprobs"),
        (
            drawing(history_offsets=[0, 1, 2, 3], history_tokens=[1, 2, 96], history_counts=[0] * 3),
            "history token",
        ),
        (
            drawing(history_offsets=[0, 1, 2, 3], history_tokens=[1, -1, 9], history_counts=[0] * 3),
            "history token",
        ),
        (
            drawing(history_offsets=[0, 0, 0, 2], history_tokens=[1], history_counts=[1]),
            "history_offsets must",
        ),
        (
            drawing(history_offsets=[0, 1, 0, 1], history_tokens=[1], history_counts=[1]),
            "history_offsets must",
        ),
        (
            drawing(history_offsets=[-1, 0, 0, 1], history_tokens=[1], history_counts=[1]),
            "history_offsets must",
        ),
        (drawing(history_offsets=[0, 0, 0, 1], history_tokens=[1], history_counts=[]), "history_counts"),
        (drawing(bias_offsets=[0, 0, 0, 1], bias_tokens=[96], bias_values=[1.0]), "bias token"),
        (drawing(bias_offsets=[0, 0, LOW, 1], bias_tokens=[9], bias_values=[1.0]), "bias_offsets must"),
        (drawing(bias_offsets=[0, 0, 0, 1], bias_tokens=[9], bias_values=[]), "bias_values"),
    ],
)
def test_batches_that_do_not_fit_are_refused(
    damage: Callable[[StepBatch], StepBatch], words: str | None
) -> None:
    """Each kind of misfit is a ValueError in words, no page is written, and the next step is as ever."""
    spoil(PROGRAM)
    before = [PROGRAM.read_page(page) for page in range(12)]
    if words is None:
        PROGRAM.step(damage(good()))  # a page twice in a table, only once written to: odd, and harmless
        return
    with pytest.raises(ValueError, match=words):
        PROGRAM.step(damage(good()))
    assert [PROGRAM.read_page(page) for page in range(12)] == before
    PROGRAM.step(good())


WILD = st.one_of(st.integers(-3, 20), st.sampled_from([LOW, LOW + 1, -(2**30), 2**30, HIGH - 1, HIGH]))


def wild(size: int) -> st.SearchStrategy[Any]:
    return st.lists(WILD, min_size=size, max_size=size).map(lambda values: ints(*values))


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_no_batch_reaches_beyond_its_arrays(data: st.DataObject) -> None:
    """Arrays of any int32 values, of the right lengths: a step runs or says ValueError. (Under the address
    sanitizer, tests/native/test_core.cpp does the same.)"""
    sequences = data.draw(st.integers(0, 4))
    rows, pages, wanted = (data.draw(st.integers(0, most)) for most in (9, 6, 4))

    def offsets(total: int) -> Any:
        """Often right at both ends, so that what lies between is looked at."""
        values = data.draw(wild(sequences + 1))
        if data.draw(st.booleans()):
            values[0], values[-1] = 0, total
        return values

    batch = StepBatch(
        tokens=data.draw(st.one_of(wild(rows), st.just(np.ones(rows, np.int32)))),
        positions=data.draw(wild(rows)),
        row_offsets=offsets(rows),
        cached_rows=data.draw(wild(sequences)),
        page_offsets=offsets(pages),
        pages=data.draw(st.one_of(wild(pages), st.just(np.arange(pages, dtype=np.int32)))),
        logit_rows=data.draw(st.one_of(wild(wanted), st.just(np.arange(wanted, dtype=np.int32)))),
        sampling=sampling(wanted),
        want_logits=True,
    )
    try:
        output = PROGRAM.step(batch)
    except ValueError as error:
        assert "step: " in str(error)
    else:
        check_drawn(output)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_sampling_parameters_draw_some_token(data: st.DataObject) -> None:
    """Parameters that no request could have (NaN, infinities, negatives) draw a token of the vocabulary,
    or say that there is none (-1) where they, or an earlier batch, leave no logit that is a number."""
    numbers = st.one_of(st.floats(width=32), st.sampled_from([0.0, 1.0, -1.0]))
    columns = {
        name: np.array(data.draw(st.lists(numbers, min_size=3, max_size=3)), np.float32)
        for name in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
    }
    wanted: SamplingBatch = sampling(
        3,
        history_offsets=[0, 1, 1, 3],
        history_tokens=[5, 5, 6],
        history_counts=data.draw(wild(3)),
        bias_offsets=[0, 0, 2, 3],
        bias_tokens=[0, 0, 95],
        bias_values=data.draw(st.lists(numbers, min_size=3, max_size=3)),
    )
    wanted = msgspec.structs.replace(
        wanted, top_k=data.draw(wild(3)), logprobs=np.minimum(data.draw(wild(3)), 96), **columns
    )
    output = PROGRAM.step(msgspec.structs.replace(good(), sampling=wanted))
    check_drawn(output)


def test_a_step_may_want_no_logits() -> None:
    """A step of prompt rows alone wants none; it fills pages and hands back empty arrays."""
    output = PROGRAM.step(step_batch(Part(tokens=[1, 2], pages=[1], wanted=[])))
    assert output.tokens.shape == output.logprobs.shape == (0,)
    assert output.logits is not None and output.logits.shape == (0, 96)
    alone = PROGRAM.step(step_batch(Part(tokens=[1, 2, 3], pages=[2], wanted=[2])))
    after = PROGRAM.step(step_batch(Part(tokens=[3], pages=[1], cached=2)))
    np.testing.assert_array_equal(after.logits, alone.logits)


@pytest.mark.parametrize(
    "act",
    [
        lambda p: p.read_page(12),
        lambda p: p.read_page(-1),
        lambda p: p.write_page(12, b"\0" * p.info.page_bytes),
        lambda p: p.write_page(0, b"\0" * (p.info.page_bytes - 1)),
        lambda p: p.write_page(0, b""),
        lambda p: p.copy_rows(0, 12, 1),
        lambda p: p.copy_rows(-1, 0, 1),
        lambda p: p.copy_rows(0, 1, 17),
        lambda p: p.copy_rows(0, 1, -1),
    ],
)
def test_pages_that_do_not_exist_are_refused(act: Callable[[NativeProgram], object]) -> None:
    """Pages and lines outside the pool, and data of another size, are refused."""
    with pytest.raises(ValueError, match="page"):
        act(PROGRAM)


@pytest.mark.parametrize("weights", ["f32", "bf16"])
def test_copied_rows_are_those_rows_alone(weights: Any) -> None:
    """copy_rows copies the first lines of all layers, leaves the others, and may name one page twice."""
    program = MODEL.native(weights)
    program.step(step_batch(Part(tokens=list(range(16)), pages=[3])))
    spoil(program, [5])
    program.copy_rows(3, 5, 6)
    for source, target in zip(MODEL.lines(program, [3], 16), MODEL.lines(program, [5], 16), strict=True):
        np.testing.assert_array_equal(source[:6], target[:6])
        assert (target[6:] == np.iinfo(target.dtype).max).all()
    before = program.read_page(3)
    program.copy_rows(3, 3, 9)
    assert program.read_page(3) == before


CREATE: dict[str, Any] = {"vocab": 32, "max_rows": 4, "max_logit_rows": 2, "kv_pages": 2, "kv": [(2, 16)]}


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 0},
        {"threads": 1025},
        {"max_rows": 0},
        {"max_rows": HIGH},
        {"max_logit_rows": 5},
        {"max_logit_rows": 0},
        {"vocab": 0},
        {"vocab": HIGH},
        {"kv_pages": 0},
        {"kv_pages": -1},
        {"kv": [(0, 16)]},
        {"kv": [(2, -16)]},
        {"kv": [(HIGH, HIGH)]},
        {"isa": "mmx"},
    ],
)
def test_programs_of_impossible_size_are_refused(change: dict[str, Any]) -> None:
    """Sizes that are not positive or could overflow, and unknown ISA levels, are refused."""
    with pytest.raises(ValueError, match=r"program|isa"):
        core_program(**{**CREATE, **change})


def test_ops_that_do_not_fit_are_refused() -> None:
    """An op whose value, matrix, vector, rope or width is not what it needs is refused as it is added: a step
    would read beyond them."""
    core = core_program(**CREATE)
    embed = core.add_matrix(32, 64, "f32", 0, False, False)
    square = core.add_matrix(64, 64, "f32", 0, False, False)
    short = core.add_matrix(16, 64, "f32", 0, False, False)
    qkv = core.add_matrix(96, 64, "f32", 0, False, False)
    odd = core.add_matrix(40, 40, "f32", 0, False, False)
    vector, narrow = core.add_vector(np.ones(64, np.float32)), core.add_vector(np.ones(16, np.float32))
    rope = core.add_rope([1.0] * 8, 1.0)
    wide_rope = core.add_rope([1.0] * 9, 1.0)
    x, y, z, w = (core.add_value(width, False) for width in (64, 64, 96, 32))
    a, b = core.add_value(40, False), core.add_value(40, False)
    s, t = core.add_value(64, True), core.add_value(32, True)
    none = (-1, 0.0, 0.0)

    def attention(**changes: Any) -> Callable[[], None]:
        given: dict[str, Any] = {"input": z, "layer": 0, "heads": 2, "kv_heads": 2, "head_dim": 16}
        given |= {"window": 0, "scale": 1.0, "softcap": 0.0, "rope": rope, "output": w}
        given |= {"query_norm": (narrow, 0.1, 0.0), "key_norm": none}
        return lambda: core.add_attention(**{**given, **changes})

    attention()()
    core.add_linear(x, (vector, 0.1, 0.0), [(square, vector)], "none", y, y)
    refused: list[Callable[[], None]] = [
        lambda: core.add_embed(embed, 1.0, w),
        lambda: core.add_embed(embed, 1.0, s),
        lambda: core.add_embed(short, 1.0, x),
        lambda: core.add_embed(9, 1.0, x),
        lambda: core.add_linear(x, none, [(square, -1)], "none", -1, x),
        lambda: core.add_linear(x, none, [(square, -1)], "none", -1, z),
        lambda: core.add_linear(x, none, [(square, -1)], "none", -1, s),
        lambda: core.add_linear(x, none, [(square, -1)], "none", s, y),
        lambda: core.add_linear(x, none, [(square, -1)], "none", z, y),
        lambda: core.add_linear(x, none, [(square, -1)], "none", 99, y),
        lambda: core.add_linear(x, none, [(square, narrow)], "none", -1, y),
        lambda: core.add_linear(x, none, [(square, 99)], "none", -1, y),
        lambda: core.add_linear(x, none, [(99, -1)], "none", -1, y),
        lambda: core.add_linear(x, none, [], "none", -1, y),
        lambda: core.add_linear(x, (narrow, 0.1, 0.0), [(square, -1)], "none", -1, y),
        lambda: core.add_linear(x, (99, 0.1, 0.0), [(square, -1)], "none", -1, y),
        lambda: core.add_linear(x, none, [(square, -1)], "silu", -1, y),
        lambda: core.add_linear(x, none, [(square, -1), (short, -1)], "gelu", -1, y),
        lambda: core.add_linear(x, none, [(square, -1), (square, -1)], "relu", -1, y),
        lambda: core.add_linear(a, none, [(odd, -1), (odd, -1)], "none", -1, b),
        lambda: core.add_linear(a, (narrow, 0.1, 0.0), [(odd, -1)], "none", -1, b),
        lambda: core.add_linear(w, none, [(qkv, -1)], "none", -1, z),
        attention(layer=1),
        attention(layer=-1),
        attention(heads=4),
        attention(heads=0),
        attention(kv_heads=1),
        attention(head_dim=32),
        attention(window=-1),
        attention(rope=2),
        attention(rope=wide_rope),
        attention(query_norm=(vector, 0.1, 0.0)),
        attention(key_norm=(99, 0.1, 0.0)),
        attention(input=x),
        attention(output=t),
        lambda: core.add_norm(x, none, -1, y),
        lambda: core.add_norm(x, (narrow, 0.1, 0.0), -1, y),
        lambda: core.add_norm(x, (vector, 0.1, 0.0), -1, s),
        lambda: core.add_norm(x, (vector, 0.1, 0.0), z, y),
        lambda: core.add_norm(a, (vector, 0.1, 0.0), -1, b),
        lambda: core.add_scale(x, 2.0, z),
        lambda: core.add_scale(x, 2.0, s),
        lambda: core.add_select(x, y),
        lambda: core.add_select(x, t),
        lambda: core.add_select(s, t),
        lambda: core.add_softcap(x, 0.0),
        lambda: core.add_softcap(99, 1.0),
        lambda: core.add_value(0, False),
        lambda: core.add_value(HIGH, False),
        lambda: core.add_vector(np.ones(0, np.float32)),
        lambda: core.finish(x),
        lambda: core.finish(s),
        lambda: core.finish(99),
    ]
    for number, act in enumerate(refused):
        with pytest.raises(ValueError):
            act()
            pytest.fail(f"number {number} was not refused")
    with pytest.raises(ValueError, match="not finished"):
        NativeProgram(core, PROGRAM.info).step(step_batch(Part(tokens=[1], pages=[0])))
    core.finish(t)
    late: list[Callable[[], None]] = [
        lambda: core.add_value(16, False),
        lambda: core.add_select(x, s),
        lambda: core.finish(t),
    ]
    for act in late:
        with pytest.raises(ValueError, match="finished"):
            act()


def test_a_value_may_be_read_by_the_op_that_is_added_to_it() -> None:
    """``x + linear(norm(x))`` and ``x + norm(x)`` are not computed in place while x is still read."""
    builder = GraphBuilder("loop")
    x = builder.embed("embed.weight", 96, 64)
    for layer in range(3):
        x = builder.add(x, builder.linear(x, f"{layer}.weight", 64))
        x = builder.add(x, builder.rms_norm(x, f"{layer}.norm.weight", 1e-5))
    builder.linear(builder.select_rows(x), "head.weight", 96)
    graph = builder.build(hidden_size=64, vocab_size=96, max_context=64)
    weights = random_weights(graph)
    model = TinyModel(graph)
    tokens = np.random.default_rng(0).integers(0, 96, 40).tolist()
    values = weights["embed.weight"].astype(np.float64)[tokens]
    for layer in range(3):
        values = values + values @ weights[f"{layer}.weight"].T
        norm = np.sqrt((values**2).mean(axis=1, keepdims=True) + 1e-5)
        values = values + values / norm * weights[f"{layer}.norm.weight"]
    exact = values @ weights["head.weight"].T
    for threads in (1, 4):
        program = model.native("f32", threads=threads)
        for _ in range(20):
            output = program.step(step_batch(Part(tokens=tokens, pages=[0, 1, 2])))
            assert output.logits is not None
            assert np.abs(output.logits - exact).max() < 1e-5 * np.abs(exact).max()
