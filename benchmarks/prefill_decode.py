"""Streams beside long prompts: one prefill and one decode worker against two workers that do both.

    python benchmarks/prefill_decode.py
    python benchmarks/prefill_decode.py --rounds 3 --json

Three servers of the same model, two workers of one thread each, take turns; who begins changes from round to
round:

- ``split``: ``--prefill 1 --decode 1``;
- ``chunked``: ``--workers 2``, prompts in steps of at most 512 rows beside the streams;
- ``whole``: ``--workers 2 --max-batch-tokens 8192``, each prompt in one step.

In a round each holds eight streams, and as long as they run long prompts arrive, two at a time: the next when
one of the two has had its answer. Prompts differ from each other from their first token on, and are the same
for all three. Speculation is off: how many tokens a step brings is not the question.

Printed: the time between two arrivals of tokens in a stream (median, 99th percentile, the longest), over all
streams from the first long prompt's being sent until the last one's answer; the tokens that streams got and
the prompt tokens that were computed a second meanwhile; the time to a long prompt's first token, and from
that to its second; and, of ``split``, the time from a last page's being ready until the decode worker went on
with it, as the server measures it. Ratios are of ``split`` to the others, medians over rounds.

Steps shorter than 16 ms travel together to a client: so the median may be two steps.

About 2 minutes a round on two cores that have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
from fleet_routing import kv_memory

from tenfold.bench.figures import table
from tenfold.bench.script import run_script
from tenfold.bench.server import Server

PATH = "/v1/completions"
SIDES = {
    "split": ("--prefill", "1", "--decode", "1"),
    "chunked": ("--workers", "2"),
    "whole": ("--workers", "2", "--max-batch-tokens", "8192"),
}
KV_TOKENS = 32_000
"""That a worker holds."""
LONGEST_STREAM = 6000


class Measured(msgspec.Struct, frozen=True):
    """One side's part of a round; seconds."""

    gaps: list[float]
    """Between arrivals of tokens, of all streams."""
    ttfts: list[float]
    """Of long prompts."""
    seconds: list[float]
    """From their first token to their second."""
    window: float
    stream_tokens: int
    prompt_tokens: int
    splits: float
    """Long prompts that were split."""
    start: float
    """Mean, from a last page's being ready until the decode worker went on."""


class Client:
    """Requests to one server, whose events are put down with their times by one thread."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address

    def open(self, body: dict[str, Any]) -> socket.socket:
        """Sends a request that is to be streamed."""
        sock = socket.create_connection(self._address, timeout=600)
        data = json.dumps({**body, "stream": True}).encode()
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: {self._address[0]}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        sock.sendall(head.encode() + data)
        return sock


def tokens_in(data: bytes) -> int:
    """Tokens of a stretch of a stream: pieces of text."""
    return data.count(b'"text":')


class Streams:
    """Streams that run until they are stopped, read by a thread."""

    def __init__(self, client: Client, bodies: Sequence[dict[str, Any]]) -> None:
        self.arrivals: list[list[tuple[float, int]]] = [[] for _ in bodies]
        self._socks = [client.open(body) for body in bodies]
        self._selector = selectors.DefaultSelector()
        for number, sock in enumerate(self._socks):
            self._selector.register(sock, selectors.EVENT_READ, number)
        self._stopping = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def all_begun(self) -> None:
        """Waits until each has had some tokens."""
        deadline = time.perf_counter() + 120
        while any(len(one) < 10 for one in self.arrivals):
            if time.perf_counter() > deadline or not self._thread.is_alive():
                raise TimeoutError("the streams did not begin within 120 s")
            time.sleep(0.05)

    def stop(self) -> None:
        """Hangs up."""
        self._stopping = True
        self._thread.join()
        for sock in self._socks:
            sock.close()
        self._selector.close()

    def _read(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(0.2):
                data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                now = time.perf_counter()
                if not data:
                    raise ConnectionError("a stream ended before it was to; give it more tokens")
                if count := tokens_in(data):
                    self.arrivals[key.data].append((now, count))


def long_prompt(client: Client, tokens: list[int], answer: int) -> tuple[float, float]:
    """Asks and reads to the end: seconds to the first token, and from that to the second."""
    began = time.perf_counter()
    body = {"prompt": tokens, "max_tokens": answer, "temperature": 0, "ignore_eos": True}
    sock = client.open(body)
    sock.settimeout(600)
    times: list[float] = []
    whole = b""
    while data := sock.recv(1 << 16):
        now = time.perf_counter()
        whole += data
        times += [now] * tokens_in(data)
    sock.close()
    if b"[DONE]" not in whole or b'"error"' in whole:
        raise ValueError(f"a long prompt was answered with {whole[-300:]!r}")
    return times[0] - began, times[1] - times[0]


def measure(server: Server, args: argparse.Namespace, number: int, prompts: int, length: int) -> Measured:
    """One side's part of a round: ``prompts`` of ``length`` tokens beside the streams."""
    client = Client(server.address)
    draw = np.random.default_rng([number, prompts])
    before = server.metrics()
    bodies = [
        {
            "prompt": f"Story number {number}, part {part}. Once upon a time there was",
            "max_tokens": LONGEST_STREAM,
            "seed": part,
            "temperature": 1,
            "ignore_eos": True,
        }
        for part in range(args.streams)
    ]
    streams = Streams(client, bodies)
    try:
        streams.all_begun()
        began = time.perf_counter()
        asked = [draw.integers(100, 40_000, length).tolist() for _ in range(prompts)]
        with ThreadPoolExecutor(args.at_once) as pool:
            answers = list(pool.map(lambda tokens: long_prompt(client, tokens, args.answer), asked))
        ended = time.perf_counter()
    finally:
        streams.stop()
    gaps, got = [], 0
    for arrivals in streams.arrivals:
        times = [when for when, _ in arrivals if began <= when <= ended]
        gaps += np.diff(times).tolist()
        got += sum(count for when, count in arrivals if began <= when <= ended)
    after = server.metrics()

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    starts = grown("transfer_starts_total")
    return Measured(
        gaps=gaps,
        ttfts=[ttft for ttft, _ in answers],
        seconds=[second for _, second in answers],
        window=ended - began,
        stream_tokens=got,
        prompt_tokens=prompts * length,
        splits=grown("router_split_total"),
        start=grown("transfer_start_seconds_total") / starts if starts else 0.0,
    )


