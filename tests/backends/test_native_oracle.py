"""The native backend computes what the float64 reference computes, for every family, format and ISA level."""

from __future__ import annotations

import numpy as np
import pytest

from tenfold.backends.base import CompileOptions, StepBatch
from tenfold.backends.torch.reference import TorchBackend
from tests.helpers.batches import Part, step_batch
from tests.helpers.native_programs import FORMATS, LEVELS, FormatName, spoil, tiny_model
from tests.helpers.tiny_models import CONFIGS

TOLERANCE = {"f32": 1e-5, "bf16": 1e-3, "q8": 0.02, "q4": 0.02}
"""Root mean square of the difference over that of the logits; at most 4e-7, 1.6e-4, 0.013 and 0.013 were
measured. What is left beside the rounded weights, which the reference has too: K and V in BF16 (rounded in
the reference as well, from slightly other numbers) and activations as int8 codes. A wrong scale, rotation,
window or norm is several times as much; that the kernels add nothing to the rounding of activations is tested
in test_native_matrix.py."""

RNG = np.random.default_rng(7)
LONG, SHORT = RNG.integers(0, 96, 45).tolist(), RNG.integers(0, 96, 21).tolist()
STEPS: list[StepBatch] = [
    step_batch(Part(tokens=LONG[:30], pages=[7, 2, 5]), Part(tokens=SHORT[:3], pages=[9, 0])),
    step_batch(
        Part(tokens=SHORT[3:20], pages=[9, 0], cached=3), Part(tokens=LONG[30:], pages=[7, 2, 5], cached=30)
    ),
    step_batch(Part(tokens=SHORT[20:], pages=[9, 0], cached=20)),
]
STEPS[1].positions[17:] += 18
"""Two sequences in chunks, over page borders and longer than every window; the long one's positions jump
ahead of its cache rows."""


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "llama-head-dim"])
def test_logits_are_those_of_the_reference(name: str, weights: FormatName) -> None:
    """Logits are near the reference's over the same rounded weights; ISA levels agree in every bit of logits,
    K and V, and in the tokens drawn."""
    model = tiny_model(CONFIGS[name])
    options = CompileOptions(kv_pages=12, max_rows=64, threads=1, format=weights)
    oracle = TorchBackend(kv_bf16=weights != "f32").compile(model.graph, model.checkpoint, options)
    wanted = [oracle.logits(step).numpy() for step in STEPS]
    found = []
    for isa in LEVELS:
        program = model.native(weights, isa=isa)
        spoil(program)
        outputs = [program.step(step) for step in STEPS]
        lines = [*model.lines(program, [7, 2, 5], 45), *model.lines(program, [9, 0], 21)]
        found.append((outputs, lines))
    (first, first_lines), *others = found
    difference, size = 0.0, 0.0
    for output, exact in zip(first, wanted, strict=True):
        assert output.logits is not None
        difference += float(((output.logits - exact) ** 2).sum())
        size += float((exact**2).sum())
        np.testing.assert_array_equal(output.tokens, output.logits.argmax(axis=1))
    assert (difference / size) ** 0.5 <= TOLERANCE[weights]
    for outputs, lines in others:
        for mine, theirs in zip(outputs, first, strict=True):
            np.testing.assert_array_equal(mine.logits, theirs.logits)
            np.testing.assert_array_equal(mine.tokens, theirs.tokens)
        for one, other in zip(lines, first_lines, strict=True):
            np.testing.assert_array_equal(one, other)


def test_head_dims_without_a_kernel_are_refused() -> None:
    """A model whose head_dim is no multiple of 16 is refused when it is compiled, in words."""
    with pytest.raises(ValueError, match="head_dim must be a multiple of 16, at most 512, not 24"):
        tiny_model(CONFIGS["llama-head-dim"]).native("f32")
