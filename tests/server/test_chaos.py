"""Many requests, and everything that can happen to them at once."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests.helpers import expected
from tests.helpers.fake_engine import FakeConfig
from tests.helpers.server_process import ServerProcess, running_server, wait_for

REQUESTS = 200


async def one(http: httpx.AsyncClient, index: int, rng: random.Random) -> str:
    """One request; returns how it ended, having checked all of its text that arrived."""
    count = rng.randint(1, 80)
    stream = rng.random() < 0.6
    leaves_after = rng.random() * 0.4 if rng.random() < 0.35 else None
    body = {"prompt": "abc", "seed": index, "max_tokens": count, "ignore_eos": True, "stream": stream}
    truth = expected.text("abc", index, count)
    await asyncio.sleep(rng.random() * 0.8)
    read = read_stream if stream else read_whole
    try:
        return await asyncio.wait_for(read(http, body, truth), leaves_after)
    except asyncio.TimeoutError:
        return "left"


async def read_whole(http: httpx.AsyncClient, body: dict[str, Any], truth: str) -> str:
    """An answer is right, or an error object and nothing else."""
    response = await http.post("/v1/completions", json=body)
    if response.status_code != 200:
        assert set(response.json()) == {"error"}
        return f"status {response.status_code}"
    assert response.json()["choices"][0]["text"] == truth
    return "whole"


async def read_stream(http: httpx.AsyncClient, body: dict[str, Any], truth: str) -> str:
    """A stream must be right so far at every moment, and end in exactly one way."""
    text = ""
    ends: list[str] = []
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            return f"status {response.status_code}"
        async for line in response.aiter_lines():
            if not line:
                continue
            assert ends[-1:] not in (["done"], ["error"]), "something follows the end"
            if line == "data: [DONE]":
                ends.append("done")
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                ends.append("error")
                continue
            choice = event["choices"][0]
            text += choice["text"]
            assert truth.startswith(text)
            if choice["finish_reason"]:
                ends.append(choice["finish_reason"])
    assert ends in (["length", "done"], ["error"])
    if ends == ["error"]:
        return "error event"
    assert text == truth
    return "streamed"


async def storm(server: ServerProcess) -> Counter[str]:
    rng = random.Random(20)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as http:
        tasks = [asyncio.create_task(one(http, index, rng)) for index in range(REQUESTS)]
        for pause in (0.5, 1.0):
            await asyncio.sleep(pause)
            await asyncio.to_thread(server.kill_worker)
        return Counter(await asyncio.gather(*tasks))


def test_chaos(tmp_path: Path) -> None:
    """200 requests, a third of the clients leave, the worker dies twice: each request that stays ends in
    exactly one way, with the right text; at the end nothing is left in the front or in the engine."""
    with running_server(tmp_path / "log", FakeConfig(delay_s=0.004), max_running=16, max_queue=256) as server:
        ends = asyncio.run(storm(server))
        assert sum(ends.values()) == REQUESTS
        assert set(ends) <= {"whole", "streamed", "left", "error event", "status 500"}
        assert ends["whole"] + ends["streamed"] > REQUESTS / 3
        assert ends["left"] > 10
        for name in ("in_flight", "running", "waiting"):
            wait_for(lambda name=name: server.metric(f"tenfold_requests_{name}") == 0)
        assert server.metric("tenfold_worker_restarts_total") == 2
        assert server.metric("tenfold_kv_pages_free") == server.metric("tenfold_kv_pages_total")
        finished = sum(
            server.metric(f'tenfold_requests_total{{finish="{finish}"}}')
            for finish in ("stop", "length", "abort", "error")
        )
        # Those who left before their request was read are in no count.
        assert REQUESTS - ends["left"] <= finished <= REQUESTS
