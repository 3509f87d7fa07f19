"""Rotary frequencies: the one place that knows how each kind of scaling stretches them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tenfold.graph.ops import Rope, RopeScaling

Frequencies = npt.NDArray[np.float64]


def rope_frequencies(rope: Rope) -> tuple[Frequencies, float]:
    """The angle per position of each pair, ``[rotary_dim / 2]`` float64, and the attention factor.

    Element ``i`` pairs with ``i + rotary_dim / 2``; they turn by ``position * frequency[i]`` radians. Cosine
    and sine are both multiplied by the attention factor (1 but for yarn). Raises ValueError for parameters
    that make no sense. Sources: arXiv 2104.09864; Llama 3.1's model card code; arXiv 2309.00071, section 3.
    """
    scaling = rope.scaling
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    plain = rope.theta**-exponents
    if scaling.kind == "none":
        return plain, 1.0
    if scaling.factor <= 0:
        raise ValueError(f"rope factor must be positive, is {scaling.factor}")
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.original_context <= 0:
        raise ValueError(f"rope {scaling.kind}: original_context must be positive")
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    return _yarn(plain, rope), scaling.attention_factor


def _llama3(plain: Frequencies, scaling: RopeScaling) -> Frequencies:
    """Keeps frequencies that turn more than ``high_freq_factor`` times in the original context, divides those
    that turn less than ``low_freq_factor`` times, and blends between by the number of turns."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if high <= low:
        raise ValueError(f"rope llama3: high_freq_factor {high} must be above low_freq_factor {low}")
    turns = scaling.original_context * plain / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * plain + (1 - keep) * plain / scaling.factor


def _yarn(plain: Frequencies, rope: Rope) -> Frequencies:
    """Blends kept and divided frequencies by a ramp over the pair's index. The ramp's ends are the indices
    that turn ``beta_fast`` and ``beta_slow`` times in the original context, rounded outwards."""
    scaling = rope.scaling

    def index_of(turns: float) -> float:
        return (
            rope.rotary_dim
            * math.log(scaling.original_context / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low = max(math.floor(index_of(scaling.beta_fast)), 0)
    high = min(math.ceil(index_of(scaling.beta_slow)), rope.rotary_dim - 1)
    # Equal ends would divide by zero; the step is then put just above the index.
    width = high - low if high != low else 0.001
    divide = np.clip((np.arange(len(plain)) - low) / width, 0.0, 1.0)
    return divide * plain / scaling.factor + (1 - divide) * plain
