"""Attention: biases per row and head do what the reference says, and who computes what changes no bit."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tenfold.backends.base import CompileOptions, StepBatch
from tenfold.backends.native import NativeProgram
from tenfold.backends.torch.reference import TorchBackend, TorchProgram
from tenfold.worker.build import kv_page_bytes
from tests.helpers.batches import Part, step_batch
from tests.helpers.native_programs import LEVELS, TinyModel, logits_of, spoil, tiny_model
from tests.helpers.tiny_models import CONFIGS, SIZES

KV_FORMATS = ("f32", "bf16", "q8")
FAMILIES = ("llama", "mistral", "gemma3", "gemma3-one-kv-head")
MODELS: dict[str, TinyModel] = {name: tiny_model(CONFIGS[name]) for name in FAMILIES}
RNG = np.random.default_rng(11)
TOKENS = RNG.integers(0, 96, 45).tolist()
TABLE = [4, 9, 2]
FIRST = step_batch(Part(tokens=TOKENS[:37], pages=TABLE))
NEXT = step_batch(Part(tokens=TOKENS[37:], pages=TABLE, cached=37))


def set_biases(program: NativeProgram | TorchProgram, model: TinyModel, table: list[int]) -> None:
    """Random biases for every line of the pages, some of them -inf."""
    rng = np.random.default_rng(3)
    for page in table:
        for layer, kv in enumerate(model.graph.kv):
            for head in range(kv.heads):
                values = rng.normal(0, 3, 16).astype(np.float32)
                values[rng.random(16) < 0.1] = -np.inf
                program.set_bias(page, layer, head, values)


def begun(program: NativeProgram, model: TinyModel) -> NativeProgram:
    """The program after `FIRST`, whose rows have biases then."""
    spoil(program)
    program.step(FIRST)
    set_biases(program, model, TABLE)
    return program


@pytest.mark.parametrize("name", FAMILIES)
def test_biases_are_those_of_the_reference(name: str) -> None:
    """Logits after rows with biases are the reference's, far from those without, and rows that a step writes
    have no bias, whatever was set before."""
    model = MODELS[name]
    options = CompileOptions(kv_pages=12, max_rows=64, threads=1, format="f32", kv_bias=True)
    oracle = TorchBackend().compile(model.graph, model.checkpoint, options)
    oracle.step(FIRST)
    set_biases(oracle, model, TABLE)
    exact = oracle.logits(NEXT).numpy()
    found = logits_of(begun(model.native("f32", kv_bias=True), model), NEXT)
    size = float(np.sqrt(np.mean(exact**2)))
    assert float(np.sqrt(np.mean((found - exact) ** 2))) < 1e-5 * size
    plain = model.native("f32")
    plain.step(FIRST)
    assert float(np.sqrt(np.mean((logits_of(plain, NEXT) - exact) ** 2))) > 1e-2 * size


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_biases_are_the_same_however_they_are_computed(name: str, kv_format: str) -> None:
    """Law 1 holds with biases: ISA levels, threads and chunks change no bit, with every kind of KV rows."""
    model = MODELS[name]
    wanted = None
    cuts = [37, 38, 40, 45]
    chunks = [step_batch(Part(tokens=TOKENS[a:b], pages=TABLE, cached=a)) for a, b in pairwise(cuts)]
    for isa in LEVELS:
        program = model.native("q8", kv_format=kv_format, kv_bias=True, isa=isa)
        many = model.native("q8", kv_format=kv_format, kv_bias=True, isa=isa, threads=3)
        if wanted is None:
            wanted = logits_of(begun(program, model), NEXT)
            assert np.isfinite(wanted).all()
        begun(program, model)
        np.testing.assert_array_equal(np.concatenate([logits_of(program, step) for step in chunks]), wanted)
        np.testing.assert_array_equal(logits_of(begun(many, model), NEXT), wanted)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_a_bias_of_zero_is_none(kv_format: str) -> None:
    """Compiling biases in changes no bit as long as none is set, and the plan knows the page's size."""
    model = MODELS["gemma3"]
    plain = model.native("q8", kv_format=kv_format)
    biased = model.native("q8", kv_format=kv_format, kv_bias=True)
    spoil(biased)
    for step in (FIRST, NEXT):
        np.testing.assert_array_equal(logits_of(biased, step), logits_of(plain, step))
    assert biased.info.page_bytes == kv_page_bytes(model.graph, kv_format, kv_bias=True)
    assert plain.info.page_bytes == kv_page_bytes(model.graph, kv_format)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_pages_carry_their_biases(kv_format: str) -> None:
    """Rows that are copied, and pages that are read and written elsewhere, have their biases with them."""
    model = MODELS["llama"]
    program = model.native("q8", kv_format=kv_format, kv_bias=True)
    wanted = logits_of(begun(program, model), NEXT)
    begun(program, model)
    other = model.native("q8", kv_format=kv_format, kv_bias=True)
    spoil(other)
    for page in (4, 9):
        other.write_page(page, program.read_page(page))
    other.write_page(7, program.read_page(2))
    other.copy_rows(7, 2, 5)
    np.testing.assert_array_equal(logits_of(other, NEXT), wanted)


