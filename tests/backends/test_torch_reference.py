"""The reference backend honours the step batch: chunks, pages and neighbours do not change any logits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.backends.base import CompileOptions, StepBatch
from tenfold.backends.torch.reference import TorchBackend, TorchProgram
from tenfold.checkpoint.base import CheckpointError
from tenfold.models.registry import build_graph
from tests.helpers.batches import Part, step_batch
from tests.helpers.memory_checkpoint import DictCheckpoint
from tests.helpers.tiny_models import CONFIGS, random_weights

NAMES = ("llama", "mistral", "gemma3")
GRAPHS = {name: build_graph(CONFIGS[name]) for name in NAMES}
CHECKPOINTS = {name: DictCheckpoint(random_weights(graph), {}) for name, graph in GRAPHS.items()}


def program(name: str, kv_bf16: bool = False, weights: str = "auto", pages: int = 12) -> TorchProgram:
    options = CompileOptions(
        kv_pages=pages,
        max_rows=64,
        format=weights,  # type: ignore[arg-type]
    )
    return TorchBackend(kv_bf16=kv_bf16).compile(GRAPHS[name], CHECKPOINTS[name], options)


def one_shot(name: str, tokens: list[int]) -> torch.Tensor:
    pages = list(range(-(-len(tokens) // 16)))
    return program(name).logits(step_batch(Part(tokens=tokens, pages=pages)))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), name=st.sampled_from(NAMES))
def test_chunks_pages_and_neighbours_change_nothing(data: st.DataObject, name: str) -> None:
    """Two sequences in random chunks over scattered pages get the logits of each alone in one step."""
    lengths = [data.draw(st.integers(1, 40)) for _ in range(2)]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    texts = [rng.integers(0, 96, length).tolist() for length in lengths]
    shuffled = rng.permutation(12).tolist()
    tables = [shuffled[:3], shuffled[3:6]]
    running = program(name)
    cuts = [
        [0, *sorted(data.draw(st.lists(st.integers(0, length), min_size=4, max_size=4))), length]
        for length in lengths
    ]
    logits: list[list[torch.Tensor]] = [[], []]
    for first, end in pairwise(zip(*cuts, strict=True)):
        active = [s for s in range(2) if first[s] < end[s]]
        if not active:
            continue
        parts = [Part(tokens=texts[s][first[s] : end[s]], pages=tables[s], cached=first[s]) for s in active]
        rows = iter(running.logits(step_batch(*parts)))
        for s in active:
            logits[s] += [next(rows) for _ in range(first[s], end[s])]
    for s in range(2):
        torch.testing.assert_close(torch.stack(logits[s]), one_shot(name, texts[s]), rtol=0, atol=1e-11)


def test_positions_are_not_cache_rows() -> None:
    """Rotary positions may jump while cache rows go on: what counts is their distance, and it does count."""
    tokens = list(range(20))
    plain = one_shot("llama", tokens)
    batch = step_batch(Part(tokens=tokens, pages=[0, 1]))

    def at(positions: list[int]) -> torch.Tensor:
        return program("llama").logits(
            msgspec.structs.replace(batch, positions=np.array(positions, np.int32))
        )

    torch.testing.assert_close(at(list(range(30, 50))), plain, rtol=0, atol=1e-10)
    gap = at([*range(10), *range(40, 50)])
    torch.testing.assert_close(gap[:10], plain[:10], rtol=0, atol=1e-10)
    assert (gap[10:] - plain[10:]).abs().max() > 1e-3


def test_wanted_rows_are_those_rows() -> None:
    """Only the rows asked for come back, in their order."""
    tokens = list(range(24))
    part = Part(tokens=tokens, pages=[0, 1], wanted=[2, 3, 23])
    torch.testing.assert_close(
        program("gemma3").logits(step_batch(part)), one_shot("gemma3", tokens)[[2, 3, 23]], rtol=0, atol=1e-11
    )


def test_pages_can_be_copied_moved_and_shared() -> None:
    """A page moved (read_page, write_page) or copied in part (copy_rows) continues the sequence as if it had
    been computed there, and a second sequence may read the first one's pages."""
    tokens = np.random.default_rng(1).integers(0, 96, 30).tolist()
    wanted = one_shot("llama", tokens)
    first = program("llama")
    first.logits(step_batch(Part(tokens=tokens[:24], pages=[5, 6])))
    first.copy_rows(6, 9, 8)
    shared = first.logits(step_batch(Part(tokens=tokens[24:], pages=[5, 9], cached=24)))
    torch.testing.assert_close(shared, wanted[24:], rtol=0, atol=1e-11)

    second = program("llama")
    for source, target in ((5, 3), (6, 0)):
        data = first.read_page(source)
        assert len(data) == second.info.page_bytes
        second.write_page(target, data)
    moved = second.logits(step_batch(Part(tokens=tokens[24:], pages=[3, 0], cached=24)))
    torch.testing.assert_close(moved, wanted[24:], rtol=0, atol=1e-11)


