"""KV rows in 8 bits, and the op-by-op mode: what may differ does so little, and what must be equal is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tenfold.worker.build import kv_page_bytes
from tests.helpers.batches import Part, step_batch
from tests.helpers.native_programs import LEVELS, TinyModel, logits_of, spoil, tiny_model
from tests.helpers.tiny_models import CONFIGS

FAMILIES = ("llama", "mistral", "qwen3", "gemma3")
MODELS: dict[str, TinyModel] = {name: tiny_model(CONFIGS[name]) for name in FAMILIES}
TOKENS = np.random.default_rng(5).integers(0, 96, 41).tolist()
ONE_STEP = step_batch(Part(tokens=TOKENS, pages=[4, 9, 2]))


def rms(values: np.ndarray[Any, np.dtype[np.float32]]) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


@pytest.mark.parametrize("name", FAMILIES)
def test_eight_bit_rows_stay_near_float_rows(name: str) -> None:
    """With K and V in 8 bits logits differ from those with float rows, by less than 2 % of their size: a
    wrong scale or line would show."""
    exact = logits_of(MODELS[name].native("f32", kv_format="f32"), ONE_STEP)
    found = logits_of(MODELS[name].native("f32", kv_format="q8"), ONE_STEP)
    assert 0 < rms(found - exact) < 0.02 * rms(exact)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_threads_levels_and_garbage_change_no_bit(name: str, isa: Any) -> None:
    """Law 1 holds with 8-bit rows: chunks, pages, threads, ISA levels and what earlier owners left behind."""
    wanted = logits_of(MODELS[name].native("q8", kv_format="q8", isa=LEVELS[0]), ONE_STEP)
    program = MODELS[name].native("q8", kv_format="q8", isa=isa, threads=3)
    spoil(program)
    cuts = [0, 1, 2, 9, 16, 33, 34, 41]
    parts = [
        logits_of(program, step_batch(Part(tokens=TOKENS[a:b], pages=[7, 0, 11], cached=a)))
        for a, b in pairwise(cuts)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), wanted)


def test_copied_rows_carry_their_scales() -> None:
    """A page whose first lines were copied, scales and all, serves as the original does."""
    program = MODELS["llama"].native("q8", kv_format="q8")
    wanted = logits_of(program, ONE_STEP)
    spoil(program, [5])
    program.copy_rows(9, 5, 7)
    found = logits_of(program, step_batch(Part(tokens=TOKENS[23:], pages=[4, 5, 2], cached=23)))
    np.testing.assert_array_equal(found, wanted[23:])


@pytest.mark.parametrize("kv_format", ["bf16", "f32", "q8"])
def test_the_plan_knows_what_a_page_takes(kv_format: str) -> None:
    """Memory is planned with the page size that the program then has."""
    model = MODELS["gemma3"]
    assert model.native("q8", kv_format=kv_format).info.page_bytes == kv_page_bytes(model.graph, kv_format)


@pytest.mark.parametrize("weights", ["f32", "bf16", "q8", "q4"])
@pytest.mark.parametrize("name", CONFIGS)
def test_op_by_op_is_the_same_program(name: str, weights: Any) -> None:
    """The step fused and the step op by op, each op a call of its own, give the same bits."""
    if CONFIGS[name].get("head_dim") == 24:
        pytest.skip("the native backend takes heads of whole vectors alone")
    model = MODELS.get(name) or tiny_model(CONFIGS[name])
    for threads in (1, 2):
        fused = logits_of(model.native(weights, threads=threads), ONE_STEP)
        apart = logits_of(model.native(weights, threads=threads, fused=False), ONE_STEP)
        np.testing.assert_array_equal(apart, fused)
