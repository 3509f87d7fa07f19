"""What is captured is what drew each token, with drafts and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tenfold.engine.engine import Engine
from tenfold.engine.limits import EngineConfig
from tenfold.formats.matrix import Format, Layout
from tenfold.formats.rounding import quantize
from tenfold.live.capture import MOST_TOKENS, LiveCapture
from tenfold.protocol import Request
from tenfold.speculate.base import DraftSequence, Outcome
from tenfold.speculate.fixed import FixedSpeculator
from tenfold.traffic.store import Features
from tests.engine.test_speculation import FREE, LONG, WithFeatures, plain
from tests.helpers.drafters import FunctionDrafter, drafters
from tests.helpers.identity import texts_of
from tests.helpers.requests import request, run


class Capturing(FixedSpeculator):
    """Drafts always, and captures as the learning speculator does."""

    def __init__(self, drafter: FunctionDrafter, capture: LiveCapture) -> None:
        super().__init__(drafter, 3, True)
        self.capture = capture
        self.kept: dict[str, tuple[list[int], Features]] = {}

    def begin(self, sequence: DraftSequence) -> None:
        self.capture.begin(sequence)
        super().begin(sequence)

    def propose(
        self, sequences: Sequence[DraftSequence], rows: int, limits: Sequence[int]
    ) -> list[Sequence[int]]:
        self.capture.ask(sequences)
        return super().propose(sequences, rows, limits)

    def observe(self, outcomes: Sequence[Outcome], rows: int, step_ms: float) -> None:
        self.capture.observe(outcomes)
        super().observe(outcomes, rows, step_ms)

    def end(self, sequence: DraftSequence, learn: bool) -> None:
        super().end(sequence, learn)
        self.kept[sequence.id] = list(sequence.tokens), self.capture.end(sequence)


def captured(requests: list[Request], name: str = "often right", **options: Any) -> Capturing:
    law = plain(*requests)
    most = {"most_bytes": options.pop("most_bytes")} if "most_bytes" in options else {}
    speculator = Capturing(drafters(texts_of(law), 40)[name], LiveCapture(2, **most))
    engine = Engine(WithFeatures(**options), EngineConfig(max_running=8), speculator)
    found = run(engine, requests)
    assert {id: one.tokens for id, one in found.items()} == texts_of(law)
    return speculator


def drew(tokens: list[int], prompt: int, count: int) -> Features:
    """The features of `WithFeatures` for an answer's first tokens."""
    numbers = [[tokens[i - 1] + 1000 * (i - 1), -1] for i in range(prompt, prompt + count)]
    return quantize(np.array(numbers, np.float32), Layout(Format.BF16)).codes


def test_every_token_has_the_features_that_drew_it() -> None:
    """With drafts that stand, in part or not at all, and where sequences were put back meanwhile."""
    requests = [request(f"r{i}", LONG[i * 20 : i * 20 + 20], **{**FREE, "max_tokens": 60}) for i in range(5)]
    for name in ("oracle", "often right", "wrong"):
        kept = captured(requests, name, kv_pages=14).kept
        assert len(kept) == 5
        for tokens, features in kept.values():
            count = len(features)
            assert count <= 60
            np.testing.assert_array_equal(features, drew(tokens, 20, count))
        assert sum(len(features) for _, features in kept.values()) >= 200


def test_what_is_not_to_be_learnt_is_not_captured() -> None:
    """Other namespaces, what was resumed, and what is beyond the length of an answer."""
    long = request("long", LONG[:5], **{**FREE, "max_tokens": MOST_TOKENS + 40})
    resumed = request("resumed", LONG[5:9], output=[4, 5, 6], **FREE)
    foreign = Request(
        id="foreign", prompt=(3, 4), params=resumed.params, eos_token_ids=(0,), namespace="somebody"
    )
    speculator = captured([long, resumed, foreign], kv_pages=64)
    found = {id: len(features) for id, (_, features) in speculator.kept.items()}
    assert found == {"long": MOST_TOKENS, "resumed": 0, "foreign": 0}
    assert (speculator.capture._held, speculator.capture._rows, speculator.capture._count) == (0, {}, {})


def test_memory_is_bounded() -> None:
    """With no room for all, those that have it are whole or have their beginning, and nothing is mixed up."""
    requests = [request(f"r{i}", LONG[i : i + 10], **FREE) for i in range(6)]
    kept = captured(requests, most_bytes=50 * 2 * 4, kv_pages=64).kept
    assert 0 < sum(len(features) for _, features in kept.values()) <= 50
    for tokens, features in kept.values():
        if len(features):
            np.testing.assert_array_equal(features, drew(tokens, 10, len(features)))
