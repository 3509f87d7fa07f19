"""What a connection may do: how long it may take, how much it may send, how little it may read."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers import expected
from tests.helpers.fake_engine import FakeConfig
from tests.helpers.server_process import ServerProcess, running_server, wait_for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with little patience, an endless context, and a step of 2 ms."""
    log = tmp_path_factory.mktemp("connection") / "log"
    with running_server(
        log, FakeConfig(delay_s=0.002, max_context=1 << 20), arrive_s=1.0, unread_s=1.0
    ) as server:
        yield server


def connect(server: ServerProcess, receive_bytes: int | None = None) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.settimeout(30)
    sock.connect((host, int(port)))
    return sock


def message(fields: dict[str, Any]) -> bytes:
    data = json.dumps(fields).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)


def to_end(sock: socket.socket) -> bytes:
    """All that comes until the server hangs up."""
    parts = []
    with sock, contextlib.suppress(ConnectionError):
        while part := sock.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def completion(count: int, **more: Any) -> dict[str, Any]:
    return {"prompt": "abc", "seed": 1, "max_tokens": count, "ignore_eos": True, **more}


def resident_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/statm").read_text()
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def idle(server: ServerProcess) -> bool:
    return server.metric("tenfold_requests_in_flight") == 0 == server.metric("tenfold_requests_running")


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"POST /v1/comp", b"408"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", b"408"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{", b"408"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n", b"408"),
    ],
)
def test_what_does_not_arrive_is_hung_up_on(server: ServerProcess, sent: bytes, answer: bytes) -> None:
    """Nothing, half a head, half a body: 408 where there is something to answer, and the end."""
    began = time.monotonic()
    sock = connect(server)
    sock.sendall(sent)
    got = to_end(sock)
    assert got.split(b" ")[1:2] == ([answer] if answer else [])
    if answer:
        assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    assert time.monotonic() - began >= 0.9


def test_a_drip_of_bytes_is_no_progress(server: ServerProcess) -> None:
    """A byte now and then does not keep a request alive: the whole of it must arrive in time."""
    sock = connect(server)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
    began = time.monotonic()
    with sock, pytest.raises(OSError):
        while time.monotonic() - began < 60:
            sock.sendall(b" ")
            time.sleep(0.1)
    assert idle(server)


def test_a_connection_is_patient_between_requests(server: ServerProcess) -> None:
    """The limit is for requests under way, not for idle connections, nor for answers."""
    with httpx.Client(base_url=server.url) as http:
        assert http.get("/health").status_code == 200
        time.sleep(1.3)
        whole = http.post("/v1/completions", json=completion(700), timeout=60).json()
        assert whole["choices"][0]["text"] == expected.text("abc", 1, 700)


def test_an_endless_head_is_431(server: ServerProcess) -> None:
    """As one header, or as many; memory is not for sale."""
    for part in (b"x" * 1000, b"a: b\r\n" * 200):
        sock = connect(server)
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(300):
                sock.sendall(part)
                time.sleep(0.0005)
        got = to_end(sock)
        assert got == b"" or b" 431 " in got  # a reset may take the answer along
    assert "431 the head of the request is longer" in server.log.read_text()


@pytest.mark.parametrize("count", [2, 3])
def test_a_request_that_overtakes_is_not_read(server: ServerProcess, count: int) -> None:
    """Sent before the answer to the first one: that one is answered, and the connection ends."""
    sock = connect(server)
    sock.sendall(message(completion(50)) * count)
    got = to_end(sock)
    assert got.count(b"HTTP/1.1 200") == 1
    head, _, body = got.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert json.loads(body)["choices"][0]["text"] == expected.text("abc", 1, 50)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_overtakes_and_leaves_is_gone(server: ServerProcess, stream: bool) -> None:
    """Its first request must not run on, though the connection had begun another."""
    aborted = server.metric('tenfold_requests_total{finish="abort"}')
    sock = connect(server)
    sock.sendall(message(completion(500_000, stream=stream)))
    wait_for(lambda: server.metric("tenfold_requests_running") == 1)
    sock.sendall(message(completion(5)) + b"GET /health")
    time.sleep(0.1)
    sock.close()
    wait_for(lambda: idle(server))
    assert server.metric('tenfold_requests_total{finish="abort"}') == aborted + 1


@pytest.mark.parametrize(
    "rubbish", [b"GET /health HTTP/1.1\r\nx: " + b"y" * 200_000, b"\x00\x01 nonsense\r\n\r\n", b"\r\n"]
)
def test_a_stream_goes_on_though_its_client_sends_rubbish(server: ServerProcess, rubbish: bytes) -> None:
    """What comes behind a request changes nothing in its answer, and is not answered itself."""
    sock = connect(server)
    sock.sendall(message(completion(600, stream=True)))
    wait_for(lambda: server.metric("tenfold_requests_running") == 1)
    sock.sendall(rubbish)
    got = to_end(sock)
    text = "".join(json.loads(line)["choices"][0]["text"] for line in re.findall(rb"data: (\{.*\})", got))
    assert text == expected.text("abc", 1, 600)
    assert got.count(b"HTTP/1.1 ") == 1


