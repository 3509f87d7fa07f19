"""Two worker processes behind a real server: killed, stopped, replaced under load, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers import expected
from tests.helpers.fake_engine import POISON, FakeConfig
from tests.helpers.server_process import ServerProcess, running_server, wait_for

LONG = "the same long beginning of a conversation " * 8


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts a server of two workers for a test."""
    with ExitStack() as stack:

        def run(fake: FakeConfig, **config: Any) -> ServerProcess:
            full = {"workers": 2, "drain_s": 5, **config}
            return stack.enter_context(running_server(tmp_path / "log", fake, **full))

        yield run


class Load:
    """Streams that are read to their ends in threads."""

    def __init__(self, server: ServerProcess, count: int, tokens: int) -> None:
        self.server = server
        self.tokens = tokens
        self._pool = ThreadPoolExecutor(count)
        self.ends: list[Future[None]] = [self._pool.submit(self._one, seed) for seed in range(count)]

    def _one(self, seed: int) -> None:
        """One stream: the text of an undisturbed run, and one end."""
        body = {"prompt": f"{seed} abc", "seed": seed, "max_tokens": self.tokens, "ignore_eos": True}
        text = ""
        ends: list[str] = []
        url = f"{self.server.url}/v1/completions"
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=120) as response:
            assert response.status_code == 200, response.read()
            for line in filter(None, response.iter_lines()):
                assert ends[-1:] != ["[DONE]"]
                if line == "data: [DONE]":
                    ends.append("[DONE]")
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                ends += filter(None, [event["choices"][0]["finish_reason"]])
        assert ends == ["length", "[DONE]"]
        assert text == expected.text(f"{seed} abc", seed, self.tokens)

    def under_way(self) -> None:
        """Waits until every worker has made tokens."""
        wait_for(lambda: self.server.metric("tenfold_generated_tokens_total") > 10 * len(self.ends), 30)
        for name in ("w0", "w1"):
            assert self.server.metric(f'tenfold_worker_requests{{worker="{name}"}}') > 0

    def finish(self) -> None:
        """Waits for all; raises what was wrong."""
        for end in self.ends:
            end.result(timeout=120)
        self._pool.shutdown()
        assert self.server.metric('tenfold_requests_total{finish="length"}') == len(self.ends)
        assert self.server.metric("tenfold_requests_in_flight") == 0


def health(server: ServerProcess) -> dict[str, str]:
    workers: dict[str, str] = httpx.get(f"{server.url}/health").json()["workers"]
    return workers


def all_up(server: ServerProcess) -> bool:
    return set(health(server).values()) == {"up"}


def counted(server: ServerProcess, name: str) -> float:
    return server.metric(f"tenfold_router_{name}_total")


def test_a_killed_worker_of_two_is_a_short_pause(start: Callable[..., ServerProcess]) -> None:
    """Promise: SIGKILL under load: every text is that of an undisturbed run, with one end; the server stays
    ready, and says which worker is away; that one comes back."""
    server = start(FakeConfig(delay_s=0.005, load_s=0.5))
    load = Load(server, 8, 200)
    load.under_way()
    os.kill(server.worker_pids()[0], signal.SIGKILL)
    wait_for(lambda: "starting" in health(server).values())
    assert httpx.get(f"{server.url}/ready").status_code == 200
    load.finish()
    assert server.metric("tenfold_worker_restarts_total") == 1
    wait_for(lambda: all_up(server))


