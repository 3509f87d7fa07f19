"""`tenfold train-drafter`: from recorded traffic to a drafter of its target's answers, with the evidence.

What is slow leaves its results in the folder's ``work``: the same command goes on where it was stopped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from tenfold.backends.base import Program
from tenfold.bench.replay_report import ReplayReport
from tenfold.bench.replay_run import ReplaySettings, open_sides, replay_on
from tenfold.bench.survey import EVIDENCE, SURVEYED, Survey
from tenfold.bench.survey_run import take_survey
from tenfold.checkpoint.base import Checkpoint
from tenfold.checkpoint.locate import locate
from tenfold.config import ServeConfig
from tenfold.graph.graph import Graph
from tenfold.optimize.head_format import FormatCost, choose_format
from tenfold.progress import Progress
from tenfold.server.text import Text, load_text
from tenfold.speculate.build import drafter_taps
from tenfold.speculate.cost_curve import measure_curve
from tenfold.speculate.trained_head import HeadSettings
from tenfold.traffic.answering import (
    MAX_ANSWER,
    STREAMS,
    Answered,
    Capture,
    agreement,
    answer_traffic,
    check_modes,
    count_answers,
    parse_modes,
)
from tenfold.traffic.reading import TrafficRequest, read_traffic
from tenfold.traffic.repetition import repetitive
from tenfold.traffic.splits import HELD_OUT, Split, first_of_each, split, write_trained
from tenfold.traffic.store import AnswerStore, Identity
from tenfold.worker.build import Target, build_target

WORK = "work"
VERIFIED = 8
"""Rows of a step whose cost the training is told."""
REPLAYED = 40
"""Held-out requests of each class that are replayed for the evidence, the oldest of them; `tenfold replay`
does all."""


class TrainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to train with, and where to."""

    traffic: Path
    output: Path
    answers: tuple[str, ...] = ()
    """See `answering.parse_modes`."""
    max_answer: int = MAX_ANSWER
    """Most tokens of an answer."""
    streams: int = STREAMS
    """Conversations that are answered at once."""
    held_out: float = HELD_OUT
    force: bool = False
    """Replace a drafter that is there."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What a drafter was made of, and what it is worth on traffic that it has not seen."""

    requests: dict[str, int]
    """Of each part of the traffic."""
    classes: dict[str, int]
    """Requests of each class, in all parts."""
    answers: dict[str, int]
    """By how they were drawn; of the parts to train on and to validate with."""
    answer_tokens: int
    repetitive: int
    """Answers that go in circles: nothing is learnt from them."""
    recorded: int
    """Answers to requests that came with the answer of their time, ..."""
    agreed: int
    """... and how many say the same."""
    head: dict[str, Any]
    """What the training tells of itself."""
    formats: tuple[FormatCost, ...]
    """What holding the head in each format is worth on this machine; the first is how it is served."""
    seconds: dict[str, float]
    """Of each phase in this sitting."""
    survey: Survey
    """Of the part that was validated with: what replays are forecast from."""
    replay: ReplayReport

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def text(self) -> str:
        """For people."""
        parts = ", ".join(f"{count} {part}" for part, count in self.requests.items())
        lines = [
            f"Requests: {parts}. {sum(self.answers.values())} answers of {self.answer_tokens} tokens, "
            f"{self.repetitive} of them repetitive and not learnt from."
        ]
        if self.recorded:
            lines.append(f"{self.agreed} of {self.recorded} recorded answers were given again by this model.")
        lines.append("; ".join(each.text() for each in self.formats) + ".")
        times = ", ".join(f"{phase} {seconds / 60:.1f} min" for phase, seconds in self.seconds.items())
        return "\n".join([*lines, f"Took: {times}."]) + "\n\nOn held-out traffic:\n\n" + self.replay.text()


