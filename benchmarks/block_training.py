"""The product's training and replay of heads, and the same for a block drafter: only the network differs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from block_model import (
    Shape,
    initial_block,
    linear,
    position_logits,
    position_state,
    stem,
)

from tenfold.backends.torch.functions import Tensor
from tenfold.graph.recurrent import RecurrentGraph
from tenfold.models.recurrent_head import OUTPUT
from tenfold.speculate.features import FeatureSet
from tenfold.speculate.head_data import HeadData, Indices
from tenfold.speculate.head_replay import HeadReplay
from tenfold.speculate.head_weights import Standard, rounded
from tenfold.speculate.train_head import _Training
from tenfold.speculate.trained_head import CostCurve

Agreed = npt.NDArray[np.int64]


class HeadRun(_Training):
    """A head's training by CPU time, whose normalisers are known, and which leaves nothing on disk."""

    def begin(self, normalisers: Tensor) -> None:
        self.normalisers = normalisers
        self._cpu = time.process_time()

    def _resume(self) -> bool:
        return True

    def _save(self) -> None:
        pass

    def _seconds(self) -> float:
        return time.process_time() - self._cpu

    def agreements(self, answers: FeatureSet) -> Agreed:
        """How many drafted tokens would stand at each anchor of other answers, with weights as served."""
        replay = self.replay_of(answers)
        return replay.agreements(self.graph, {**rounded(self.best, "q8"), self.config.embedding: self.table})

    def replay_of(self, answers: FeatureSet) -> HeadReplay:
        settings, hidden = self.settings, self.config.state_width
        return HeadReplay(
            answers, self.token_ids, hidden, settings.unroll, self.costs, most_tokens=answers.token_count
        )


class BlockRun(HeadRun):
    """The same for a block drafter."""

    def __init__(self, shape: Shape, train: FeatureSet, validation: FeatureSet, *rest: Any) -> None:
        super().__init__(train, validation, *rest)
        if self.config.softcap:
            raise ValueError("the experiment is for targets without a cap on logits")
        self.shape = shape
        self.window = Window(self.train, shape.window)
        generator = torch.Generator().manual_seed(self.settings.seed)
        self.weights = initial_block(shape, self.config, self.weights, self.rows, generator)
        self.trained = {name: w.requires_grad_() for name, w in self.weights.items()}
        self.optimizer = torch.optim.AdamW(
            self.trained.values(),
            lr=self.settings.learning_rate,
            weight_decay=self.settings.weight_decay,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.replay = BlockReplay(
            shape,
            self.standard,
            self.config.embedding,
            self.config.embedding_scale,
            validation,
            self.token_ids,
            self.config.state_width,
            self.costs,
        )

    def replay_of(self, answers: FeatureSet) -> HeadReplay:
        return BlockReplay(
            self.shape,
            self.standard,
            self.config.embedding,
            self.config.embedding_scale,
            answers,
            self.token_ids,
            self.config.state_width,
            self.costs,
            most_tokens=answers.token_count,
        )

    def _served(self) -> dict[str, Tensor]:
        return {**{name: w.detach() for name, w in self.weights.items()}, OUTPUT: self.rows}

    def _loss(self, chosen: Indices, generator: torch.Generator, *, late: bool) -> Tensor:
        settings, data = self.settings, self.data
        weights = {**self.weights, OUTPUT: self.rows_bf16}
        rows, left = data.anchors[chosen], data.left[chosen]
        seen, window_rows = self.window.at(rows)
        features = self.standard.apply(data.features(window_rows.reshape(-1)))
        features += settings.feature_noise * torch.randn(features.shape, generator=generator)
        features = features.reshape(len(rows), self.shape.window, -1)

        def dropped(value: Tensor) -> Tensor:
            mask = torch.rand(value.shape, generator=generator) >= settings.dropout
            return value * mask / (1 - settings.dropout)

        def embedded(at: Indices) -> Tensor:
            token = torch.nn.functional.embedding(data.tokens[at], self.table)
            return token.float() * self.config.embedding_scale

        state = stem(weights, features[:, 0], embedded(rows), dropped)
        context = linear(features, weights["block.keys_values"])
        total: Any = 0.0
        for step in range(1, settings.unroll + 1):
            normed = position_state(weights, self.shape, step, state, context, seen, dropped)
            logits = position_logits(weights, step, normed, embedded(rows + step - 1))
            found = self._drafted(rows + step, logits, normed, late=late)
            total = total + settings.position_decay ** (step - 1) * found.loss.sum()
            goes_on = self._goes_on(found.accepted, generator) & (left > step)
            if not goes_on.any():
                break
            kept = torch.from_numpy(np.flatnonzero(goes_on))
            rows, left = rows[goes_on], left[goes_on]
            state, context, seen = state[kept], context[kept], seen[kept]
        return total / len(chosen)


class Window:
    """The rows before an anchor that belong to its answer."""

    def __init__(self, answers: FeatureSet, size: int) -> None:
        self._ages = np.zeros(len(answers.features), np.int64)
        self._size = size
        for answer, start in zip(answers.answers, answers.starts, strict=True):
            self._ages[start : start + len(answer.tokens)] = np.arange(len(answer.tokens))

    def at(self, rows: Indices) -> tuple[Tensor, Indices]:
        """Which of the window there are ``[n, size]``, and the rows, the anchors' own first."""
        back = np.arange(self._size)
        seen = back <= self._ages[rows][:, None]
        return torch.from_numpy(seen), rows[:, None] - back * seen


class BlockReplay(HeadReplay):
    """Replays with a block drafter: its weights are given in place of the head's, and no graph is read."""

    def __init__(
        self,
        shape: Shape,
        standard: Standard,
        embedding: str,
        scale: float,
        answers: FeatureSet,
        token_ids: tuple[int, ...],
        hidden: int,
        costs: CostCurve,
        most_tokens: int = 8192,
    ) -> None:
        super().__init__(answers, token_ids, hidden, shape.length, costs, most_tokens)
        self._shape, self._standard = shape, standard
        self._embedding, self._scale = embedding, scale
        self._window = Window(self._answers, shape.window)

    def _unroll(self, graph: RecurrentGraph, weights: Any, rows: Indices, left: Indices) -> Agreed:
        data: HeadData = self._data
        agreed = np.zeros(len(rows), dtype=np.int64)
        going = np.arange(len(rows))
        seen, window_rows = self._window.at(rows)
        features = self._standard.apply(data.features(window_rows.reshape(-1)))
        features = features.reshape(len(rows), self._shape.window, -1)

        def embedded(at: Indices) -> Tensor:
            return (
                torch.nn.functional.embedding(data.tokens[at], weights[self._embedding]).float() * self._scale
            )

        state = stem(weights, features[:, 0], embedded(rows))
        context = linear(features, weights["block.keys_values"])
        for step in range(1, self._length + 1):
            drawn = rows[going] + step
            normed = position_state(weights, self._shape, step, state, context, seen)
            drafted = self._draw(position_logits(weights, step, normed, embedded(drawn - 1)), drawn)
            right = (drafted == data.slots[drawn]).numpy()
            agreed[going[right]] = step
            kept = torch.from_numpy(np.flatnonzero(right & (left[going] > step)))
            going = going[kept.numpy()]
            if step == self._length or len(going) == 0:
                break
            state, context, seen = state[kept], context[kept], seen[kept]
        return agreed