def test_both_workers_dying_at_once_is_a_pause_too(start: Callable[..., ServerProcess]) -> None:
    """Promise: all requests wait for whoever is there first, and go on."""
    server = start(FakeConfig(delay_s=0.005))
    load = Load(server, 6, 200)
    load.under_way()
    pids = server.worker_pids()
    # Stopped first: neither shall take up what the other had, before it dies too.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
    wait_for(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
    load.finish()
    assert server.metric("tenfold_worker_restarts_total") == 2


def test_a_stopped_worker_is_noticed_and_replaced(start: Callable[..., ServerProcess]) -> None:
    """Promise: SIGSTOP under load: its requests end on the other worker, while it is still stopped; later it
    is killed and another is there."""
    server = start(FakeConfig(delay_s=0.005))
    load = Load(server, 6, 200)
    load.under_way()
    stopped = server.worker_pids()[0]
    os.kill(stopped, signal.SIGSTOP)
    load.finish()
    assert counted(server, "moved") > 0
    wait_for(lambda: len(server.worker_pids()) == 2 and stopped not in server.worker_pids(), 60)
    wait_for(lambda: all_up(server), 30)
    # Nobody died of it: those who were there had gone.
    assert server.metric("tenfold_worker_restarts_total") == 1


def test_replacing_all_workers_loses_nothing(start: Callable[..., ServerProcess]) -> None:
    """Promise: SIGHUP under load replaces every process; all texts are the same, and no death is counted."""
    server = start(FakeConfig(delay_s=0.005), drain_s=0.2)
    before = set(server.worker_pids())
    load = Load(server, 8, 300)
    load.under_way()
    server.process.send_signal(signal.SIGHUP)
    load.finish()
    wait_for(lambda: "all workers have been replaced" in server.log.read_text(), 30)
    wait_for(lambda: all_up(server))
    assert before.isdisjoint(server.worker_pids())
    assert server.metric("tenfold_worker_restarts_total") == 0
    assert "deaths=1" not in server.log.read_text()


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
def test_a_server_that_stops_replaces_nobody(start: Callable[..., ServerProcess], first: int) -> None:
    """Promise: what SIGHUP began ends with SIGTERM, and it begins nothing after it: a worker that nobody will
    use is not loaded."""
    server = start(FakeConfig(delay_s=0.02), drain_s=1.5)
    load = Load(server, 4, 400)
    load.under_way()
    said = {signal.SIGHUP: "replacing worker w0", signal.SIGTERM: "stopping: "}[signal.Signals(first)]
    server.process.send_signal(first)
    wait_for(lambda: said in server.log.read_text())
    if first == signal.SIGTERM:
        server.process.send_signal(signal.SIGHUP)
        assert server.process.wait(20) == 0
        assert "replacing worker" not in server.log.read_text()
    else:
        assert server.stop() == 0
        assert "replacing worker w1" not in server.log.read_text()
        assert "starting the next" not in server.log.read_text()


def test_one_worker_is_replaced_too(start: Callable[..., ServerProcess]) -> None:
    """Promise: with nobody else there, requests wait for the new one."""
    server = start(FakeConfig(delay_s=0.005), workers=1)
    before = server.worker_pids()
    done: list[httpx.Response] = []
    fields = {"prompt": "abc", "seed": 1, "max_tokens": 300, "ignore_eos": True}
    thread = threading.Thread(
        target=lambda: done.append(httpx.post(f"{server.url}/v1/completions", json=fields, timeout=60))
    )
    thread.start()
    wait_for(lambda: server.metric("tenfold_generated_tokens_total") > 10)
    server.process.send_signal(signal.SIGHUP)
    thread.join()
    assert done[0].json()["choices"][0]["text"] == expected.text("abc", 1, 300)
    assert before != server.worker_pids()


def ask(server: ServerProcess, prompt: str, **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "seed": 1, "max_tokens": 2, "ignore_eos": True, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def sent(server: ServerProcess) -> list[float]:
    """Requests by worker."""
    return [server.metric(f'tenfold_router_requests_total{{worker="{name}"}}') for name in ("w0", "w1")]


def test_a_conversation_stays_where_its_pages_are(start: Callable[..., ServerProcess]) -> None:
    """Promise: the router hears what is stored, so all turns go to one worker, and it says what it found."""
    server = start(FakeConfig(prompt_token_s=0.0005))
    for turn in range(5):
        assert ask(server, LONG + "and on " * turn).status_code == 200
    assert sorted(sent(server)) == [0, 5]
    assert counted(server, "overlap_tokens") >= 4 * len(LONG) * 0.8
    assert counted(server, "gaps") == 0


def test_round_robin_takes_turns(start: Callable[..., ServerProcess]) -> None:
    """Promise: the policy that was asked for is the one that routes."""
    server = start(FakeConfig(), routing="round-robin")
    for turn in range(4):
        ask(server, LONG + "and on " * turn)
    assert sent(server) == [2, 2]


def test_a_lost_message_is_healed(start: Callable[..., ServerProcess]) -> None:
    """Promise: events that never arrive are noticed by the next, or by the worker's load, and healed by
    asking for all pages; routing by pages works afterwards."""
    server = start(FakeConfig(prompt_token_s=0.0005, lose_events=1))
    ask(server, LONG)
    wait_for(lambda: counted(server, "resyncs") == 1, 20)
    assert counted(server, "gaps") == 1
    for _ in range(3):
        ask(server, LONG)
    assert sorted(sent(server)) == [0, 4]


def test_a_request_that_kills_workers_is_quarantined(start: Callable[..., ServerProcess]) -> None:
    """Promise: after two deaths, one of each worker, it is answered with an error, and others are served by
    then or soon."""
    server = start(FakeConfig(delay_s=0.005))
    response = httpx.post(
        f"{server.url}/v1/completions", json={"prompt": [5, POISON], "max_tokens": 5}, timeout=60
    )
    assert response.status_code == 500
    assert "2 workers died" in response.json()["error"]["message"]
    assert ask(server, "abc").json()["choices"][0]["text"] == expected.text("abc", 1, 2)
    assert server.metric("tenfold_worker_restarts_total") == 2
