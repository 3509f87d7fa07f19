"""From a drafter's folder to a speculator: where suffix drafter, head and controller come together."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from tenfold.backends.base import Program, RecurrentProgram
from tenfold.backends.native import NativeBackend
from tenfold.checkpoint.base import Checkpoint
from tenfold.graph.graph import Graph
from tenfold.speculate.base import Drafter, Speculator
from tenfold.speculate.controller import Controller
from tenfold.speculate.cost_curve import measure_curve
from tenfold.speculate.drafter_folder import open_drafter
from tenfold.speculate.head import HeadDrafter, unroll_arrays
from tenfold.speculate.suffix import SuffixDrafter
from tenfold.speculate.target import TargetModel
from tenfold.speculate.trained_head import HeadFormat


class SpeculationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to speculate with."""

    drafter: Path | None = None
    """A folder that `tenfold train-drafter` wrote; None: what needs no training."""

    def taps(self, graph: Graph, checkpoint: Checkpoint) -> tuple[str, ...]:
        """What the target's program must hand back: `drafter_taps` if there is a drafter, else nothing."""
        return () if self.drafter is None else drafter_taps(graph, checkpoint)


def drafter_taps(graph: Graph, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Values of the graph that a drafter's head reads: what its training captures, and what a program must
    hand back for it. Raises ValueError for a target that a head cannot be made for."""
    return TargetModel(graph, checkpoint).taps()


def compile_head(
    program: Program, graph: Graph, checkpoint: Checkpoint, folder: Path, served: HeadFormat | None = None
) -> RecurrentProgram:
    """The head of a drafter's folder, beside its target's program, whose threads it shares. ``served``: held
    so, and not as the drafter says.

    Raises ValueError for a drafter of another target, CheckpointError for a folder that is none.
    """
    drafter = open_drafter(folder, TargetModel(graph, checkpoint), served)
    try:
        head = NativeBackend().compile_recurrent(
            drafter.graph,
            drafter.checkpoint,
            token_ids=np.array(drafter.description.token_ids, np.int32),
            vocab_size=graph.vocab_size,
            max_sequences=program.info.max_logit_rows,
            team_of=program,
        )
        _warm_up(head, drafter.graph.feature_width)
        return head
    finally:
        drafter.close()


def _warm_up(head: RecurrentProgram, feature_width: int) -> None:
    """The first call takes many times what others do (its memory is new), and would be taken for its cost."""
    batch = unroll_arrays(1, feature_width, 0.0)
    batch.lengths[:] = 2
    head.unroll(batch)


def build_speculator(
    program: Program, graph: Graph, checkpoint: Checkpoint, settings: SpeculationSettings
) -> Speculator | None:
    """A speculator for an engine of ``program``, which serves nothing yet and is compiled with `drafter_taps`
    if there is a drafter. None where nothing can be drafted.

    Raises ValueError for a drafter of another target, CheckpointError for a folder that is none.
    """
    if program.info.max_rows < 2 or program.info.max_logit_rows < 2:
        return None
    drafters: list[Drafter] = [SuffixDrafter()]
    if settings.drafter is not None:
        drafters.append(HeadDrafter(compile_head(program, graph, checkpoint, settings.drafter)))
    return Controller(drafters, measure_curve(program), wants_features=settings.drafter is not None)
