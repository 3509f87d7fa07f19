"""A toy target whose next token is a function of its features, and answers that it could have written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tenfold.formats.matrix import Format, Layout
from tenfold.formats.rounding import quantize
from tenfold.models.registry import build_graph
from tenfold.speculate.features import Answer, FeatureSet, FeatureSource
from tenfold.speculate.target import TargetModel
from tenfold.speculate.trained_head import CostCurve, HeadEvidence, HeadSettings, Replay
from tests.helpers.memory_checkpoint import DictCheckpoint
from tests.helpers.tiny_models import CONFIGS, random_weights

VOCAB = CONFIGS["llama"]["vocab_size"]
MODES = 3
_REPLAY = Replay(anchors=1, acceptance=(0.5,), tokens_per_step=(1.5,), speed=(1.2,))
EVIDENCE = HeadEvidence(
    answers=1,
    left_out=0,
    anchors=1,
    validation_tokens=1,
    coverage=1.0,
    trained_weights=1,
    settings=HeadSettings(),
    costs=CostCurve(),
    epochs=(),
    best_epoch=0,
    seconds=1.0,
    ended="epochs",
    validation=_REPLAY,
    validation_q8=_REPLAY,
)
"""Of a head that nobody trained."""


def toy_target(name: str = "llama-tied", seed: int = 0) -> TargetModel:
    """A small model with random weights. It need not be run: `toy_answers` makes up what it would do."""
    config = CONFIGS[name]
    graph = build_graph(config)
    return TargetModel(graph, DictCheckpoint(random_weights(graph, seed), config))


def toy_answers(
    target: TargetModel, count: int, seed: int, length: int = 24, temperature: float = 0.0
) -> FeatureSet:
    """Answers in which a token and the answer's mode determine the token after it.

    The mode is in the first third of the features alone, so it must be carried from draft to draft. The final
    state is the drawn token's own output row, as large as makes it near certain.
    """
    hidden = target.graph.hidden_size
    rng = np.random.default_rng(seed)
    cycles = [np.random.default_rng(99 + mode).permutation(VOCAB) for mode in range(MODES)]
    following = [dict(zip(cycle, np.roll(cycle, -1), strict=True)) for cycle in cycles]
    modes = np.random.default_rng(98).standard_normal((MODES, hidden))
    rows = target.rows(target.output, range(VOCAB))
    rows /= np.square(rows).sum(axis=1, keepdims=True)
    answers, features = [], []
    for index in range(count):
        mode = int(rng.integers(MODES))
        tokens = [int(rng.integers(VOCAB))]
        while len(tokens) < length:
            tokens.append(int(following[mode][tokens[-1]]))
        states = np.concatenate(
            [
                np.tile(modes[mode], (length, 1)) * 5 + 20,
                rng.standard_normal((length, hidden)),
                12 * rows[tokens],
            ],
            axis=1,
        )
        features.append(states + 0.05 * rng.standard_normal(states.shape))
        answers.append(
            Answer(
                tokens=tuple(tokens),
                temperature=temperature,
                seed=index,
                position=5,
                group=str(index),
            )
        )
    return feature_set(target, answers, np.concatenate(features))


def feature_set(target: TargetModel, answers: Sequence[Answer], features: np.ndarray) -> FeatureSet:
    """These answers, one after another in ``features``."""
    codes = quantize(features.astype(np.float32), Layout(Format.BF16)).codes
    starts = np.cumsum([0, *(len(answer.tokens) for answer in answers)])[:-1].tolist()
    source = FeatureSource(target=target.fingerprint(), taps=target.taps(), width=codes.shape[1])
    return FeatureSet("toy", source, answers, starts, codes)