def figures(found: Sequence[Measured]) -> dict[str, float]:
    """Of one side, over all rounds; milliseconds where the name says so."""
    gaps = 1e3 * np.array([gap for one in found for gap in one.gaps])
    window = sum(one.window for one in found)
    return {
        "itl_p50_ms": float(np.percentile(gaps, 50)),
        "itl_p99_ms": float(np.percentile(gaps, 99)),
        "itl_max_ms": float(gaps.max()),
        "stream_tokens_s": sum(one.stream_tokens for one in found) / window,
        "prompt_tokens_s": sum(one.prompt_tokens for one in found) / window,
        "ttft_s": statistics.median(ttft for one in found for ttft in one.ttfts),
        "second_token_ms": 1e3 * statistics.median(s for one in found for s in one.seconds),
        "start_ms": 1e3 * statistics.median(one.start for one in found),
        "splits": sum(one.splits for one in found),
    }


def p99_ratio(ours: Sequence[Measured], theirs: Sequence[Measured]) -> float:
    """Median over rounds of the ratio of 99th percentiles."""
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(
        float(np.percentile(one.gaps, 99) / np.percentile(other.gaps, 99)) for one, other in pairs
    )


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a GGUF file, a folder, or a known name")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=4, help="long prompts of a round")
    parser.add_argument("--at-once", type=int, default=2, help="of these")
    parser.add_argument("--tokens", type=int, default=4000, help="of a long prompt")
    parser.add_argument("--answer", type=int, default=8, help="tokens of its answer, at least 2")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--sides", nargs="+", choices=tuple(SIDES), default=list(SIDES))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    common = ["--threads", str(args.threads), "--speculate", "off"]
    common += ["--kv-memory", str(2 * kv_memory(args.model, KV_TOKENS))]
    found: dict[str, list[Measured]] = {side: [] for side in args.sides}
    servers: dict[str, Server] = {}
    try:
        for side in args.sides:
            servers[side] = Server(args.model, *common, *SIDES[side])
        for number in range(args.rounds + 1):
            turn = number % len(args.sides)
            for side in args.sides[turn:] + args.sides[:turn]:
                if number == 0:  # what steps cost is learnt, memory is touched
                    measure(servers[side], args, 0, 1, min(args.tokens, 600))
                else:
                    found[side].append(measure(servers[side], args, number, args.prompts, args.tokens))
    finally:
        for server in servers.values():
            server.stop()
    sides = {side: figures(one) for side, one in found.items()}
    ratios = {
        f"p99_split_over_{side}": p99_ratio(found["split"], found[side])
        for side in args.sides
        if side != "split" and "split" in found
    }
    if args.json:
        print(json.dumps({**sides, **ratios, "rounds": args.rounds}))
        return 0
    names = list(next(iter(sides.values())))
    rows = [[name, *(f"{one[name]:.1f}" for one in sides.values())] for name in names]
    print(f"{args.streams} streams, {args.prompts} prompts of {args.tokens} tokens, {args.rounds} rounds")
    print(table(["", *sides], rows))
    for name, ratio in ratios.items():
        print(f"{name} {ratio:.3f}")
    return 0


if __name__ == "__main__":
    run_script(main)
