"""Replaying answers with a head: how many of its drafts would have stood, and what that would have gained.

This is what a training is judged by. A loss falls on where the served acceptance does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from tenfold.backends.base import Floats
from tenfold.backends.sampling import gumbel
from tenfold.backends.torch.differentiable import execute
from tenfold.backends.torch.functions import Tensor
from tenfold.graph.recurrent import RecurrentGraph
from tenfold.speculate.features import FeatureSet
from tenfold.speculate.head_data import HeadData
from tenfold.speculate.trained_head import CostCurve, Pace, Replay

_BATCH = 512


class HeadReplay:
    """Answers made ready to be replayed again and again, by heads that draft the same tokens."""

    def __init__(
        self,
        answers: FeatureSet,
        token_ids: Sequence[int],
        hidden: int,
        length: int,
        costs: CostCurve,
        most_tokens: int = 8192,
    ) -> None:
        """Takes every so many-th answer, for about ``most_tokens``; ``length`` is the longest draft.

        Raises ValueError for a cost curve that is shorter than a draft, or answers without an anchor.
        """
        if len(costs.verify) <= length:
            raise ValueError(f"the cost curve has {len(costs.verify)} entries; drafts of {length} need more")
        step = max(1, round(answers.token_count / most_tokens))
        self._answers = answers.select(range(0, len(answers.answers), step))
        self.groups = tuple(answer.group for answer in self._answers.answers)
        """Of the answers that are replayed."""
        self._data = HeadData(self._answers, token_ids, hidden)
        if len(self._data.anchors) == 0:
            raise ValueError("there is no answer of two tokens to replay")
        self._length = length
        self._costs = costs
        self._ids = np.asarray(token_ids, dtype=np.int64)
        self._noise = self._draw_noise()

    def run(self, graph: RecurrentGraph, weights: Mapping[str, Tensor]) -> Replay:
        """Replays with a head whose ``first`` reads features as they are in the set."""
        return self.walk(self.agreements(graph, weights))

    def walk(self, agreed: npt.NDArray[np.int64]) -> Replay:
        """What drafts would have done of which so many tokens stand, by anchor."""
        lengths = range(1, self._length + 1)
        paces = [self.pace(agreed, length) for length in lengths]
        committed = int(paces[0].tokens.sum())
        steps = [int(pace.steps.sum()) for pace in paces]
        costs = [self._costs.verify[length] + length * self._costs.draft for length in lengths]
        return Replay(
            anchors=len(agreed),
            acceptance=tuple(float((agreed >= k).mean()) for k in lengths),
            tokens_per_step=tuple(committed / n for n in steps),
            speed=tuple(committed / (n * cost) for n, cost in zip(steps, costs, strict=True)),
        )

    def pace(self, agreed: npt.NDArray[np.int64], length: int) -> Pace:
        """The same by answer, for drafts of ``length``."""
        tokens, steps = [], []
        offset = 0
        for answer in self._answers.answers:
            count = max(len(answer.tokens) - 1, 0)
            own = agreed[offset : offset + count]
            offset += count
            at = made = 0
            while at < count:
                at += min(int(own[at]), length) + 1
                made += 1
            tokens.append(count)
            steps.append(made)
        return Pace(np.array(tokens, np.int64), np.array(steps, np.int64))

    def agreements(self, graph: RecurrentGraph, weights: Mapping[str, Tensor]) -> npt.NDArray[np.int64]:
        """For each anchor, how many of a draft's tokens would stand."""
        parts = []
        for first in range(0, len(self._data.anchors), _BATCH):
            rows = self._data.anchors[first : first + _BATCH]
            left = self._data.left[first : first + _BATCH]
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
                parts.append(self._unroll(graph, weights, rows, left))
        return np.concatenate(parts)

    def _unroll(
        self,
        graph: RecurrentGraph,
        weights: Mapping[str, Tensor],
        rows: npt.NDArray[np.int64],
        left: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        agreed = np.zeros(len(rows), dtype=np.int64)
        going = np.arange(len(rows))
        values = execute(
            graph.first, weights, self._data.tokens[rows], {"features": self._data.features(rows)}
        )
        state_name = graph.state_output[0]
        for step in range(1, self._length + 1):
            last = graph.first.ops[-1] if step == 1 else graph.next.ops[-1]
            drafted = self._draw(values[last.output], rows[going] + step)
            right = (drafted == self._data.slots[rows[going] + step]).numpy()
            agreed[going[right]] = step
            kept = torch.from_numpy(np.flatnonzero(right & (left[going] > step)))
            going = going[kept.numpy()]
            if step == self._length or len(going) == 0:
                break
            state = values[state_name][kept]
            values = execute(graph.next, weights, self._data.tokens[rows[going] + step], {"state": state})
            state_name = graph.state_output[1]
        return agreed

    def _draw(self, logits: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
        """The slots drawn for these rows, with the noise that drew the target's own tokens."""
        places = self._noise_at[rows]
        drawn = logits.argmax(dim=1)
        noisy = torch.from_numpy(np.flatnonzero(places >= 0))
        if len(noisy):
            places = places[noisy.numpy()]
            scores = logits[noisy].float() / self._temperature[places][:, None] + self._noise[places]
            drawn[noisy] = scores.argmax(dim=1)
        return drawn

    def _draw_noise(self) -> Tensor:
        """The noise of each sampled row, for the drafter's rows: ``[sampled rows, rows of the output]``."""
        self._noise_at = np.full(len(self._answers.features), -1, dtype=np.int64)
        noise: list[Floats] = []
        temperatures: list[float] = []
        for answer, start in zip(self._answers.answers, self._answers.starts, strict=True):
            if answer.temperature == 0:
                continue
            for i in range(1, len(answer.tokens)):
                self._noise_at[start + i] = len(noise)
                noise.append(gumbel(answer.seed, answer.position + i, self._ids).astype(np.float32))
                temperatures.append(answer.temperature)
        self._temperature = torch.tensor(temperatures, dtype=torch.float32)
        return torch.from_numpy(np.stack(noise)) if noise else torch.empty(0, len(self._ids))
