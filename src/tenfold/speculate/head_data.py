"""A feature set as a head's training reads it: anchors, and tensors for rows of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from tenfold.backends.torch.functions import Tensor
from tenfold.speculate.features import BF16s, FeatureSet
from tenfold.speculate.target import TargetModel

_BLOCK = 256
"""Rows of full logits held at a time."""

Indices = npt.NDArray[np.int64]


def bf16_tensor(codes: BF16s) -> Tensor:
    """The bfloat16 tensor of these high halves (a copy)."""
    return torch.from_numpy(np.ascontiguousarray(codes).view(np.int16)).view(torch.bfloat16)


class HeadData:
    """Anchors of a set's answers. An anchor is a row, that is a token that was drawn and the features that
    led to it; a head drafts the rows after it.

    ``tokens``, ``slots`` and ``sampled`` are by row of the features: the token, its place among the drafter's
    output rows (-1: none), and whether it was drawn at a temperature above 0.
    """

    def __init__(self, answers: FeatureSet, token_ids: Sequence[int], hidden: int) -> None:
        rows = len(answers.features)
        tokens = np.zeros(rows, dtype=np.int64)
        sampled = np.zeros(rows, dtype=bool)
        anchors, left = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for answer, start in zip(answers.answers, answers.starts, strict=True):
            count = len(answer.tokens)
            tokens[start : start + count] = answer.tokens
            sampled[start : start + count] = answer.temperature > 0
            anchors.append(np.arange(start, start + count - 1))
            left.append(np.arange(count - 1, 0, -1))
        self.anchors: Indices = np.concatenate(anchors)
        self.left: Indices = np.concatenate(left)
        """For each anchor, the tokens that its answer has after it."""
        self.tokens = torch.from_numpy(tokens)
        self.slots = torch.searchsorted(torch.tensor(token_ids), self.tokens)
        self.slots.clamp_(max=len(token_ids) - 1)
        self.slots[torch.tensor(token_ids)[self.slots] != self.tokens] = -1
        self.sampled = torch.from_numpy(sampled)
        self._features = answers.features
        self._hidden = hidden

    def features(self, rows: Indices) -> Tensor:
        """``[len(rows), width]`` float32."""
        return bf16_tensor(self._features[rows]).float()

    def final_states(self, rows: Indices) -> Tensor:
        """``[len(rows), hidden]`` float32: the target's states that drew these rows' tokens."""
        return bf16_tensor(self._features[rows, -self._hidden :]).float()


def log_normalisers(
    answers: FeatureSet,
    target: TargetModel,
    temperature: float,
    progress: Callable[[float], object] = lambda share: None,
) -> Tensor:
    """For every row of the answers, the logarithm of the sum of ``exp(logit / temperature)`` over the whole
    vocabulary: ``[rows of the features]`` float32, NaN for rows of other answers."""
    known = np.full(len(answers.features), np.nan, dtype=np.float32)
    wanted = [
        np.arange(start, start + len(answer.tokens))
        for answer, start in zip(answers.answers, answers.starts, strict=True)
    ]
    rows = np.concatenate([np.empty(0, np.int64), *wanted])
    name, hidden = target.output, target.graph.hidden_size
    matrix = torch.from_numpy(target.rows(name, range(target.graph.vocab_size))).to(torch.bfloat16)
    with torch.inference_mode():
        for first in range(0, len(rows), _BLOCK):
            part = rows[first : first + _BLOCK]
            states = bf16_tensor(answers.features[part, -hidden:])
            logits = capped(torch.nn.functional.linear(states, matrix).float(), target.softcap)
            known[part] = torch.logsumexp(logits.div_(temperature), dim=1).numpy()
            progress((first + len(part)) / len(rows))
    return torch.from_numpy(known)


def capped(logits: Tensor, softcap: float) -> Tensor:
    """The target's cap on its logits, where it has one."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits
