"""Workers that die, clients that leave, queues that are full: nothing is lost and nothing remains."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tenfold.server.flights import MAX_DEATHS_IN_ALL
from tests.helpers import expected
from tests.helpers.fake_engine import HANG, POISON, FakeConfig
from tests.helpers.server_process import ServerProcess, running_server, wait_for
from tests.helpers.worker_kill import kill_under_load


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts a server of its own for a test."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def run(fake: FakeConfig, **config: Any) -> ServerProcess:
            return stack.enter_context(running_server(tmp_path / "log", fake, **config))

        yield run


def body(count: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": "abc", "seed": 1, "max_tokens": count, "ignore_eos": True, **fields}


def text_of(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    text: str = json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


def idle(server: ServerProcess) -> bool:
    """Whether no request is left, in the front or in the engine."""
    names = ("in_flight", "running", "waiting")
    return all(server.metric(f"tenfold_requests_{name}") == 0 for name in names)


def test_a_killed_worker_is_a_pause_in_the_stream(start: Callable[..., ServerProcess]) -> None:
    """SIGKILL in mid-stream: the stream goes on on a new worker, token for token."""
    server = start(FakeConfig(delay_s=0.005))
    text = ""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body(120, stream=True)) as response:
        for count, line in enumerate(response.iter_lines()):
            text += text_of(line)
            if count == 40:
                server.kill_worker()
    assert text == expected.text("abc", 1, 120)
    assert line == "" or line == "data: [DONE]"
    assert server.metric("tenfold_worker_restarts_total") == 1
    assert httpx.get(f"{server.url}/ready").status_code == 200
    assert "deaths=1 finish=length" in server.log.read_text()


def test_a_worker_killed_under_load_is_told_and_replaced(start: Callable[..., ServerProcess]) -> None:
    """`/ready` turns red at once and green again when the next worker is there; no stream is left without an
    end. (With a real model: benchmarks/worker_kill.py.)"""
    report = kill_under_load(start(FakeConfig(delay_s=0.01, load_s=0.3)), 8, 150)
    assert report.ends == {"done": 8}
    assert report.red_s is not None and report.red_s < 2
    assert report.green_s is not None and report.green_s < 5 + 5  # beside other tests


def test_a_random_seed_survives_the_worker(start: Callable[..., ServerProcess]) -> None:
    """Without a seed from the client too: the front drew it, so both workers use the same noise."""
    server = start(FakeConfig(delay_s=0.005))
    done: list[httpx.Response] = []
    fields = body(100)
    del fields["seed"]
    thread = threading.Thread(
        target=lambda: done.append(httpx.post(f"{server.url}/v1/completions", json=fields, timeout=20))
    )
    thread.start()
    wait_for(lambda: server.metric("tenfold_generated_tokens_total") > 10)
    server.kill_worker()
    thread.join()
    assert done[0].json()["usage"]["completion_tokens"] == 100
    assert server.metric("tenfold_generated_tokens_total") == 100


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_kills_workers_ends_with_one_error(
    start: Callable[..., ServerProcess], stream: bool
) -> None:
    """After two deaths it is given up with 500, and those who come later are served."""
    server = start(FakeConfig())
    fields = {"prompt": [5, POISON], "stream": stream, "max_tokens": 5}
    response = httpx.post(f"{server.url}/v1/completions", json=fields, timeout=20)
    assert response.status_code == 500
    assert "2 workers died" in response.json()["error"]["message"]
    text = httpx.post(f"{server.url}/v1/completions", json=body(5), timeout=20).json()["choices"][0]["text"]
    assert text == expected.text("abc", 1, 5)
    assert server.metric('tenfold_requests_total{finish="error"}') == 1
    assert idle(server)


def kill_ready_worker(server: ServerProcess) -> None:
    """SIGKILL to a worker that has requests."""
    wait_for(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
    server.kill_worker()
    wait_for(lambda: httpx.get(f"{server.url}/ready").status_code == 503)


def test_a_stream_that_cannot_be_saved_ends_with_one_error_event(
    start: Callable[..., ServerProcess],
) -> None:
    """Killed again and again, though it gets on: the text so far, one error event, no [DONE]."""
    server = start(FakeConfig(delay_s=0.005))
    lines: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body(400, stream=True)) as response:
        for line in response.iter_lines():
            if not line:
                continue
            lines.append(line)
            if len(lines) % 20 == 0:
                kill_ready_worker(server)
    assert (
        f"{MAX_DEATHS_IN_ALL} workers died"
        in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
    )
    assert all("error" not in json.loads(line.removeprefix("data: ")) for line in lines[:-1])
    assert expected.text("abc", 1, 400).startswith("".join(map(text_of, lines[:-1])))


def test_an_openai_client_is_told_of_a_stream_that_was_cut(start: Callable[..., ServerProcess]) -> None:
    """An error event in mid-stream raises, and is not taken for a short answer."""
    server = start(FakeConfig(delay_s=0.005), drain_s=0.2)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(model="fake", prompt="abc", max_tokens=400, stream=True)
    with pytest.raises(openai.APIError, match="shutting down"):
        for count, _ in enumerate(stream):
            if count == 5:
                server.process.send_signal(signal.SIGTERM)


def test_a_worker_that_cannot_come_back_is_said_so(
    start: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    """Requests in flight and new ones get 503 with the reason, instead of waiting for ever."""
    server = start(FakeConfig(delay_s=0.005, only_once=str(tmp_path / "once")))
    found: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: found.append(httpx.post(f"{server.url}/v1/completions", json=body(400), timeout=30))
    )
    thread.start()
    wait_for(lambda: server.metric("tenfold_generated_tokens_total") > 5)
    server.kill_worker()
    thread.join()
    later = httpx.post(f"{server.url}/v1/completions", json=body(5))
    for response in (found[0], later):
        assert response.status_code == 503
        assert "cannot be started" in response.json()["error"]["message"]
    ready = httpx.get(f"{server.url}/ready")
    assert ready.status_code == 503
    assert "cannot be started" in ready.json()["reason"]
    assert httpx.get(f"{server.url}/health").status_code == 200


def raw_request(server: ServerProcess, fields: dict[str, Any]) -> socket.socket:
    """A connection on which a request was sent and nothing read."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    sock = socket.create_connection((host, int(port)))
    data = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    sock.sendall(head + data)
    return sock


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_request_along(
    start: Callable[..., ServerProcess], stream: bool
) -> None:
    """While running and while queued, streaming or not: the engine is idle soon after."""
    server = start(FakeConfig(delay_s=0.01, max_context=1 << 20), max_running=1)
    running = raw_request(server, body(100_000, stream=stream))
    wait_for(lambda: server.metric("tenfold_requests_running") == 1)
    queued = raw_request(server, body(100_000, stream=stream))
    wait_for(lambda: server.metric("tenfold_requests_waiting") == 1)
    queued.close()
    wait_for(lambda: server.metric("tenfold_requests_waiting") == 0)
    assert server.metric("tenfold_requests_running") == 1
    running.close()
    wait_for(lambda: idle(server), 2)
    assert server.metric('tenfold_requests_total{finish="abort"}') == 2


