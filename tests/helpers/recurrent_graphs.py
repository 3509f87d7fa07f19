"""Small recurrent graphs, batches for them, and programs of both backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tenfold.backends.base import Int32s, UnrollBatch
from tenfold.backends.native import NativeBackend, NativeRecurrent
from tenfold.backends.torch.recurrent import TorchRecurrent
from tenfold.backends.torch.reference import TorchBackend
from tenfold.graph.builder import GraphBuilder
from tenfold.graph.graph import Graph
from tenfold.graph.recurrent import RecurrentGraph
from tests.helpers.native_programs import FormatName, RoundedCheckpoint
from tests.helpers.tiny_models import random_weights


def head_graph(
    *, vocab: int = 160, rows: int = 100, hidden: int = 64, inner: int = 96, features: int = 96
) -> RecurrentGraph:
    """Token and state, normed and joined, through a matrix and a gated MLP; the residual stream is the next
    state. What the target hands in has a matrix of its own, for it has another width."""

    def step(first: bool) -> tuple[Graph, str]:
        b = GraphBuilder("head")
        token = b.embed("model.embed_tokens.weight", vocab, hidden)
        if first:
            state = b.linear(b.input("features", features), "head.features.weight", hidden)
        else:
            state = b.input("state", hidden)
        joined = b.concat(
            b.rms_norm(token, "head.token_norm.weight", 1e-5),
            b.rms_norm(state, "head.state_norm.weight", 1e-5),
        )
        x = b.linear(joined, "head.join.weight", hidden)
        normed = b.rms_norm(x, "head.norm.weight", 1e-5)
        gated = b.gate(
            b.linear(normed, "head.gate.weight", inner), b.linear(normed, "head.up.weight", inner), "silu"
        )
        x = b.add(x, b.linear(gated, "head.down.weight", hidden))
        y = b.rms_norm(b.select_rows(x), "head.final_norm.weight", 1e-5)
        b.linear(y, "head.out.weight", rows)
        return b.build(hidden_size=hidden, vocab_size=rows, max_context=1), x

    first, next_ = step(True), step(False)
    return RecurrentGraph(
        first=first[0],
        next=next_[0],
        state_output=(first[1], next_[1]),
        feature_width=features,
        state_width=hidden,
    )


class TinyHead:
    """A recurrent graph with random weights and random ids of its rows."""

    def __init__(self, graph: RecurrentGraph, vocab: int, **weights: Any) -> None:
        self.graph = graph
        self.vocab = vocab
        given = {**random_weights(graph.next), **random_weights(graph.first), **weights}
        self.checkpoint = RoundedCheckpoint(given, {})
        rows = graph.first.vocab_size
        self.token_ids: Int32s = np.random.default_rng(5).permutation(vocab)[:rows].astype(np.int32)

    def native(self, weights: FormatName, **given: Any) -> NativeRecurrent:
        """One thread and 8 sequences unless said otherwise; every call on all of its threads."""
        options: dict[str, Any] = {"threads": 1, **self._own(weights), **given}
        program = NativeBackend().compile_recurrent(self.graph, self.checkpoint, **options)
        if "team_of" not in given:
            program._core.program.fix_threads(options["threads"])
        return program

    def torch(self, weights: FormatName, **given: Any) -> TorchRecurrent:
        """For 8 sequences unless said otherwise."""
        options = {**self._own(weights), **given}
        return TorchBackend().compile_recurrent(self.graph, self.checkpoint, **options)

    def _own(self, weights: FormatName) -> dict[str, Any]:
        ids = {"token_ids": self.token_ids, "vocab_size": self.vocab}
        return {"max_sequences": 8, "format": weights, **ids}


def unroll_batch(
    head: TinyHead,
    lengths: Sequence[int],
    *,
    seed: int = 0,
    temperature: Sequence[float] | float = 1.0,
    floor: Sequence[float] | float = 0.0,
) -> UnrollBatch:
    """Random features, tokens, seeds and positions for so many sequences."""
    rng = np.random.default_rng(seed)
    count = len(lengths)
    return UnrollBatch(
        features=rng.standard_normal((count, head.graph.feature_width)).astype(np.float32),
        tokens=rng.integers(0, head.vocab, count).astype(np.int32),
        seed=rng.integers(0, 2**64, count, dtype=np.uint64),
        position=rng.integers(0, 2**40, count),
        temperature=np.broadcast_to(np.asarray(temperature, np.float32), count).copy(),
        lengths=np.array(lengths, np.int32),
        floor=np.broadcast_to(np.asarray(floor, np.float32), count).copy(),
    )


def part(batch: UnrollBatch, rows: Sequence[int]) -> UnrollBatch:
    """Some sequences of a batch, in any order."""
    return UnrollBatch(**{name: getattr(batch, name)[list(rows)] for name in batch.__struct_fields__})