def test_lines_of_minus_infinity_are_not_there() -> None:
    """A page whose lines all have -inf weighs exactly nothing: what it holds changes no bit."""
    model = MODELS["llama"]
    found = []
    for first in (TOKENS[:16], TOKENS[16:32]):
        program = model.native("f32", kv_bias=True)
        program.step(step_batch(Part(tokens=first, pages=[5])))
        for layer, kv in enumerate(model.graph.kv):
            for head in range(kv.heads):
                program.set_bias(5, layer, head, np.full(16, -np.inf, np.float32))
        found.append(logits_of(program, step_batch(Part(tokens=TOKENS[32:], pages=[5, 1], cached=16))))
    np.testing.assert_array_equal(found[0], found[1])


def test_biases_that_cannot_be_are_refused() -> None:
    """A page, layer or head that is not there, NaN, infinity, a wrong number of values, and a program without
    biases: each is a ValueError in words, and no page changes."""
    program = MODELS["llama"].native("f32", kv_bias=True)
    program.step(FIRST)
    before = [program.read_page(page) for page in range(12)]
    zeros = np.zeros(16, np.float32)
    for place in ((12, 0, 0), (-1, 0, 0), (0, 3, 0), (0, -1, 0), (0, 0, 2), (0, 0, -1)):
        with pytest.raises(ValueError, match="out of range"):
            program.set_bias(*place, zeros)
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="below infinity"):
            program.set_bias(0, 0, 0, np.where(np.arange(16) == 9, bad, 0).astype(np.float32))
    with pytest.raises(ValueError, match="each of 16 lines"):
        program.set_bias(0, 0, 0, zeros[:15])
    assert [program.read_page(page) for page in range(12)] == before
    with pytest.raises(ValueError, match="without kv_bias"):
        MODELS["llama"].native("f32").set_bias(0, 0, 0, zeros)


SHAPES: dict[str, dict[str, Any]] = {
    # As many heads as SmolLM2-135M: with two threads the middle KV head is divided.
    "three-kv-heads": {
        "model_type": "llama",
        **SIZES,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
    # More query heads than a tile holds, with windows between.
    "one-kv-head": {**CONFIGS["gemma3-one-kv-head"], "num_attention_heads": 14},
    # A head of three vectors, without GQA.
    "many-kv-heads": {
        "model_type": "llama",
        **SIZES,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 48,
    },
}
DEEP = {name: tiny_model(config) for name, config in SHAPES.items()}


def deep_step(*depths_and_rows: tuple[int, int]) -> StepBatch:
    """Sequences far into a context; their tables come back to the same ten pages again and again."""
    parts = []
    for index, (depth, rows) in enumerate(depths_and_rows):
        pages = [(7 * i) % 10 for i in range(depth // 16)] + [10 + 2 * index, 11 + 2 * index]
        parts.append(Part(tokens=TOKENS[: rows + 1][-rows:], pages=pages, cached=depth - depth % 16 + 3))
    return step_batch(*parts)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_threads_that_divide_a_tile_change_no_bit(name: str, kv_format: str) -> None:
    """Deep in a context, where there are few tiles for the threads and they divide them by pages and
    elements, logits and rows are those of one thread, at every ISA level."""
    model = DEEP[name]
    steps = [deep_step((9000, 1)), deep_step((6000, 3)), deep_step((8000, 1), (2500, 1), (300, 1))]
    wanted: list[Any] = []
    first = None
    for isa in LEVELS:
        for threads in (1, 2, 4):
            if isa == "portable" and threads != 4:
                continue
            program = model.native(
                "q8", kv_format=kv_format, isa=isa, threads=threads, max_rows=160, kv_pages=16
            )
            if first is None:
                program.step(step_batch(Part(tokens=(TOKENS * 4)[:160], pages=list(range(10)))))
                for line in (10, 12, 14):
                    program.step(step_batch(Part(tokens=TOKENS[:3], pages=[line])))
                first = [program.read_page(page) for page in range(16)]
            for page, data in enumerate(first):
                program.write_page(page, data)
            found = [logits_of(program, step) for step in steps]
            found.append(np.frombuffer(b"".join(map(program.read_page, range(16))), np.uint8))
            wanted = wanted or found
            assert np.isfinite(found[0]).all()
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(one, other)