def test_a_client_that_leaves_before_its_body_is_whole(start: Callable[..., ServerProcess]) -> None:
    """Nothing was accepted, nothing remains."""
    server = start(FakeConfig())
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        time.sleep(0.05)
    assert idle(server)
    assert httpx.post(f"{server.url}/v1/completions", json=body(2)).status_code == 200


def test_a_client_that_leaves_while_the_worker_is_away(start: Callable[..., ServerProcess]) -> None:
    """Its request is not taken up again by the new worker."""
    server = start(FakeConfig(delay_s=0.01, load_s=0.5, max_context=1 << 20))
    sock = raw_request(server, body(100_000))
    wait_for(lambda: server.metric("tenfold_requests_running") == 1)
    server.kill_worker()
    wait_for(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
    sock.close()
    wait_for(lambda: server.metric("tenfold_requests_in_flight") == 0)
    wait_for(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
    assert server.metric("tenfold_requests_running") == 0


def test_a_client_that_reads_slowly_gets_everything(start: Callable[..., ServerProcess]) -> None:
    """Tokens wait in the front meanwhile, and others are not held up."""
    server = start(FakeConfig(max_context=1 << 20))
    text = ""
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body(20_000, stream=True), timeout=30
    ) as response:
        lines = response.iter_lines()
        next(lines)
        quick = httpx.post(f"{server.url}/v1/completions", json=body(5)).json()
        assert quick["choices"][0]["text"] == expected.text("abc", 1, 5)
        time.sleep(0.5)
        for line in lines:
            text += text_of(line)
    assert expected.text("abc", 1, 20_000).endswith(text)
    assert line == "data: [DONE]" or line == ""


def test_a_full_queue_is_429_with_an_estimate(start: Callable[..., ServerProcess]) -> None:
    """Beyond max_running and max_queue a request is refused at once; when there is room again it is taken."""
    server = start(FakeConfig(delay_s=0.01, max_context=1 << 20), max_running=1, max_queue=2)
    socks = [raw_request(server, body(100_000)) for _ in range(3)]
    wait_for(lambda: server.metric("tenfold_requests_in_flight") == 3)
    began = time.monotonic()
    response = httpx.post(f"{server.url}/v1/completions", json=body(5))
    assert time.monotonic() - began < 1
    assert response.status_code == 429
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert response.json()["error"]["code"] == "queue_full"
    assert server.metric('tenfold_requests_rejected_total{status="429"}') == 1
    for sock in socks:
        sock.close()
    wait_for(lambda: idle(server))
    assert httpx.post(f"{server.url}/v1/completions", json=body(5)).status_code == 200


def test_a_worker_that_makes_no_step_is_not_ready(start: Callable[..., ServerProcess]) -> None:
    """The process lives, so /health is fine; but work without progress makes /ready say so."""
    server = start(FakeConfig(), stall_after_s=0.3)
    sock = raw_request(server, {"prompt": [5, HANG], "max_tokens": 5})
    wait_for(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
    assert "no step for" in httpx.get(f"{server.url}/ready").json()["reason"]
    assert httpx.get(f"{server.url}/health").status_code == 200
    sock.close()
    # The worker hangs still, and must not keep the server from ending.
    assert server.stop() == 0


def test_idleness_is_not_taken_for_a_stall(start: Callable[..., ServerProcess]) -> None:
    """No work, no steps, and ready all the same; also right after work has come."""
    server = start(FakeConfig(delay_s=0.05), stall_after_s=0.3)
    time.sleep(0.4)
    sock = raw_request(server, body(30))
    for _ in range(10):
        assert httpx.get(f"{server.url}/ready").status_code == 200
        time.sleep(0.05)
    sock.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopping_server_lets_running_requests_end(
    start: Callable[..., ServerProcess], number: int
) -> None:
    """Exit code 0, no traceback, and the answer is whole; new requests are refused meanwhile."""
    server = start(FakeConfig(delay_s=0.005), drain_s=10)
    found: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: found.append(httpx.post(f"{server.url}/v1/completions", json=body(150), timeout=30))
    )
    with httpx.Client() as http:
        http.get(f"{server.url}/health")
        thread.start()
        wait_for(lambda: server.metric("tenfold_requests_running") == 1)
        server.process.send_signal(number)
        time.sleep(0.1)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
    thread.join()
    assert server.process.wait(20) == 0
    assert found[0].json()["choices"][0]["text"] == expected.text("abc", 1, 150)


def test_a_stopping_server_ends_what_takes_too_long(start: Callable[..., ServerProcess]) -> None:
    """After the grace each request gets one clear end: an error event in a stream, 503 else."""
    server = start(FakeConfig(delay_s=0.01, max_context=1 << 20), drain_s=0.3)
    found: list[httpx.Response] = []
    threads = [
        threading.Thread(
            target=lambda stream=stream: found.append(
                httpx.post(f"{server.url}/v1/completions", json=body(100_000, stream=stream), timeout=30)
            )
        )
        for stream in (False, True)
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.metric("tenfold_generated_tokens_total") > 10)
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 3
    for thread in threads:
        thread.join()
    whole, streamed = sorted(found, key=lambda response: response.status_code != 503)
    assert (whole.status_code, streamed.status_code) == (503, 200)
    assert "shutting down" in whole.json()["error"]["message"]
    last = streamed.text.strip().rpartition("\n\n")[2]
    assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]


def test_a_stop_while_the_model_loads(tmp_path: Path) -> None:
    """Ctrl-C during a long load ends the server at once, quietly."""
    import subprocess
    import sys

    from tests.helpers.server_process import BUILDER, ROOT

    config = {"model": json.dumps({"load_s": 30}), "port": 0}
    code = "from tests.helpers.server_process import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps([config]), BUILDER],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_for(children.read_text, 60)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
