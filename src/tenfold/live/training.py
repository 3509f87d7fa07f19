"""From recent answers to a better head than the live one, or the verdict that it is not. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from tenfold.checkpoint.open import open_checkpoint
from tenfold.live.decide import LEAST_CONVERSATIONS, Comparison, compare
from tenfold.live.folder import VERDICT
from tenfold.live.job import LiveJob, Verdict
from tenfold.live.store import read_live
from tenfold.models.recurrent_head import recurrent_head
from tenfold.models.registry import build_graph
from tenfold.speculate.drafter_folder import open_drafter, save_drafter
from tenfold.speculate.features import Answer, FeatureSet, FeatureSource, distinct_share
from tenfold.speculate.head_replay import HeadReplay
from tenfold.speculate.head_weights import rounded
from tenfold.speculate.target import TargetModel
from tenfold.speculate.train_head import train_head
from tenfold.speculate.trained_head import CostCurve, Pace, StartingHead

_HELD_OUT = 0.25
_VALIDATION = 0.10
_FEATURES = "features.bf16"


class Parts(NamedTuple):
    """Indices of answers, no conversation in two parts."""

    training: list[int]
    validation: list[int]
    held_out: list[int]


def split_live(conversations: Sequence[str]) -> Parts | None:
    """Of answers, oldest first: the newest conversations are held out, the next newest validate. A
    conversation is as old as its last answer. None where there are too few to train on and to compare."""
    last = {name: index for index, name in enumerate(conversations)}
    order = sorted(last, key=last.__getitem__)
    held_out = max(LEAST_CONVERSATIONS, round(_HELD_OUT * len(order)))
    validation = max(1, round(_VALIDATION * len(order)))
    training = len(order) - held_out - validation
    if training < held_out:
        return None
    part = {
        name: 0 if i < training else 1 if i < training + validation else 2 for i, name in enumerate(order)
    }
    found = Parts([], [], [])
    for index, name in enumerate(conversations):
        found[part[name]].append(index)
    return found


def train_live(job: LiveJob) -> Verdict:
    """Trains, compares and, if the new head is better, writes it to ``job.output`` in one move.

    Raises OSError, ValueError for answers or a head that are damaged or of another model.
    """
    verdict = _train(job)
    (Path(job.work) / VERDICT).write_bytes(msgspec.json.encode(verdict))
    return verdict


def _train(job: LiveJob) -> Verdict:
    checkpoint = open_checkpoint(Path(job.model))
    try:
        target = TargetModel(build_graph(checkpoint.config), checkpoint)
        drafter = open_drafter(job.present, target)
        try:
            start, costs = drafter.start(), drafter.description.evidence.costs
        finally:
            drafter.close()
        answers = _answers(job, target)
        parts = split_live([answer.group for answer in answers.answers])
        if parts is None:
            return Verdict(
                promoted=False, why=f"{len(answers.answers)} answers are of too few conversations to judge by"
            )
        training, validation, held_out = (answers.select(part) for part in parts)
        if training.token_count - len(training.answers) < job.settings.batch:
            return Verdict(promoted=False, why=f"{training.token_count} tokens are too few to train on")
        head = train_head(training, validation, target, job.settings, costs, (), Path(job.work), start=start)
        new = StartingHead(config=head.config, token_ids=head.token_ids, weights=head.weights)
        found = _compare(held_out, target, start, new, job.settings.unroll, costs)
        if found is None:
            return Verdict(promoted=False, why="the held-out answers are too short to judge by")
        says = (
            f"{found.new:.3f} tokens a step against {found.old:.3f} on {found.conversations} held-out "
            f"conversations, a difference of {found.low:+.3f} to {found.high:+.3f} (95 %)"
        )
        verdict = Verdict(
            promoted=found.better, why=says, trained_tokens=training.token_count, comparison=found
        )
        if found.better:
            output = Path(job.output)
            part = output.with_name(output.name + ".part")
            save_drafter(part, head)
            (part / VERDICT).write_bytes(msgspec.json.encode(verdict))
            part.replace(output)
        return verdict
    finally:
        checkpoint.close()


def _answers(job: LiveJob, target: TargetModel) -> FeatureSet:
    """What can be learnt from, oldest first, copied: the server goes on adding and removing."""
    identity, kept = read_live(Path(job.live))
    answers: list[Answer] = []
    starts: list[int] = []
    rows = 0
    path = Path(job.work) / _FEATURES
    with path.open("wb") as file:
        for answer, features in kept:
            tokens = answer.tokens[: answer.rows]
            if (
                answer.origin is None
                or len(tokens) < 2
                or distinct_share(tokens) < job.settings.least_distinct
            ):
                continue
            origin = answer.origin
            answers.append(
                Answer(
                    tokens=tokens,
                    temperature=origin.temperature,
                    seed=origin.seed,
                    position=origin.position,
                    group=origin.conversation,
                )
            )
            starts.append(rows)
            rows += len(tokens)
            file.write(np.ascontiguousarray(features[: len(tokens)]).tobytes())
    if not rows:
        raise ValueError(f"{job.live} has no answers to learn from")
    mapped = np.memmap(path, np.uint16, "r", shape=(rows, identity.width))
    source = FeatureSource(target=target.fingerprint(), taps=identity.taps, width=identity.width)
    return FeatureSet(job.live, source, answers, starts, mapped)


def _compare(
    held_out: FeatureSet,
    target: TargetModel,
    old: StartingHead,
    new: StartingHead,
    length: int,
    costs: CostCurve,
) -> Comparison | None:
    """Both heads as they are served, with drafts of ``length`` tokens."""
    table = torch.from_numpy(target.rows(target.embedding, range(target.graph.vocab_size))).to(torch.bfloat16)
    paces: list[Pace] = []
    for head in (old, new):
        replay = HeadReplay(held_out, head.token_ids, target.graph.hidden_size, length, costs)
        weights = rounded(
            {name: torch.from_numpy(weight) for name, weight in head.weights.items()}, old.served
        )
        agreed = replay.agreements(recurrent_head(head.config), {**weights, head.config.embedding: table})
        paces.append(replay.pace(agreed, length))
    return compare(replay.groups, *paces)