def test_bfloat16_cache_rounds_and_stays_close() -> None:
    """The option makes the cache what the native backend stores: each row rounded to bfloat16."""
    tokens = list(range(30))
    batch = step_batch(Part(tokens=tokens, pages=[0, 1]))
    rounding = program("llama", kv_bf16=True)
    logits = rounding.logits(batch)
    exact = one_shot("llama", tokens)
    assert 1e-6 < (logits - exact).abs().max() < 0.1 * exact.abs().max()
    stored = torch.frombuffer(bytearray(rounding.read_page(0)), dtype=torch.float64)
    assert torch.equal(stored, stored.to(torch.bfloat16).double()) and stored.abs().max() > 0


@pytest.mark.parametrize("weights", ["bf16", "q8"])
def test_formats_are_applied_and_reported(weights: str) -> None:
    """The plan's formats reach the computation: logits move a little, and the report says what was done."""
    rounded = program("llama", weights=weights)
    tokens = list(range(12))
    exact = one_shot("llama", tokens)
    moved = (rounded.logits(step_batch(Part(tokens=tokens, pages=[0]))) - exact).abs().max()
    assert 1e-5 < moved < 0.1 * exact.abs().max()
    formats = {report.name: report for report in rounded.info.weights}
    assert formats["lm_head.weight"].format == weights and not formats["lm_head.weight"].lossless
    assert formats["model.norm.weight"].format == "f32" and formats["model.norm.weight"].lossless


def test_step_draws_and_hands_back_logits() -> None:
    """A greedy step returns the argmax of the logits that it hands back, and these only when asked for."""
    batch = step_batch(Part(tokens=[1, 2, 3], pages=[0], wanted=[0, 2]))
    output = program("llama").step(batch)
    assert output.logits is not None
    np.testing.assert_array_equal(output.tokens, output.logits.argmax(axis=1))
    np.testing.assert_allclose(output.logits, one_shot("llama", [1, 2, 3])[[0, 2]].numpy(), rtol=1e-6)
    assert program("llama").step(msgspec.structs.replace(batch, want_logits=False)).logits is None


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def replaced(**changes: object) -> Callable[[StepBatch], StepBatch]:
    return lambda batch: msgspec.structs.replace(batch, **changes)


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (replaced(tokens=ints(1, 2, 96)), "token 96"),
        (replaced(tokens=ints(1, -1, 2)), "token -1"),
        (replaced(positions=ints(0, 1, 64)), "position 64"),
        (replaced(positions=ints(0, 1)), "2 positions"),
        (replaced(pages=ints(12)), "page 12"),
        (replaced(pages=ints()), "page_offsets"),
        (replaced(cached_rows=ints(14)), "needs 2"),
        (replaced(cached_rows=ints(-1)), "cached_rows"),
        (replaced(row_offsets=ints(0, 2)), "row_offsets"),
        (replaced(row_offsets=ints(0, 2, 3)), "row_offsets"),
        (replaced(logit_rows=ints(0, 0, 1)), "ascending"),
        (replaced(logit_rows=ints(0, 1, 3)), "logit row 3"),
        (replaced(logit_rows=ints(0, 1)), "sampling"),
        (lambda _: step_batch(Part(tokens=[1] * 65, pages=[0, 1, 2, 3, 4], wanted=[0])), "65 rows"),
        (lambda _: step_batch(Part(tokens=[1], pages=[0]), Part(tokens=[2], pages=[0])), "same cache line"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_and_writes_nothing(
    damage: Callable[[StepBatch], StepBatch], names: str
) -> None:
    """A wrong batch is a ValueError that says what is wrong, and the cache is as before."""
    running = program("llama")
    batch = step_batch(Part(tokens=[1, 2, 3], pages=[0]))
    before = [running.read_page(page) for page in range(12)]
    with pytest.raises(ValueError, match=names):
        running.step(damage(batch))
    assert [running.read_page(page) for page in range(12)] == before


def test_missing_and_misshapen_weights_are_named() -> None:
    """A checkpoint that lacks a weight, or has it in another shape, is refused with the weight's name."""
    weights = random_weights(GRAPHS["llama"])
    options = CompileOptions(kv_pages=1)
    short = {name: weight for name, weight in weights.items() if name != "model.norm.weight"}
    with pytest.raises(CheckpointError, match=r"no tensor model\.norm\.weight"):
        TorchBackend().compile(GRAPHS["llama"], DictCheckpoint(short, {}), options)
    bent = {**weights, "lm_head.weight": weights["lm_head.weight"][:-1]}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight .* \(95, 64\)"):
        TorchBackend().compile(GRAPHS["llama"], DictCheckpoint(bent, {}), options)


def test_senseless_options_are_refused() -> None:
    """No KV pages, or an instruction set that torch cannot be told to use, is an error."""
    with pytest.raises(ValueError, match="kv_pages"):
        TorchBackend().compile(GRAPHS["llama"], CHECKPOINTS["llama"], CompileOptions())
    with pytest.raises(ValueError, match="avx2"):
        TorchBackend().compile(GRAPHS["llama"], CHECKPOINTS["llama"], CompileOptions(kv_pages=1, isa="avx2"))
