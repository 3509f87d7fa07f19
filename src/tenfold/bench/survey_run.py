"""Making a survey: some requests computed with speculation, by an engine of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tenfold.backends.base import Program, ProgramInfo
from tenfold.bench.prompts import windows
from tenfold.bench.recording import Recorder
from tenfold.bench.survey import Survey, Surveyor
from tenfold.checkpoint.base import Checkpoint
from tenfold.checkpoint.locate import locate
from tenfold.config import ServeConfig
from tenfold.graph.graph import Graph
from tenfold.progress import Progress
from tenfold.protocol import EngineSettings, SamplingParams
from tenfold.server.text import Text, load_text
from tenfold.speculate.base import Speculator
from tenfold.speculate.build import SpeculationSettings, build_speculator
from tenfold.traffic.answering import answer_params
from tenfold.traffic.reading import TrafficRequest
from tenfold.traffic.running import Job, job_of, run_jobs
from tenfold.worker.build import Target, build_target
from tenfold.worker.loop import EngineLike

WARM_UP_TOKENS = 64
"""Of a prompt that an engine computes before anything is measured, ..."""
WARM_UP_ANSWER = 16
"""... and of its answer."""


def take_survey(
    config: ServeConfig,
    drafter: Path | None,
    choose: Callable[[Text, ProgramInfo], Sequence[TrafficRequest]],
    max_answer: int,
    modes: Sequence[str] = ("own",),
) -> Survey:
    """Computes the requests that ``choose`` says, in each of the ``modes`` (see `answer_params`), with
    progress on standard error. The engine is a fresh one for each mode, as that of a replay is: what its
    suffix drafter learns here would be known there, and with an answer in one mode that in another is half
    known. Raises ValueError or OSError for a model, drafter or requests that cannot be used."""
    return Survey.merged([_survey(config, drafter, choose, max_answer, mode) for mode in modes])


def _survey(
    config: ServeConfig,
    drafter: Path | None,
    choose: Callable[[Text, ProgramInfo], Sequence[TrafficRequest]],
    max_answer: int,
    mode: str,
) -> Survey:
    path = str(locate(config.model))
    text = load_text(path)
    target = build_speculating(config.engine_settings(path), drafter, Surveyor)
    try:
        surveyor = target.speculator
        assert isinstance(surveyor, Surveyor)
        requests = {str(one.line): one for one in choose(text, target.program.info)}
        jobs = [job_of(one, id, answer_params(one.params, mode, max_answer)) for id, one in requests.items()]
        warm_up(target.engine, text)
        surveyor.forget()
        with Progress(len(jobs), "requests", "forecasting") as bar:
            for number, done in enumerate(run_jobs(target.engine, text, jobs, 1), 1):
                surveyor.keep(requests[done.job.id].kind, done)
                bar.at(number)
        return surveyor.survey()
    finally:
        target.engine.close()


def build_speculating(
    settings: EngineSettings, drafter: Path | None, watch: Callable[[Speculator], Recorder]
) -> Target:
    """An engine whose speculator is watched. Raises ValueError or OSError."""

    speculation = SpeculationSettings(drafter=drafter)

    def recorder(program: Program, graph: Graph, checkpoint: Checkpoint) -> Recorder:
        speculator = build_speculator(program, graph, checkpoint, speculation)
        if speculator is None:
            raise ValueError("there is nothing to speculate with: no drafter could be made")
        return watch(speculator)

    return build_target(settings, speculation.taps, recorder)


def warm_up(engine: EngineLike, text: Text) -> None:
    """Touches weights and pages, so that the first request is like the others."""
    (prompt,) = windows(text.encode_prompt, 1, WARM_UP_TOKENS)
    params = SamplingParams(temperature=0, seed=0, max_tokens=WARM_UP_ANSWER, ignore_eos=True)
    for _ in run_jobs(engine, text, [Job("warm-up", 0, "warm-up", tuple(prompt), params)], 1):
        pass
