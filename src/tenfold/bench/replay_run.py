"""The command behind `tenfold replay`: from files to a report."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from tenfold.backends.base import ProgramInfo
from tenfold.bench.recording import Recorder
from tenfold.bench.replay import Side, replay
from tenfold.bench.replay_report import ReplayReport, report
from tenfold.bench.survey import SURVEYED, Sort, Survey, forecast_line, read_survey
from tenfold.bench.survey_run import build_speculating, take_survey, warm_up
from tenfold.bench.version import version
from tenfold.checkpoint.locate import locate
from tenfold.config import ServeConfig
from tenfold.progress import Progress
from tenfold.server.text import Text, load_text
from tenfold.speculate.cost_curve import CostCurve, measure_curve
from tenfold.traffic.answering import MAX_ANSWER, answer_params
from tenfold.traffic.reading import TrafficRequest, read_traffic
from tenfold.traffic.splits import HELD_OUT, before_newest, newest, untrained
from tenfold.worker.build import build_target

CURVE_S = 2.0
"""Time for measuring what steps cost, for the forecast."""


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
    curve: CostCurve
    """What a step costs by its rows, measured now."""


def run_replay(config: ServeConfig, settings: ReplaySettings) -> ReplayReport:
    """Replays with forecast and progress on standard error. What is forecast is told from the drafter's
    evidence; without a drafter, from requests that are older than those that are replayed, which are computed
    first. Raises ValueError or OSError for a model, drafter or traffic that cannot be used."""
    if settings.drafter is not None:
        survey = read_survey(settings.drafter)
    elif settings.share < 1:
        survey = take_survey(config, None, lambda *model: _older(settings, *model), settings.max_answer)
    else:
        survey = Survey()
    with open_sides(config, settings) as sides:
        requests = read_traffic(settings.traffic, sides.text, sides.info.vocab_size, sides.info.max_context)
        chosen = newest(requests, settings.share)
        left = chosen if settings.drafter is None else untrained(settings.drafter, chosen)
        if not left:
            raise ValueError(
                f"the drafter in {settings.drafter} has learnt from every conversation that would be "
                "replayed; give newer traffic, or replay more of it with --newest"
            )
        return replay_on(sides, config, settings, left, survey, left_out=len(chosen) - len(left))


@contextmanager
def open_sides(config: ServeConfig, settings: ReplaySettings) -> Iterator[Sides]:
    """Both engines, of programs of their own with as many KV pages each, until the block ends. Raises
    ValueError or OSError for a model or drafter that cannot be used."""
    path = str(locate(config.model))
    text = load_text(path)
    engine_settings = config.engine_settings(path)
    plain = build_target(engine_settings)
    try:
        info = plain.program.info
        curve = measure_curve(plain.program, CURVE_S)
        speculative = build_speculating(
            msgspec.structs.replace(engine_settings, kv_memory_bytes=info.kv_pages * info.page_bytes),
            settings.drafter,
            Recorder,
        )
        try:
            assert isinstance(speculative.speculator, Recorder)
            sides = Sides(
                Side(plain.engine, text, settings.streams),
                Side(speculative.engine, text, settings.streams, speculative.speculator),
                text,
                info,
                curve,
            )
            for target in (plain, speculative):
                warm_up(target.engine, text)
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
    survey: Survey,
    *,
    left_out: int = 0,
) -> ReplayReport:
    """Replays these requests; what ``survey`` lets expect, and progress, go to standard error. Raises
    ValueError."""
    sorts = Counter(Sort(one.kind, one.params.temperature > 0) for one in requests)
    forecast = survey.forecast(sides.curve, sorts, settings.streams)
    print(forecast_line(forecast), file=sys.stderr, flush=True)
    own = [
        msgspec.structs.replace(one, params=answer_params(one.params, "own", settings.max_answer))
        for one in requests
    ]
    with Progress(len(own), "requests", "replaying") as bar:

        def progress(done: int, tokens: int) -> None:
            bar.at(done, note=f"{tokens} tokens")

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


def _older(settings: ReplaySettings, text: Text, info: ProgramInfo) -> list[TrafficRequest]:
    requests = read_traffic(settings.traffic, text, info.vocab_size, info.max_context)
    return before_newest(requests, settings.share, SURVEYED)