def test_a_client_that_reads_nothing_costs_no_memory(tmp_path: Path) -> None:
    """Its answer backs up to its socket and no further: it is hung up on, and its request ends."""
    # At a bounded pace, so that what 1.5 s hold does not depend on the machine.
    fake = FakeConfig(max_context=1 << 20, delay_s=0.0005)
    with running_server(tmp_path / "log", fake, unread_s=1.5) as server:
        request = message(completion(1_000_000, stream=True, logprobs=20))
        # Once before, so that what every server needs is there.
        with connect(server, 4096) as warm:
            warm.sendall(request)
            wait_for(lambda: server.metric("tenfold_generated_tokens_total") > 3000, 30)
        wait_for(lambda: idle(server))
        before = resident_bytes(server.process.pid)
        sock = connect(server, 4096)
        sock.sendall(request)
        most = 0
        deadline = time.monotonic() + 60
        while not idle(server) or server.metric('tenfold_requests_total{finish="abort"}') < 2:
            most = max(most, resident_bytes(server.process.pid))
            assert time.monotonic() < deadline
            time.sleep(0.02)
        sock.close()
        assert "a client read nothing for 1.5 s" in server.log.read_text()
    # Of some 3,000 tokens with 20 log-probabilities each; without a bound, of all that 60 s bring.
    assert most - before < 64 << 20


def test_what_waits_for_a_slow_reader_is_bounded_by_bytes_too(tmp_path: Path) -> None:
    """One that takes a little now and then is never found by the clock: its request ends when too much waits,
    over all its choices, and the stream says so where the client gets to it."""
    fake = FakeConfig(max_context=1 << 20, delay_s=0.0005)
    with running_server(tmp_path / "log", fake, unread_s=60.0) as server:
        before = resident_bytes(server.process.pid)
        sock = connect(server, 4096)
        sock.sendall(message(completion(1_000_000, stream=True, logprobs=20, n=3)))
        parts: list[bytes] = []
        deadline = time.monotonic() + 120
        while not idle(server):
            parts.append(sock.recv(2000))
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert resident_bytes(server.process.pid) - before < 64 << 20
        with sock:
            while not parts[-1].endswith(b"0\r\n\r\n"):
                parts.append(sock.recv(1 << 16))
        whole = b"".join(parts)
        (error,) = re.findall(rb'data: (\{"error":.*\})', whole)
        assert json.loads(error)["error"]["code"] == "client_too_slow"
        assert b"[DONE]" not in whole
        assert server.metric('tenfold_requests_total{finish="error"}') == 3


def test_a_client_that_reads_slowly_is_not_hung_up_on(tmp_path: Path) -> None:
    """Whoever takes something now and then gets everything."""
    with running_server(tmp_path / "log", FakeConfig(max_context=1 << 20), unread_s=1.0) as server:
        sock = connect(server, 4096)
        sock.sendall(message(completion(20_000, stream=True)))
        parts: list[bytes] = []
        slow = time.monotonic() + 4
        with sock:
            while not parts or not parts[-1].endswith(b"0\r\n\r\n"):
                part = sock.recv(20_000)
                assert part, "it was hung up on"
                parts.append(part)
                if time.monotonic() < slow:
                    time.sleep(0.05)
        assert b"data: [DONE]" in b"".join(parts[-3:])


def test_a_body_that_is_too_long_is_refused_before_it_is_read(server: ServerProcess) -> None:
    """By its length if that is told, else as soon as it is too much."""
    sock = connect(server)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n")
    with sock:
        assert b" 413 " in sock.recv(1000)
    sock = connect(server)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    with sock, contextlib.suppress(ConnectionError):
        for _ in range(9):
            sock.sendall(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
        assert b" 413 " in sock.recv(1000)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"messages":' + b'[{"a":' * 50_000, "nested too deeply"),
        (json.dumps({"messages": [{"role": "user", "content": "x"}] * 5000}).encode(), "at most 4096"),
        (
            b'{"prompt": "x", "prompt": "x"}',
            'the body has the key "prompt" twice in one object; give it once',
        ),
        (rb'{"prompt": "\ud800"}', "half of a pair"),
        (json.dumps({"prompt": "x" * 7_000_000}).encode(), "bytes"),
        (json.dumps({"prompt": "x", "logit_bias": {"9" * 10_000: 1}}).encode(), "logit_bias"),
    ],
)
def test_bodies_of_unreasonable_size_are_400_at_once(server: ServerProcess, body: bytes, says: str) -> None:
    """Depth, number of messages, length of the prompt, digits of a token id."""
    path = "chat/completions" if b"messages" in body else "completions"
    began = time.monotonic()
    response = httpx.post(f"{server.url}/v1/{path}", content=body, timeout=60)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]
    assert time.monotonic() - began < 10


def test_streams_under_way_end_well_when_the_server_stops(tmp_path: Path) -> None:
    """SIGTERM with streams in flight: the short ones end whole, the long ones with an error and no [DONE]."""
    texts: dict[int, str] = {}
    with running_server(tmp_path / "log", FakeConfig(delay_s=0.01, max_context=1 << 20), drain_s=4) as server:

        def ask(count: int) -> None:
            texts[count] = httpx.post(
                f"{server.url}/v1/completions", json=completion(count, stream=True), timeout=60
            ).text

        threads = [threading.Thread(target=ask, args=(count,)) for count in (60, 80, 500_000, 500_001)]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.metric("tenfold_requests_running") == 4)
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert server.process.wait(20) == 0
    for count, text in texts.items():
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        if count < 1000:
            assert events[-1] == "[DONE]"
            said = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
            assert said == expected.text("abc", 1, count)
        else:
            assert "shutting down" in json.loads(events[-1])["error"]["message"]
            assert "[DONE]" not in text


def test_clients_that_keep_their_connection_get_each_answer(server: ServerProcess) -> None:
    """One after the other on one connection, streamed or not, errors between them."""
    with httpx.Client(base_url=server.url) as http:
        for _ in range(2):
            assert http.post("/v1/completions", content=b"{").status_code == 400
            streamed = http.post("/v1/completions", json=completion(5, stream=True)).text
            assert streamed.endswith("data: [DONE]\n\n")
            whole = http.post("/v1/completions", json=completion(5)).json()
            assert whole["choices"][0]["text"] == expected.text("abc", 1, 5)
