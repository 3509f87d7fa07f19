"""A process with one engine that sends pages to engines of other hosts and takes theirs: told what to do by
lines of JSON, one after another, which it answers in kind.

    python -m tests.helpers.host_engine ADDRESS TRANSPORT
"""

from __future__ import annotations

import json
import os
import sys
from subprocess import PIPE, Popen
from typing import Any

import msgspec

from tenfold.engine.engine import Engine
from tenfold.engine.limits import EngineConfig
from tenfold.kv.choice import transfer_between_machines
from tenfold.protocol import KVTransport, Request
from tests.helpers.fake_program import FakeProgram
from tests.helpers.namespaces import Host

SECRET = b"of these two hosts"


class HostEngine:
    """Such a process, for who tells it what to do."""

    def __init__(self, host: Host, transport: KVTransport) -> None:
        command = host.command(sys.executable, "-m", __name__, host.address, transport)
        # The two share a machine: UCX would find out, and use that.
        environment = {**os.environ, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": host.link}
        self.process = Popen(command, stdin=PIPE, stdout=PIPE, env=environment)

    def run(self, request: Request) -> dict[str, Any]:
        """Tokens of a request, the last handoff, cached tokens, and what came of its pages in all."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode(request) + b"\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.communicate()


def main() -> None:
    """Works until there is nothing more to do."""
    address, transport = sys.argv[1:]
    program = FakeProgram(kv_pages=64)
    bytes_of_page = program.info.page_bytes
    transfer = transfer_between_machines(
        transport,  # type: ignore[arg-type]
        "same",
        bytes_of_page,
        64 * bytes_of_page + (1 << 16),
        SECRET,
        address,
    )
    engine = Engine(program, EngineConfig(max_batch_tokens=32), transfer=transfer)
    for line in sys.stdin.buffer:
        engine.add(msgspec.json.decode(line, type=Request))
        answer: dict[str, Any] = {"tokens": [], "handoff": None, "cached": 0}
        while engine.has_work:
            for chunk in engine.step():
                answer["tokens"] += chunk.tokens
                answer["handoff"] = chunk.handoff or answer["handoff"]
                answer["cached"] += chunk.cached_tokens or 0
        counts = engine.load().transfer
        assert counts is not None
        print(json.dumps({**answer, "imports": counts.imports, "fallbacks": counts.fallbacks}), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
