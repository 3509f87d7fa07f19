"""A small model whose text is plain ASCII, and a whole cluster with it in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tenfold.backends.base import ProgramInfo
from tenfold.bench.cluster import children, kept_processes
from tenfold.checkpoint.tokenizer_base import byte_level_alphabet
from tenfold.cluster.ports import free_ports
from tenfold.cluster.probe import known_workers
from tenfold.cluster.up import Cluster, ClusterConfig
from tenfold.engine.engine import Engine
from tenfold.protocol import Chunk, EngineSettings
from tenfold.worker.build import build_engine
from tests.helpers.model_files import random_weights, tiny_config, write_gguf_model
from tests.helpers.server_process import ROOT, wait_for

BUILDER = "tests.helpers.cluster:build_slow_engine"
STEP_S = 0.02
NAME = "tiny"
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_ascii_model(path: Path, context: int = 16384) -> Path:
    """A GGUF file of a random model: byte-level BPE over ASCII, so bytes beyond have no token."""
    names = {byte: char for char, byte in byte_level_alphabet().items()}
    chars = [names[byte] for byte in (10, *range(32, 127))]
    letters = [names[byte] for byte in range(97, 123)]
    pairs = [(left, right) for left in [names[32], *letters] for right in letters]
    merges = pairs[: 256 - len(chars) - 3]
    tokens = [*chars, *(left + right for left, right in merges), "<|start|>", "<|end|>", "<|pad|>"]
    config = tiny_config("llama", vocab_size=len(tokens), max_position_embeddings=context)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3] * 3,
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
        "tokenizer.ggml.padding_token_id": len(tokens) - 1,
        "tokenizer.chat_template": TEMPLATE,
    }
    return write_gguf_model(path, config, random_weights(config), metadata=metadata)


class SlowEngine(Engine):
    """Steps take a while, as a large model's: so there is time for faults."""

    def step(self) -> list[Chunk]:
        time.sleep(STEP_S)
        return super().step()


def build_slow_engine(settings: EngineSettings) -> tuple[Engine, ProgramInfo]:
    """The builder of those."""
    engine, info = build_engine(settings)
    engine.__class__ = SlowEngine
    return engine, info


def main() -> None:
    """The process that keeps a cluster; its argument is a ClusterConfig as JSON."""
    import logging

    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    cluster = Cluster(msgspec.json.decode(sys.argv[1], type=ClusterConfig, dec_hook=lambda t, v: t(v)))
    cluster.run(lambda seconds: print(json.dumps({"seconds": seconds}), flush=True))


class ClusterProcess:
    """A running cluster."""

    def __init__(self, process: subprocess.Popen[str], url: str, folder: Path) -> None:
        self.process = process
        self.url = url
        self.folder = folder

    def pids(self, entry: str, role: str = "") -> list[int]:
        """Of its processes: see `kept_processes`."""
        return kept_processes(self.process.pid, entry, role)

    def engine_of(self, worker: int) -> int:
        """The engine's process of a worker's."""
        (engine,) = children(worker)
        return engine

    def workers(self) -> int:
        """How many the front knows."""
        return known_workers(self.url)

    def wait_for_workers(self, count: int) -> None:
        wait_for(lambda: self.workers() >= count and len(self.pids("worker")) >= count, 90)

    def logs(self) -> str:
        """The ends of all logs, for a test that failed."""
        return "\n".join(
            f"== {log.name}\n" + log.read_text(errors="replace")[-3000:]
            for log in sorted((self.folder / "logs").glob("*.log"))
        )


@contextlib.contextmanager
def running_cluster(
    folder: Path,
    model: Path,
    roles: tuple[str, ...] = ("mixed", "mixed"),
    within: Sequence[str] = (),
    engine: Mapping[str, Any] | None = None,
    **config: Any,
) -> Iterator[ClusterProcess]:
    """A cluster with slow engines; in the end it must stop in order. ``within``: what stands before its
    command; ``engine``: further settings."""
    (port,) = free_ports("127.0.0.1", 1)
    settings = EngineSettings(
        model=str(model),
        threads=1,
        kv_memory_bytes=64 << 20,
        max_batch_tokens=32,  # so a prompt of ten thousand tokens takes longer than a silent stream may
        max_running=32,
        routed=True,
        page_tokens=True,
        transfer=roles[0] != "mixed",
        workers=len(roles),
        **(engine or {}),
    )
    full = ClusterConfig(
        settings=settings,
        served_name=NAME,
        model=str(model),
        roles=roles,
        folder=folder,
        port=port,
        builder=BUILDER,
        **config,
    )
    encoded = msgspec.json.encode(full, enc_hook=str).decode()
    with (folder / "up.log").open("w") as errors:
        process = subprocess.Popen(
            [*within, sys.executable, "-c", "from tests.helpers.cluster import main; main()", encoded],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            start_new_session=True,  # so that all its processes can be sent a Ctrl-C
            # The engine's builder is of the tests.
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )
    cluster = ClusterProcess(process, f"http://{full.host}:{port}", folder)
    assert process.stdout is not None
    with process, process.stdout:
        try:
            assert process.stdout.readline(), (folder / "up.log").read_text() + cluster.logs()
            yield cluster
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