def train_drafter(config: ServeConfig, settings: TrainSettings) -> Evidence:
    """Writes the drafter and its evidence, with progress on standard error.

    Raises ValueError or OSError for a model, traffic or folder that cannot be used, before anything slow has
    begun. A KeyboardInterrupt may come at any time: what is done stays in the folder. (In the training it
    only ends that, with the best epoch so far.)
    """
    modes = parse_modes(settings.answers)
    evidence = settings.output / EVIDENCE
    if evidence.exists() and not settings.force:
        raise ValueError(
            f"{settings.output} has a drafter already; write to another folder, or replace it with --force"
        )
    path = locate(config.model)
    text = load_text(str(path))
    began = time.monotonic()
    target = build_target(config.engine_settings(str(path)), drafter_taps, _capture)
    try:
        info = target.program.info
        requests = read_traffic(settings.traffic, text, info.vocab_size, info.max_context)
        check_modes(modes, requests)
        parts = split(requests, settings.held_out)
        _check_enough(settings, count_answers(parts.training, modes))
        if find_spec("torch") is None:
            raise ValueError("training needs torch, which is not installed; try: pip install torch")
        with AnswerStore(settings.output / WORK, Identity.of(path, info, target.graph, target.taps)) as store:
            learnt = _answers(target, text, store, [*parts.training, *parts.validation], modes, settings)
            features = store.features()
        curve = measure_curve(target.program)
    finally:
        target.engine.close()
    answered = time.monotonic()
    from tenfold.optimize.head import make_head  # brings torch

    known = {request.conversation for request in parts.training}
    head = make_head(
        path,
        target.taps,
        features,
        [one for one in learnt if one.request.conversation in known],
        [one for one in learnt if one.request.conversation not in known],
        [curve.v(rows) for rows in range(1, VERIFIED + 1)],
        text.tokenizer.eos_token_ids,
        settings.output,
        settings.output / WORK,
        info.threads,
    )
    formats = choose_format(config, settings.output)
    write_trained(settings.output, [*parts.training, *parts.validation])
    trained = time.monotonic()
    survey = take_survey(
        config,
        settings.output,
        lambda *_: first_of_each(parts.validation, SURVEYED),
        settings.max_answer,
        ("greedy", "sampled"),
    )
    replay = ReplaySettings(traffic=settings.traffic, drafter=settings.output, max_answer=settings.max_answer)
    with open_sides(config, replay) as sides:
        report = replay_on(sides, config, replay, first_of_each(parts.held_out, REPLAYED), survey)
    same, recorded = agreement(learnt, text)
    result = Evidence(
        requests={name: len(part) for name, part in zip(Split._fields, parts, strict=True)},
        classes=dict(Counter(request.kind for request in requests)),
        answers=dict(Counter(one.mode for one in learnt)),
        answer_tokens=sum(len(one.answer.tokens) for one in learnt),
        repetitive=sum(repetitive(one.answer.tokens) for one in learnt),
        recorded=recorded,
        agreed=same,
        head=msgspec.to_builtins(head),
        formats=formats,
        seconds={
            "answering": answered - began,
            "training": trained - answered,
            "replaying": time.monotonic() - trained,
        },
        survey=survey,
        replay=report,
    )
    evidence.write_bytes(msgspec.json.format(msgspec.json.encode(result.to_json())))
    return result


def _check_enough(settings: TrainSettings, answers: int) -> None:
    """Raises ValueError where even answers of full length are too few to train on: before any is given."""
    most, batch = answers * settings.max_answer, HeadSettings().batch
    if most < batch:
        raise ValueError(
            f"{settings.traffic} has {answers} answers to train on, of up to {settings.max_answer} tokens: "
            f"{most} in all, fewer than the {batch} of a batch. Give more requests, a longer --max-answer or "
            "more --answers"
        )


def _capture(program: Program, graph: Graph, checkpoint: Checkpoint) -> Capture:
    return Capture(sum(graph.widths[tap] for tap in drafter_taps(graph, checkpoint)))


def _answers(
    target: Target,
    text: Text,
    store: AnswerStore,
    requests: Sequence[TrafficRequest],
    modes: dict[str | None, tuple[str, ...]],
    settings: TrainSettings,
) -> list[Answered]:
    """`answer_traffic` with progress on standard error."""
    assert isinstance(target.speculator, Capture)
    total = count_answers(requests, modes)
    with Progress(total, "answers", "answering") as bar:

        def progress(answers: int, tokens: int) -> None:
            bar.at(answers, note=f"{tokens} new tokens")

        return answer_traffic(
            target.engine,
            target.speculator,
            text,
            store,
            requests,
            modes,
            max_answer=settings.max_answer,
            streams=settings.streams,
            progress=progress,
        )
