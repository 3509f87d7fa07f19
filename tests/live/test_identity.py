"""No answer depends on which head drafts, nor on when it is exchanged."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tenfold.backends.base import RecurrentProgram
from tenfold.checkpoint.open import open_checkpoint
from tenfold.live.head import LiveHead
from tenfold.models.registry import build_graph
from tenfold.protocol import EngineSettings
from tenfold.speculate.base import DraftSequence
from tenfold.speculate.build import compile_head, drafter_taps
from tenfold.speculate.fixed import FixedSpeculator
from tenfold.worker.build import build_target
from tests.helpers.identity import at_once, differences, play
from tests.helpers.live import tiny_model, write_head
from tests.helpers.requests import request

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tenfold._native") is None, reason="needs the built core"
)
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 1.5, "top_k": 40, "presence_penalty": 0.5},
]


class Exchanging(FixedSpeculator):
    """Drafts always, with another head in every step."""

    def __init__(self, head: LiveHead, next_program: RecurrentProgram, k: int) -> None:
        super().__init__(head, k, True)
        self.exchanges = 0
        self._head, self._next = head, next_program

    def propose(
        self, sequences: Sequence[DraftSequence], rows: int, limits: Sequence[int]
    ) -> list[Sequence[int]]:
        self._next = self._head.exchange(self._next)
        self.exchanges += 1
        return super().propose(sequences, rows, limits)


def test_a_head_exchanged_amid_answers_changes_none(tmp_path: Path) -> None:
    """Two heads, of which one guesses well and one badly, take turns step by step under greedy, sampled and
    penalised requests: tokens and log-probabilities are those without drafts."""
    model = tiny_model(tmp_path / "model")
    for name, calm in (("good", 0.05), ("bad", 4.0)):
        write_head(model, tmp_path / name, calm=calm)
    settings = EngineSettings(model=str(model), threads=1, kv_memory_bytes=8 << 20)
    target = build_target(settings, drafter_taps)
    checkpoint = open_checkpoint(model)
    good, bad = (
        compile_head(target.program, build_graph(checkpoint.config), checkpoint, tmp_path / name)
        for name in ("good", "bad")
    )
    checkpoint.close()
    requests = [
        request(
            f"{n}", [1 + n, 2 + 5 * n % 90, 3], **{"max_tokens": 50, "ignore_eos": True, "seed": n, **params}
        )
        for n, params in enumerate(PARAMS * 3)
    ]
    law, _ = play(target.program, at_once(requests))
    speculator = Exchanging(LiveHead(good), bad, 3)
    found, _ = play(target.program, at_once(requests), speculator)
    assert differences(law, found) == []
    assert speculator.exchanges > 20
    (counts,) = speculator.report().drafters
    assert 0 < counts.accepted_tokens < counts.drafted_tokens
    for program in (good, bad, target.program):
        program.close()
