"""Requests to a cluster of Dynamo, as its tests send them, and what comes of them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tenfold.bench.server import Server
from tenfold.cluster.runtime import DynamoMissing, check_version
from tests.helpers.cluster import NAME, ClusterProcess

try:
    check_version()
    missing = ""
except DynamoMissing as error:
    missing = str(error)
if importlib.util.find_spec("tenfold._native") is None:
    missing = "the core is not built"
needs_dynamo = pytest.mark.skipif(bool(missing), reason=missing)

LONGEST_GAP_S = 20.0
"""Far above what it takes (5 s where nothing else runs): the machine may be busy."""


def body(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": NAME,
        "messages": [{"role": "user", "content": f"Tell me of road number {number}. " * (1 + number)}],
        "max_tokens": 24,
        "seed": number,
        **fields,
    }


def answer(url: str, body: dict[str, Any]) -> tuple[Any, ...]:
    """Text, end, and tokens of prompt and answer."""
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    got = response.json()
    choice, usage = got["choices"][0], got["usage"]
    text = choice["message"]["content"]
    return text, choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]


class Streamed:
    """An answer as it came."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.text, self.finish, self.gap_s = "", None, 0.0
        usage: dict[str, int] = {}
        last = time.monotonic()
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked, timeout=120) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                assert not line.startswith(("event:", ":")), line
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    self.finish = choice.get("finish_reason") or self.finish
                    if text := choice["delta"].get("content"):
                        self.text += text
                        now = time.monotonic()
                        self.gap_s, last = max(self.gap_s, now - last), now
        self.all = (self.text, self.finish, usage["prompt_tokens"], usage["completion_tokens"])


LONG = {"max_tokens": 200, "ignore_eos": True}


def over_a_fault(cluster: ClusterProcess, server: Server, fault: Callable[[], object], **fields: Any) -> None:
    """Six streams over both workers, ``fault`` in the middle: all texts are as on one machine."""
    bodies = [body(number, **LONG, **fields) for number in range(6)]
    expected = [answer(server.url, each) for each in bodies]
    with ThreadPoolExecutor(6) as pool:
        streams = [pool.submit(Streamed, cluster.url, each) for each in bodies]
        time.sleep(1.5)
        fault()
        got = [stream.result() for stream in streams]
    assert [each.all for each in got] == expected, cluster.logs()
    assert max(each.gap_s for each in got) < LONGEST_GAP_S


FRESH = itertools.count()


def handed_over(cluster: ClusterProcess) -> bool:
    """Whether the pages of a new prompt come from a prefill worker. It must be answered in any case."""
    asked = {"model": NAME, "prompt": f"Number {next(FRESH)}: " + "the long road " * 20, "max_tokens": 2}
    response = httpx.post(f"{cluster.url}/v1/completions", json=asked, timeout=60)
    assert response.status_code == 200, response.text + cluster.logs()
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]) > 100
