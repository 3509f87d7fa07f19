"""A tiny model with a bad drafter, and a worker that learns from little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tenfold.checkpoint.locate import locate
from tenfold.checkpoint.open import open_checkpoint
from tenfold.live import trainer
from tenfold.live.build import build_learning
from tenfold.live.learner import LearnSettings
from tenfold.models.recurrent_head import OUTPUT, OUTPUT_NORM, HeadConfig, recurrent_head
from tenfold.models.registry import build_graph
from tenfold.protocol import EngineSettings
from tenfold.speculate.build import drafter_taps
from tenfold.speculate.drafter_folder import save_drafter
from tenfold.speculate.target import TargetModel
from tenfold.speculate.trained_head import HeadSettings, TrainedHead
from tenfold.worker.build import build_target
from tests.helpers.model_files import random_weights, tiny_config, write_folder
from tests.helpers.tiny_models import random_weights as graph_weights
from tests.helpers.toy_drafting import EVIDENCE

BUILDER = "tests.helpers.live:build_quick"
VOCAB = 96
BOOT = "from tenfold.live.trainer import work; work({job!r})"
"""A training that does not give way: on a busy machine it might never come to an end."""
QUICK = LearnSettings(
    first_tokens=1600,
    poll_s=0.02,
    head=HeadSettings(epochs=8, batch=64, learning_rate=5e-3, dropout=0.0, vocab_size=VOCAB, unroll=2),
)


def tiny_model(folder: Path, seed: int = 0) -> Path:
    """A model of 96 tokens and 3 layers."""
    config = tiny_config("llama", vocab_size=VOCAB, num_hidden_layers=3, max_position_embeddings=256)
    return write_folder(folder, config, random_weights(config, seed))


def write_head(model: Path, folder: Path, seed: int = 0, calm: float = 0.05) -> None:
    """A drafter whose weights are random, and ``calm`` of it as sure of its tokens as it would be."""
    checkpoint = open_checkpoint(model)
    target = TargetModel(build_graph(checkpoint.config), checkpoint)
    ids = tuple(range(1, VOCAB))
    config = HeadConfig(
        feature_width=192,
        state_width=64,
        mlp_width=96,
        vocab_size=len(ids),
        embedding=target.embedding,
        target_vocab_size=VOCAB,
        embedding_scale=1.0,
    )
    weights: dict[str, Any] = graph_weights(recurrent_head(config).first, seed)
    del weights[target.embedding]
    weights[OUTPUT] = target.rows(target.output, ids)
    weights[OUTPUT_NORM] = np.full(64, calm, np.float32)
    save_drafter(
        folder,
        TrainedHead(
            config=config,
            token_ids=ids,
            target=target.fingerprint(),
            taps=target.taps(),
            weights=weights,
            evidence=EVIDENCE,
        ),
    )
    checkpoint.close()


def build_quick(settings: EngineSettings) -> Any:
    """As the worker builds a learning engine, but for `QUICK` and `BOOT`."""
    trainer._BOOT = BOOT
    model = locate(settings.model)
    assert settings.drafter is not None
    drafter = Path(settings.drafter)
    target = build_target(
        settings,
        drafter_taps,
        lambda program, graph, checkpoint: build_learning(program, graph, checkpoint, model, drafter, QUICK),
    )
    return target.engine, target.program.info
