"""From the target's answers to a trained head in a drafter's folder. Needs torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from tenfold import progress
from tenfold.checkpoint.open import open_checkpoint
from tenfold.models.registry import build_graph
from tenfold.speculate.drafter_folder import save_drafter
from tenfold.speculate.features import Answer, FeatureSet, FeatureSource
from tenfold.speculate.target import TargetModel
from tenfold.speculate.train_head import train_head
from tenfold.speculate.trained_head import CostCurve, HeadEvidence, HeadSettings, Progress
from tenfold.traffic.answering import Answered, answer_params
from tenfold.traffic.store import Features

COSTS = "costs.json"
"""What the training was told of the machine: a later sitting must be told the same."""


def make_head(
    model: Path,
    taps: tuple[str, ...],
    features: Features,
    training: Sequence[Answered],
    validation: Sequence[Answered],
    verify: Sequence[float],
    always: Iterable[int],
    output: Path,
    work: Path,
    threads: int,
) -> HeadEvidence:
    """Trains, with progress on standard error, and writes the drafter to ``output``.

    ``verify``: V(1), V(2), ... of this machine. ``always``: tokens that can be drafted in any case. ``work``:
    a folder for what a later sitting needs; each choice of answers has a part of its own in it. Raises
    ValueError for answers that are too few, OSError.
    """
    checkpoint = open_checkpoint(model)
    try:
        target = TargetModel(build_graph(checkpoint.config), checkpoint)
        source = FeatureSource(target=target.fingerprint(), taps=taps, width=features.shape[1])
        own = work / _name(training, validation)
        own.mkdir(parents=True, exist_ok=True)
        with progress.Progress(100, "%", "preparing to train") as bar:

            def told(news: Progress) -> None:
                phase = f"{news.phase}, epoch {news.epoch} of {news.epochs}"
                known = None if news.replay is None else f"validation {news.replay.best_speed:.2f}x"
                bar.at(100 * news.share, phase, known)

            head = train_head(
                _feature_set(own, source, features, training),
                _feature_set(own, source, features, validation),
                target,
                HeadSettings(threads=threads),
                _costs(own / COSTS, verify),
                always,
                own,
                told,
            )
    finally:
        checkpoint.close()
    save_drafter(output, head)
    return head.evidence


def _feature_set(
    folder: Path, source: FeatureSource, features: Features, answered: Sequence[Answered]
) -> FeatureSet:
    answers, starts = [], []
    for one in answered:
        params = answer_params(one.request.params, one.mode, 1)
        assert params.seed is not None, "traffic has seeds"
        answers.append(
            Answer(
                tokens=one.answer.tokens[: one.answer.rows],
                temperature=params.temperature,
                seed=params.seed,
                position=len(one.request.prompt),
                group=one.request.conversation,
            )
        )
        starts.append(one.answer.first_row)
    return FeatureSet(folder, source, answers, starts, features)


def _name(training: Sequence[Answered], validation: Sequence[Answered]) -> str:
    # With their rows: what is kept for a row of the store must be of that row's answer.
    keys = [[(one.answer.key, one.answer.first_row) for one in part] for part in (training, validation)]
    return "head-" + hashlib.blake2b(msgspec.json.encode(keys), digest_size=6).hexdigest()


def _costs(path: Path, verify: Sequence[float]) -> CostCurve:
    """What an earlier sitting was told, or else what was measured now."""
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=CostCurve)
    costs = CostCurve(verify=tuple(verify))
    path.write_bytes(msgspec.json.encode(costs))
    return costs
