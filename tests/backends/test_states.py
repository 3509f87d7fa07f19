"""Final hidden states that a step hands back, of whichever rows: what embeddings are made of."""

from __future__ import annotations

import functools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.backends.base import CompileOptions, Floats, Program, StepBatch
from tenfold.backends.native import NativeProgram
from tenfold.backends.torch.reference import TorchBackend
from tenfold.graph.builder import GraphBuilder
from tenfold.graph.states import final_states
from tests.helpers.batches import Part, step_batch
from tests.helpers.native_programs import FORMATS, LEVELS, FormatName, TinyModel, logits_of, spoil, tiny_model
from tests.helpers.tiny_models import CONFIGS

MODELS = {name: tiny_model(CONFIGS[name]) for name in ("llama", "gemma3-one-kv-head")}
TOLERANCE = {"f32": 1e-5, "bf16": 1e-3, "q8": 0.03, "q4": 0.03}
"""As in test_native_oracle.py."""


def stating(batch: StepBatch, rows: list[int]) -> StepBatch:
    return msgspec.structs.replace(batch, state_rows=np.array(rows, np.int32))


def states_of(program: Program, batch: StepBatch, rows: list[int]) -> Floats:
    states = program.step(stating(batch, rows)).states
    assert states is not None and np.isfinite(states).all() and states.dtype == np.float32
    assert states.shape == (len(rows), program.info.state_width)
    return states


@functools.cache
def compiled(name: str, weights: FormatName, threads: int, isa: str) -> NativeProgram:
    return MODELS[name].native(weights, threads=threads, max_rows=64, isa=isa, kv_pages=20)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fused", [True, False])
def test_states_are_those_of_the_reference(name: str, weights: FormatName, fused: bool) -> None:
    """Any rows' states are near the reference's, with logits of some rows, of all or of none beside them; and
    of rows with logits they are the very value that the output matrix reads."""
    model, rows = MODELS[name], [0, 3, 4, 19, 21, 22]
    options = CompileOptions(kv_pages=12, max_rows=64, threads=1, format=weights)
    oracle = TorchBackend(kv_bf16=weights != "f32").compile(model.graph, model.checkpoint, options)
    final = final_states(model.graph)
    assert final is not None
    tapped = model.native(weights, taps=(final.norm.output,), fused=fused)
    for wanted in ([], [19], list(range(20))):
        batch = step_batch(
            Part(tokens=list(range(20)), pages=[3, 1], wanted=wanted),
            Part(tokens=[9, 8, 7], pages=[0], wanted=[2] if wanted else []),
        )
        exact, found = (
            states_of(oracle, batch, rows),
            states_of(model.native(weights, fused=fused), batch, rows),
        )
        assert np.linalg.norm(found - exact) / np.linalg.norm(exact) <= TOLERANCE[weights]
        if wanted:
            both = stating(msgspec.structs.replace(batch, want_features=True), batch.logit_rows.tolist())
            output = tapped.step(both)
            assert output.states is not None and output.features is not None
            np.testing.assert_array_equal(output.states, output.features)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_states_change_no_logit(name: str, weights: FormatName) -> None:
    """With the states of no row, some or all: the same bits of logits, the same tokens, the same KV rows."""
    model = MODELS[name]
    batch = step_batch(
        Part(tokens=list(range(20)), pages=[3, 1], wanted=[5, 19]), Part(tokens=[9], pages=[0])
    )
    program = model.native(weights)
    plain = logits_of(program, batch)
    pages = [program.read_page(page) for page in (3, 1, 0)]
    assert program.step(batch).states is None
    for rows in ([0], [5, 20], list(range(21))):
        spoil(program)
        np.testing.assert_array_equal(logits_of(program, stating(batch, rows)), plain)
        lines = [model.lines(program, [page], count) for page, count in ((3, 16), (1, 4), (0, 1))]
        for page, data in zip((3, 1, 0), pages, strict=True):
            program.write_page(page, data)
        exact = [model.lines(program, [page], count) for page, count in ((3, 16), (1, 4), (0, 1))]
        for found, right in zip(lines, exact, strict=True):
            for one, other in zip(found, right, strict=True):
                np.testing.assert_array_equal(one, other)


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    name=st.sampled_from(sorted(MODELS)),
    weights=st.sampled_from(FORMATS),
    threads=st.integers(1, 3),
    isa=st.sampled_from(LEVELS),
)
def test_neighbours_chunks_threads_and_levels_change_no_bit(
    data: st.DataObject, name: str, weights: FormatName, threads: int, isa: str
) -> None:
    """A row's state is the same whatever else is in the step, in whatever chunks the text was computed, on
    any team and ISA level, whichever other rows are asked for, with logits beside or without."""
    alone, program = compiled(name, weights, 1, LEVELS[0]), compiled(name, weights, threads, isa)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    text = rng.integers(0, 96, data.draw(st.integers(1, 60))).tolist()
    spoil(alone)
    whole = step_batch(Part(tokens=text, pages=list(range(-(-len(text) // 16))), wanted=[]))
    exact = states_of(alone, whole, list(range(len(text))))
    spoil(program)
    done = 0
    while done < len(text):
        rows = min(data.draw(st.integers(1, 30)), len(text) - done)
        wanted = sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=1)))
        logits = sorted(data.draw(st.sets(st.integers(0, rows - 1))))
        parts = [Part(tokens=text[done : done + rows], pages=[5, 6, 7, 8], cached=done, wanted=logits)]
        beside = Part(tokens=rng.integers(0, 96, 9).tolist(), pages=[1], wanted=[4, 8])
        before = 0
        if data.draw(st.booleans()):
            before = 9 if data.draw(st.booleans()) else 0
            parts.insert(0 if before else 1, beside)
        found = states_of(program, step_batch(*parts), [before + row for row in wanted])
        np.testing.assert_array_equal(found, exact[[done + row for row in wanted]])
        done += rows


def test_wrong_rows_and_programs_without_states_are_refused() -> None:
    """Rows that are not there, or out of order, and states of a program that has none, are errors before
    anything is written."""
    model = MODELS["llama"]
    batch = step_batch(Part(tokens=[1, 2, 3], pages=[0]))
    options = CompileOptions(kv_pages=2, max_rows=64, format="f32")
    reference = TorchBackend().compile(model.graph, model.checkpoint, options)
    for program in (model.native("f32"), reference):
        before = program.read_page(0)
        for rows in ([3], [-1], [1, 0], [1, 1], list(range(1000))):
            with pytest.raises(ValueError, match="state"):
                program.step(stating(batch, rows))
        assert program.read_page(0) == before
    b = GraphBuilder("bare")
    b.linear(b.select_rows(b.embed("embed.weight", 32, 64)), "head.weight", 32)
    bare = TinyModel(b.build(hidden_size=64, vocab_size=32, max_context=64))
    reference = TorchBackend().compile(bare.graph, bare.checkpoint, options)
    for program in (bare.native("f32"), reference):
        assert program.info.state_width == 0
        with pytest.raises(ValueError, match="states are wanted, but the program has none"):
            program.step(stating(batch, [0]))
