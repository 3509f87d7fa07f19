"""Values that a step hands back: they are what the model computes, and asking for them changes nothing."""

from __future__ import annotations

import functools

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.backends.base import CompileOptions, Floats, StepBatch
from tenfold.backends.native import NativeBackend, NativeProgram
from tenfold.backends.torch.reference import TorchBackend
from tenfold.models.taps import default_taps
from tests.helpers.batches import Part, step_batch
from tests.helpers.native_programs import FORMATS, LEVELS, FormatName, logits_of, spoil, tiny_model
from tests.helpers.tiny_models import CONFIGS

MODELS = {name: tiny_model(CONFIGS[name]) for name in ("llama", "gemma3-one-kv-head")}
TOLERANCE = {"f32": 1e-5, "bf16": 1e-3, "q8": 0.03, "q4": 0.03}
"""As in test_native_oracle.py."""


def wanting(batch: StepBatch) -> StepBatch:
    return msgspec.structs.replace(batch, want_features=True)


def features_of(program: NativeProgram, batch: StepBatch) -> Floats:
    features = program.step(wanting(batch)).features
    assert features is not None and np.isfinite(features).all()
    return features


def every_tap(name: str) -> tuple[str, ...]:
    """Embedding, attention, gate, addition, both sides of a norm and of a soft cap; the last first."""
    graph = MODELS[name].graph
    inside = (".q_proj", ".k_proj", ".v_proj", "rope.", "k_norm", "q_norm")
    return tuple(value for value in reversed(graph.widths) if not any(part in value for part in inside))


@functools.cache
def tapped(name: str, weights: FormatName, threads: int, max_rows: int, isa: str) -> NativeProgram:
    taps = default_taps(MODELS[name].graph)
    return MODELS[name].native(weights, threads=threads, max_rows=max_rows, isa=isa, taps=taps, kv_pages=20)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fused", [True, False])
def test_features_are_those_of_the_reference(name: str, weights: FormatName, fused: bool) -> None:
    """Every value of a model that is not inside of an attention is handed back for the wanted rows, near the
    reference's, in the order in which the taps were named."""
    model, taps = MODELS[name], every_tap(name)
    batch = wanting(
        step_batch(
            Part(tokens=list(range(20)), pages=[3, 1], wanted=[0, 7, 19]),
            Part(tokens=[9, 8, 7], pages=[0], wanted=[2]),
        )
    )
    options = CompileOptions(kv_pages=12, max_rows=64, threads=1, format=weights, taps=taps)
    oracle = TorchBackend(kv_bf16=weights != "f32").compile(model.graph, model.checkpoint, options)
    exact = oracle.step(batch).features
    found = features_of(model.native(weights, taps=taps, fused=fused), batch)
    assert exact is not None and found.dtype == np.float32
    assert found.shape == exact.shape == (4, sum(model.graph.widths[tap] for tap in taps))
    column = 0
    for tap in taps:
        part = slice(column, column := column + model.graph.widths[tap])
        error = np.linalg.norm(found[:, part] - exact[:, part]) / np.linalg.norm(exact[:, part])
        assert error <= TOLERANCE[weights], tap


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_taps_change_no_logit(name: str, weights: FormatName) -> None:
    """With no tap, the default ones, or all, wanted in the step or not: the same bits of logits."""
    model = MODELS[name]
    batch = step_batch(Part(tokens=list(range(20)), pages=[3, 1]), Part(tokens=[9], pages=[0]))
    plain = logits_of(model.native(weights), batch)
    for taps in (default_taps(model.graph), every_tap(name)):
        program = model.native(weights, taps=taps)
        np.testing.assert_array_equal(logits_of(program, batch), plain)
        np.testing.assert_array_equal(logits_of(program, wanting(batch)), plain)
        assert program.step(batch).features is None


def alone(name: str, weights: FormatName, text: list[int]) -> npt.NDArray[np.float32]:
    """Features of every token of a text in one step on one thread."""
    program = tapped(name, weights, 1, 64, LEVELS[0])
    spoil(program)
    return features_of(program, step_batch(Part(tokens=text, pages=list(range(-(-len(text) // 16))))))


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
    """A row's features are the same whatever else is in the step, in whatever chunks the text was computed,
    on any team and ISA level, whichever other rows are wanted."""
    program = tapped(name, weights, threads, 40, isa)
    spoil(program)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    text = rng.integers(0, 96, data.draw(st.integers(1, 60))).tolist()
    exact = alone(name, weights, text)
    done = 0
    while done < len(text):
        rows = min(data.draw(st.integers(1, 30)), len(text) - done)
        wanted = sorted(data.draw(st.sets(st.integers(0, rows - 1))))
        parts = [Part(tokens=text[done : done + rows], pages=[5, 6, 7, 8], cached=done, wanted=wanted)]
        ahead = data.draw(st.booleans())
        beside = Part(tokens=rng.integers(0, 96, 9).tolist(), pages=[1], wanted=[4, 8])
        if data.draw(st.booleans()):
            parts.insert(0 if ahead else 1, beside)
        own = slice(2, None) if parts[0] is beside else slice(0, len(wanted))
        found = features_of(program, step_batch(*parts))[own]
        np.testing.assert_array_equal(found, exact[[done + row for row in wanted]])
        done += rows


def test_unknown_taps_are_named() -> None:
    """A tap that is not there, or cannot be had, is an error that names it and tells what there is; so are
    features that nobody compiled."""
    model = MODELS["llama"]
    options = CompileOptions(kv_pages=1, format="f32")
    for backend in (NativeBackend(), TorchBackend()):
        with pytest.raises(ValueError, match=r"no value 'model.layers.7'.*model\.norm"):
            wrong = msgspec.structs.replace(options, taps=("model.layers.7",))
            backend.compile(model.graph, model.checkpoint, wrong)
        program = backend.compile(model.graph, model.checkpoint, options)
        with pytest.raises(ValueError, match="without taps"):
            program.step(wanting(step_batch(Part(tokens=[1], pages=[0]))))
    with pytest.raises(ValueError, match=r"q_proj.* cannot be kept"):
        model.native("f32", taps=("model.layers.0.self_attn.q_proj",))
