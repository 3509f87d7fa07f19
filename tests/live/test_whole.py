"""From traffic to a better head, in a real server with a tiny model."""

from __future__ import annotations

import importlib.util
import json
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.live import BUILDER, tiny_model, write_head
from tests.helpers.server_process import ServerProcess, running_server, wait_for

MODULES = ("tenfold._native", "torch")
pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in MODULES), reason=f"needs {', '.join(MODULES)}"
)


def ask(server: ServerProcess, number: int) -> str:
    body: dict[str, Any] = {
        "model": "fake",
        "prompt": [1 + number % 90, 1 + number // 90, 7, 9],
        "max_tokens": 40,
        "seed": number,
        "temperature": 0.7,
        "logit_bias": {"0": -100},
    }
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def test_a_head_is_trained_on_the_servers_own_traffic_and_goes_live(tmp_path: Path) -> None:
    """The better head is counted, is in a folder of its own beside the untouched drafter, changes no answer,
    and is what the next server starts with; what was kept of the traffic is for the owner alone."""
    model, drafter = tiny_model(tmp_path / "model"), tmp_path / "drafter"
    write_head(model, drafter, calm=6.0)
    before = {path.name: path.read_bytes() for path in drafter.iterdir()}
    config: dict[str, Any] = {
        "builder": BUILDER,
        "model": str(model),
        "drafter": str(drafter),
        "learn": True,
        "threads": 1,
        "kv_memory_bytes": 8 << 20,
    }
    with running_server(tmp_path / "log", **config) as server, ThreadPoolExecutor(8) as pool:
        first = list(pool.map(lambda n: ask(server, n), range(60)))

        def promoted() -> float:
            time.sleep(0.1)
            ask(server, 1000)
            return server.metric('tenfold_speculation_head_swaps_total{result="promoted"}')

        wait_for(promoted, 200)
        assert [ask(server, n) for n in range(0, 60, 10)] == first[::10]
        assert server.metric("tenfold_speculation_faults_total") == 0
    assert {path.name: path.read_bytes() for path in drafter.iterdir() if path.name != "live"} == before
    assert stat.S_IMODE((drafter / "live").stat().st_mode) == 0o700
    verdict = json.loads((drafter / "live/heads/0001/verdict.json").read_bytes())
    assert verdict["promoted"] and verdict["comparison"][2] > 0
    assert "is live" in (tmp_path / "log").read_text()
    state = json.loads((drafter / "live/state.json").read_bytes())
    assert state["live"] == 1
