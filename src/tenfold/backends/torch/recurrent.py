"""The reference of recurrent programs: the definition of a draft, in plain float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tenfold.backends.base import MOST_DRAFTS, Int32s, UnrollBatch, UnrollOutput
from tenfold.backends.sampling import gumbel, log_softmax
from tenfold.backends.torch import functions
from tenfold.graph.graph import Graph
from tenfold.graph.ops import Embed, Input, SelectRows
from tenfold.graph.recurrent import RecurrentGraph

Tensor = functions.Tensor


class TorchRecurrent:
    """A recurrent graph with its weights ``[out, in]``, run a sequence at a time."""

    def __init__(
        self,
        graph: RecurrentGraph,
        weights: dict[str, Tensor],
        token_ids: Int32s,
        vocab_size: int,
        max_sequences: int,
    ) -> None:
        self._graph = graph
        self._weights = weights
        self._token_ids = token_ids
        self._vocab_size = vocab_size
        self._max_sequences = max_sequences

    def unroll(self, batch: UnrollBatch) -> UnrollOutput:
        """Drafts. Raises ValueError for a batch that does not fit."""
        self._check(batch)
        shape = (len(batch.tokens), int(batch.lengths.max()))
        output = UnrollOutput(tokens=np.full(shape, -1, np.int32), logprobs=np.zeros(shape, np.float32))
        for s in range(len(batch.tokens)):
            self._sequence(batch, s, output)
        return output

    def _sequence(self, batch: UnrollBatch, s: int, output: UnrollOutput) -> None:
        step, value = self._graph.first, torch.from_numpy(batch.features[s : s + 1]).double()
        token, product = int(batch.tokens[s]), 0.0
        temperature = float(batch.temperature[s])
        for k in range(int(batch.lengths[s])):
            values = self._values(step, token, value)
            logits = values[step.ops[-1].output][0].numpy()
            if not (logits > -np.inf).any():
                return
            scores = logits
            if temperature > 0:
                noise = gumbel(int(batch.seed[s]), int(batch.position[s]) + k, self._token_ids)
                scores = logits / temperature + noise
            row = int(np.nanargmax(scores))
            token = int(self._token_ids[row])
            logprob = float(log_softmax(logits / (temperature or 1.0))[row])
            output.tokens[s, k], output.logprobs[s, k] = token, logprob
            product += logprob
            if not np.exp(product) >= batch.floor[s]:
                return
            value = values[self._graph.state_output[min(k, 1)]]
            step = self._graph.next

    def _values(self, graph: Graph, token: int, handed_in: Tensor) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        with torch.inference_mode():
            for op in graph.ops:
                values[op.output] = self._run(op, [values[name] for name in op.inputs], token, handed_in)
        return values

    def _run(self, op: Any, inputs: list[Tensor], token: int, handed_in: Tensor) -> Tensor:
        weights = [self._weights[spec.name] for spec in op.weights]
        match op:
            case Embed():
                return weights[0][token : token + 1] * op.scale
            case Input():
                return handed_in
            case SelectRows():
                return inputs[0]
        return functions.row_wise(op, inputs, weights)

    def _check(self, batch: UnrollBatch) -> None:
        count = len(batch.tokens)
        _need(1 <= count <= self._max_sequences, f"{count} sequences, must be 1 to {self._max_sequences}")
        width = self._graph.feature_width
        _need(batch.features.shape == (count, width), f"features are not [{count}, {width}]")
        per_sequence: list[tuple[str, npt.NDArray[Any]]] = [
            ("seed", batch.seed),
            ("position", batch.position),
            ("temperature", batch.temperature),
            ("lengths", batch.lengths),
            ("floor", batch.floor),
        ]
        for name, array in per_sequence:
            _need(array.shape == (count,), f"{name} has shape {array.shape}, must be [{count}]")
        inside = (batch.tokens >= 0) & (batch.tokens < self._vocab_size)
        _need(bool(inside.all()), "a token is not in the vocabulary")
        few = (batch.lengths >= 1) & (batch.lengths <= MOST_DRAFTS)
        _need(bool(few.all()), f"lengths must be 1 to {MOST_DRAFTS}")
        warm = np.isfinite(batch.temperature) & (batch.temperature >= 0)
        _need(bool(warm.all()), "temperature must be a number, 0 or more")
        _need(not bool(np.isnan(batch.floor).any()), "floor must be a number")

    def close(self) -> None:
        """Frees the memory."""
        self._weights.clear()


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(f"unroll: {message}")
