"""The command behind `tenfold replay`: from files to a report."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from tqdm import tqdm

from tenfold.backends.base import Program, ProgramInfo
from tenfold.bench.prompts import windows
from tenfold.bench.recording import Recorder
from tenfold.bench.replay import Side, replay
from tenfold.bench.replay_report import ReplayReport, report
from tenfold.bench.version import version
from tenfold.checkpoint.base import Checkpoint
from tenfold.checkpoint.locate import locate
from tenfold.config import ServeConfig
from tenfold.graph.graph import Graph
from tenfold.protocol import SamplingParams
from tenfold.server.text import Text, load_text
from tenfold.speculate.build import SpeculationSettings, build_speculator, drafter_taps
from tenfold.traffic.answering import MAX_ANSWER, answer_params
from tenfold.traffic.reading import TrafficRequest, read_traffic
from tenfold.traffic.running import Job
from tenfold.traffic.splits import HELD_OUT, newest, untrained
from tenfold.worker.build import build_target

WARM_UP_TOKENS = 64
"""Of a prompt that both sides compute before the first turn, ..."""
WARM_UP_ANSWER = 16
"""... and of its answer."""


class ReplaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to replay, and how."""

    traffic: Path
    drafter: Path | None = None
    """A folder that `tenfold train-drafter` wrote; None: speculate with what needs no training."""
    streams: int = 1
    share: float = HELD_OUT
    """The newest share of each class's conversations is replayed."""
    max_answer: int = MAX_ANSWER
    """Most tokens of an answer."""


class Sides(NamedTuple):
    """The two engines of a replay."""

    plain: Side
    speculative: Side
    text: Text
    info: ProgramInfo


def run_replay(config: ServeConfig, settings: ReplaySettings) -> ReplayReport:
    """Replays with progress on standard error. Raises ValueError or OSError for a model, drafter or traffic
    that cannot be used."""
    with open_sides(config, settings) as sides:
        requests = read_traffic(settings.traffic, sides.text, sides.info.vocab_size, sides.info.max_context)
        chosen = newest(requests, settings.share)
        left = chosen if settings.drafter is None else untrained(settings.drafter, chosen)
        if not left:
            raise ValueError(
                f"the drafter in {settings.drafter} has learnt from every conversation that would be "
                "replayed; give newer traffic, or replay more of it with --newest"
            )
        return replay_on(sides, config, settings, left, left_out=len(chosen) - len(left))


@contextmanager
def open_sides(config: ServeConfig, settings: ReplaySettings) -> Iterator[Sides]:
    """Both engines, of programs of their own with as many KV pages each, until the block ends. Raises
    ValueError or OSError for a model or drafter that cannot be used."""
    path = str(locate(config.model))
    text = load_text(path)
    speculation = SpeculationSettings(drafter=settings.drafter)

    def recorder(program: Program, graph: Graph, checkpoint: Checkpoint) -> Recorder:
        speculator = build_speculator(program, graph, checkpoint, speculation)
        if speculator is None:
            raise ValueError("there is nothing to speculate with: no drafter could be made")
        return Recorder(speculator)

    engine_settings = config.engine_settings(path)
    plain = build_target(engine_settings)
    try:
        info = plain.program.info
        speculative = build_target(
            msgspec.structs.replace(engine_settings, kv_memory_bytes=info.kv_pages * info.page_bytes),
            drafter_taps if settings.drafter is not None else lambda *model: (),
            recorder,
        )
        try:
            assert isinstance(speculative.speculator, Recorder)
            sides = Sides(
                Side(plain.engine, text, settings.streams),
                Side(speculative.engine, text, settings.streams, speculative.speculator),
                text,
                info,
            )
            _warm_up(sides)
            yield sides
        finally:
            speculative.engine.close()
    finally:
        plain.engine.close()


def replay_on(
    sides: Sides,
    config: ServeConfig,
    settings: ReplaySettings,
    requests: Sequence[TrafficRequest],
    *,
    left_out: int = 0,
    forecast: Mapping[str, float] | None = None,
) -> ReplayReport:
    """Replays these requests, with progress on standard error; ``forecast`` as in `report`. Raises
    ValueError."""
    own = [
        msgspec.structs.replace(one, params=answer_params(one.params, "own", settings.max_answer))
        for one in requests
    ]
    with tqdm(total=len(own), disable=not sys.stderr.isatty(), unit="request", desc="replaying") as bar:

        def progress(done: int, tokens: int) -> None:
            bar.set_postfix_str(f"{tokens} tokens", refresh=False)
            bar.update(done - bar.n)

        result = replay(sides.plain, sides.speculative, own, settings.streams, progress)
    return report(
        result,
        model=config.model_name,
        version=version(),
        threads=sides.info.threads,
        isa=sides.info.isa,
        left_out=left_out,
        faults=sides.speculative.faults(),
        forecast=forecast,
    )


def _warm_up(sides: Sides) -> None:
    """Touches weights and pages, so that the first turn is like the others."""
    (prompt,) = windows(sides.text.encode_prompt, 1, WARM_UP_TOKENS)
    params = SamplingParams(temperature=0, seed=0, max_tokens=WARM_UP_ANSWER, ignore_eos=True)
    job = Job("warm-up", 0, "warm-up", tuple(prompt), params)
    for side in (sides.plain, sides.speculative):
        side.run([job])
    assert sides.speculative.recorder is not None
    sides.speculative.recorder.take(job.id)
