"""What the HTTP front costs: CPU time for each streamed token, and latency, with an engine that does nothing.

Run in the repository's root: ``python benchmarks/front_cost.py``. Latency (bars: 1 ms a request and 0.1 ms a
token, at the median): the engine's step takes no time; a request of one token is the whole way from the
client's socket to the worker and back, and what a longer answer takes beyond it, over its further tokens, is
the cost of a token. CPU: the engine's step takes 5 ms, so the front sleeps between two steps as it does in
earnest, and most of the cost of a lone stream is waking up and TCP.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.fake_engine import FakeConfig
from tests.helpers.server_process import ServerProcess, running_server

TOKENS = 1000
ROUNDS = 200
LONG = 500
"""Tokens of the longer answers whose latency is measured."""


def cpu_seconds(pid: int) -> float:
    """CPU time of a process's threads so far; Linux counts it in nanoseconds here."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def read_stream(server: ServerProcess) -> None:
    """Reads one stream to its end, with as little work as possible: the client shares the machine."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port))) as sock:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
        sock.sendall((head + body).encode())
        tail = b""
        while not tail.endswith(b"0\r\n\r\n"):
            tail = (tail + sock.recv(1 << 16))[-512:]
        assert f'"completion_tokens":{TOKENS}'.encode() in tail


def measure(server: ServerProcess, streams: int) -> float:
    """Microseconds of the front's CPU a token, over so many streams at once."""
    threads = [threading.Thread(target=read_stream, args=(server,)) for _ in range(streams)]
    before = cpu_seconds(server.process.pid)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (cpu_seconds(server.process.pid) - before) / (streams * TOKENS) * 1e6


def answer_s(sock: socket.socket, host: str, tokens: int) -> float:
    """Seconds from sending a request to its last byte, on a connection that is kept."""
    body = json.dumps({"prompt": "Hello", "max_tokens": tokens, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
    began = time.perf_counter()
    sock.sendall((head + body).encode())
    tail = b""
    while not tail.endswith(b"0\r\n\r\n"):
        tail = (tail + sock.recv(1 << 16))[-64:]
    return time.perf_counter() - began


def latency(server: ServerProcess) -> tuple[float, float]:
    """Medians: milliseconds of a request of one token, and of each further token of a longer one."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    short, long = [], []
    with socket.create_connection((host, int(port))) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ROUNDS):
            short.append(answer_s(sock, host, 1))
            long.append(answer_s(sock, host, LONG))
    request = statistics.median(short)
    each = statistics.median(longer - request for longer in long) / (LONG - 1)
    return request * 1e3, each * 1e3


def main() -> None:
    """Prints the tables."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(Path(folder) / "log", FakeConfig(max_context=1 << 20)) as server,
    ):
        latency(server)
        request_ms, token_ms = latency(server)
    print("| p50 | ms | bar |\n|---|---|---|")
    print(
        f"| a request of one token | {request_ms:.3f} | 1 |\n| each further token | {token_ms:.4f} | 0.1 |\n"
    )
    fake = FakeConfig(delay_s=0.005, max_context=1 << 20)
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder) / "log", fake) as server:
        read_stream(server)
        print("| streams | front CPU, microseconds a token |\n|---|---|")
        for streams in (1, 8):
            found = sorted(measure(server, streams) for _ in range(3))
            print(f"| {streams} | {found[1]:.0f} ({found[0]:.0f} to {found[2]:.0f}) |", flush=True)


if __name__ == "__main__":
    main()
