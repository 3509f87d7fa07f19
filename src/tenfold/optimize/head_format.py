"""What a head is held in while it serves: by what its drafts cost on this machine and how many of them stand.

A head is read anew for every draft. In four bits that takes a third less time, and a few drafts fewer stand;
which weighs more hangs on how long a step of the target is and on the head, so both are measured.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np

from tenfold.backends.base import Program, RecurrentProgram
from tenfold.checkpoint.locate import locate
from tenfold.checkpoint.open import open_checkpoint
from tenfold.config import ServeConfig
from tenfold.speculate.build import compile_head, drafter_taps
from tenfold.speculate.cost_curve import DEPTH, CostCurve, measure_curve, verification
from tenfold.speculate.drafter_folder import open_drafter, serve_in
from tenfold.speculate.head import unroll_arrays
from tenfold.speculate.target import TargetModel
from tenfold.speculate.trained_head import HeadFormat, Replay
from tenfold.worker.build import build_target

_ROUNDS = 60
_LONG = 3


class FormatCost(msgspec.Struct, frozen=True, kw_only=True):
    """A format that a head can be held in, and what it is worth."""

    format: HeadFormat
    first_ms: float
    """A draft of one token, between two steps of the target; the median."""
    further_ms: float
    """Each token more."""
    step_ms: float
    """A step of the target over one row."""
    speed: float
    """Tokens by cost over those without drafts, on the validation answers, by the best fixed length."""

    def text(self) -> str:
        """For people."""
        return f"{self.speed:.2f}x in {self.format} ({self.first_ms:.2f} ms a draft)"


def choose_format(config: ServeConfig, drafter: Path) -> tuple[FormatCost, ...]:
    """Measures each format, has the drafter served in the best, and tells all of them, the best first.

    Raises what opening the model and the drafter raises.
    """
    path = locate(config.model)
    with contextlib.ExitStack() as stack:
        checkpoint = open_checkpoint(path)
        stack.callback(checkpoint.close)
        target = build_target(config.engine_settings(str(path)), drafter_taps)
        stack.callback(target.engine.close)
        opened = open_drafter(drafter, TargetModel(target.graph, checkpoint))
        evidence, width = opened.description.evidence, opened.graph.feature_width
        opened.close()
        replays = {
            served: replay
            for served in get_args(HeadFormat)
            if (replay := evidence.validation_in(served)) is not None
        }
        heads: dict[HeadFormat, RecurrentProgram] = {}
        for served in replays:
            heads[served] = compile_head(target.program, target.graph, checkpoint, drafter, served)
            stack.callback(heads[served].close)
        step, drafts = _times(target.program, heads, width)
        curve = measure_curve(target.program)
    costs = [_cost(served, *drafts[served], step, curve, replay) for served, replay in replays.items()]
    costs.sort(key=lambda cost: -cost.speed)
    serve_in(drafter, costs[0].format)
    return tuple(costs)


def _times(
    program: Program, heads: dict[HeadFormat, RecurrentProgram], width: int
) -> tuple[float, dict[HeadFormat, tuple[float, float]]]:
    """Milliseconds of a step of one row, and of the first and each further token of each head's drafts.

    A step goes before every draft, for it leaves nothing of a head in the caches; heads and lengths take
    turns.
    """
    batch = unroll_arrays(1, width, 0.0)
    step = verification(min(DEPTH, program.info.max_context - 1), 1)
    steps: list[float] = []
    drafts: dict[HeadFormat, dict[int, list[float]]] = {served: {1: [], _LONG: []} for served in heads}
    for _ in range(_ROUNDS):
        for length in (1, _LONG):
            for served, head in heads.items():
                batch.lengths[:] = length
                began = time.perf_counter()
                program.step(step)
                stepped = time.perf_counter()
                head.unroll(batch)
                drafted = time.perf_counter()
                steps.append((stepped - began) * 1e3)
                drafts[served][length].append((drafted - stepped) * 1e3)
    medians = {}
    for served, times in drafts.items():
        first, long = float(np.median(times[1])), float(np.median(times[_LONG]))
        medians[served] = (first, max(0.0, (long - first) / (_LONG - 1)))
    return float(np.median(steps)), medians


def _cost(
    served: HeadFormat, first: float, further: float, step: float, curve: CostCurve, replay: Replay
) -> FormatCost:
    speeds = [
        tokens / (curve.v(length + 1) + (first + further * (length - 1)) / step)
        for length, tokens in enumerate(replay.tokens_per_step, 1)
    ]
    return FormatCost(
        format=served, first_ms=first, further_ms=further, step_ms=step, speed=max(1.0, *speeds)
    )
