"""Answers of `tenfold train-drafter` as the experiment with block drafters takes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from tenfold.checkpoint.locate import locate
from tenfold.checkpoint.open import open_checkpoint
from tenfold.models.registry import build_graph
from tenfold.optimize.head import _feature_set
from tenfold.server.text import load_text
from tenfold.speculate.features import FeatureSet, FeatureSource, distinct_share
from tenfold.speculate.target import TargetModel
from tenfold.traffic.answering import Answered, _wanted, parse_modes
from tenfold.traffic.reading import read_traffic
from tenfold.traffic.splits import split
from tenfold.traffic.store import ANSWERS, AnswerStore, Features, Identity


class Data(NamedTuple):
    """What is trained with, and what is judged by."""

    target: TargetModel
    """Its checkpoint stays open until the process ends."""
    always: tuple[int, ...]
    training: FeatureSet
    validation: FeatureSet
    held_out: FeatureSet
    """Without answers that go in circles."""
    kinds: tuple[str, ...]
    """Class of each held-out answer."""


def gather(
    model: str, traffic: Path, work: Path, answers: str, max_answer: int, limits: tuple[int, int, int]
) -> Data:
    """``limits``: tokens of training, validation and held-out answers, at most.

    The traffic is what was answered: its newest conversations, which `train-drafter` holds out, have no
    answers. Of the others the newest of each class are held out here. Raises ValueError, OSError.
    """
    path = locate(model)
    text = load_text(str(path))
    checkpoint = open_checkpoint(path)
    target = TargetModel(build_graph(checkpoint.config), checkpoint)
    requests = read_traffic(traffic, text, target.graph.vocab_size, target.graph.max_context)
    with (work / ANSWERS).open("rb") as file:
        identity = msgspec.json.decode(file.readline().partition(b" ")[2], type=Identity)
    with AnswerStore(work, identity) as store:
        known, features = store.answers, store.features()
    source = FeatureSource(target=target.fingerprint(), taps=identity.taps, width=identity.width)
    modes = parse_modes([answers])
    answered = [
        Answered(request, mode, known[job.id])
        for request, mode, job in _wanted(requests, modes, max_answer)
        if job.id in known and known[job.id].rows > 1
    ]
    there = {one.request.line: one.request for one in answered}
    chosen = []
    for part, most in zip(split(list(there.values())), limits, strict=True):
        lines = {request.line for request in part}
        chosen.append(_thinned([one for one in answered if one.request.line in lines], most))
    held_out = [one for one in chosen[2] if distinct_share(one.answer.tokens[: one.answer.rows]) >= 0.6]
    return Data(
        target,
        tuple(text.tokenizer.eos_token_ids),
        _compact(work, source, features, chosen[0]),
        _compact(work, source, features, chosen[1]),
        _compact(work, source, features, held_out),
        tuple(one.request.kind for one in held_out),
    )


def _thinned(answered: Sequence[Answered], most: int) -> list[Answered]:
    """Whole conversations, evenly from each class, for about ``most`` tokens."""
    total = sum(one.answer.rows for one in answered)
    share = min(1.0, most / max(total, 1))
    kept: set[str] = set()
    conversations: dict[str, dict[str, None]] = {}
    kinds: dict[str, str] = {}
    for one in answered:
        kind = kinds.setdefault(one.request.conversation, one.request.kind)
        conversations.setdefault(kind, {})[one.request.conversation] = None
    for names in conversations.values():
        kept |= {name for i, name in enumerate(names) if not i or int((i + 1) * share) > int(i * share)}
    return [one for one in answered if one.request.conversation in kept]


def _compact(
    work: Path, source: FeatureSource, features: Features, answered: Sequence[Answered]
) -> FeatureSet:
    """A set whose features are of its own answers alone: what is kept by row stays small."""
    mapped = _feature_set(work, source, features, answered)
    lengths = [len(answer.tokens) for answer in mapped.answers]
    rows = [np.arange(s, s + n) for s, n in zip(mapped.starts, lengths, strict=True)]
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    return FeatureSet(work, source, mapped.answers, starts, features[np.concatenate(rows)])
