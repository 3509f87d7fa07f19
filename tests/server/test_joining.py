"""Workers of other machines, as real processes that join a real server by address."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tenfold.server.gate import MOST_OF_ADDRESS, TELL_S
from tests.helpers import expected
from tests.helpers.fake_engine import FakeConfig
from tests.helpers.joining_process import SECRET, JoiningWorker, Wire, free_port, joining_worker
from tests.helpers.server_process import ServerProcess, running_server, wait_for

SLOW = FakeConfig(delay_s=0.005)


class Place:
    """A front, and what joins it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._started = 0
        self.port = free_port()
        self.secret = folder / "secret"
        self.secret.write_text(SECRET)
        self.secret.chmod(0o600)

    def front(self, fake: FakeConfig = SLOW, **config: Any) -> ServerProcess:
        """Waits until it is ready: with ``workers=0`` somebody must be about to join."""
        return self._stack.enter_context(self.server(fake, **config))

    def server(self, fake: FakeConfig = SLOW, **config: Any) -> AbstractContextManager[ServerProcess]:
        """The same, to be entered by the test."""
        self._started += 1
        full = {
            "accept_workers": f"127.0.0.1:{self.port}",
            "secret_file": str(self.secret),
            "drain_s": 5,
            **config,
        }
        return running_server(self._folder / f"front{self._started}", fake, **full)

    def worker(self, fake: FakeConfig = SLOW, port: int | None = None, **given: Any) -> JoiningWorker:
        self._started += 1
        log = self._folder / f"worker{self._started}"
        return self._stack.enter_context(joining_worker(log, port or self.port, fake, **given))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(tmp_path, stack)


def states(server: ServerProcess) -> dict[str, str]:
    found: dict[str, str] = httpx.get(f"{server.url}/health").json()["workers"]
    return found


def up(server: ServerProcess, *names: str) -> Callable[[], bool]:
    return lambda: states(server) == dict.fromkeys(names, "up")


def ask(server: ServerProcess, prompt: str = "abc", tokens: int = 4, seed: int = 1) -> str:
    body = {"prompt": prompt, "seed": seed, "max_tokens": tokens, "ignore_eos": True}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=240)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


class Load:
    """Requests that are waited for in threads; each text must be that of an undisturbed run."""

    def __init__(self, server: ServerProcess, count: int, tokens: int) -> None:
        self._server = server
        self._pool = ThreadPoolExecutor(count)
        self._ends: list[Future[None]] = [self._pool.submit(self._one, seed, tokens) for seed in range(count)]

    def _one(self, seed: int, tokens: int) -> None:
        assert ask(self._server, f"{seed} abc", tokens, seed) == expected.text(f"{seed} abc", seed, tokens)

    def on(self, worker: str) -> None:
        """Waits until this worker has some, and tokens were made."""
        here = f'tenfold_worker_requests{{worker="{worker}"}}'
        before = self._server.metric("tenfold_generated_tokens_total")
        wait_for(lambda: self._server.metric(here) > 0)
        wait_for(lambda: self._server.metric("tenfold_generated_tokens_total") > before + 20)
        assert self._server.metric(here) > 0, "the load is too short for this test"

    def finish(self) -> None:
        for end in self._ends:
            end.result(timeout=240)
        self._pool.shutdown()
        assert self._server.metric("tenfold_requests_in_flight") == 0


def joined(server: ServerProcess) -> dict[str, str | None]:
    """Name and address of all workers of which there is news."""
    workers = httpx.get(f"{server.url}/stats").json()["workers"]
    return {worker["name"]: worker["address"] for worker in workers}


def test_a_worker_joins_serves_and_leaves_under_load(place: Place) -> None:
    """Promise: a worker that joins gets its part of the requests, is shown with its address, and SIGTERM lets
    it go without a lost request, a changed text or a counted death; its exit code is 0."""
    server = place.front(workers=1)
    worker = place.worker()
    wait_for(up(server, "w0", "away"))
    wait_for(lambda: "away" in joined(server))
    where = joined(server)
    assert where["w0"] is None and (where["away"] or "").startswith("127.0.0.1:")
    assert server.metric("tenfold_workers_joined") == 1
    load = Load(server, 8, 500)
    load.on("away")
    worker.signal(signal.SIGTERM)
    wait_for(lambda: states(server).get("away") == "draining")
    assert worker.end() == 0
    load.finish()
    assert states(server) == {"w0": "up"} and list(joined(server)) == ["w0"]
    assert server.metric("tenfold_worker_restarts_total") == 0
    assert server.metric('tenfold_router_requests_total{worker="away"}') > 0


def test_a_joined_worker_that_is_killed_is_a_short_pause(place: Place) -> None:
    """Promise: SIGKILL under load: all texts are the same; another process may take its place, by its
    name."""
    server = place.front(workers=1)
    worker = place.worker()
    wait_for(up(server, "w0", "away"))
    load = Load(server, 8, 300)
    load.on("away")
    worker.signal(signal.SIGKILL)
    wait_for(up(server, "w0"))
    load.finish()
    assert server.metric("tenfold_worker_restarts_total") == 1
    place.worker()
    wait_for(up(server, "w0", "away"))


def test_a_stopped_worker_is_cut_off_and_comes_back(place: Place) -> None:
    """Promise: a connection over which nothing comes (SIGSTOP; a cable pulled) is noticed: requests go on
    elsewhere, the connection is closed, and when the process runs again it joins again with its engine."""
    server = place.front(workers=1)
    worker = place.worker()
    wait_for(up(server, "w0", "away"))
    load = Load(server, 6, 300)
    load.on("away")
    worker.signal(signal.SIGSTOP)
    load.finish()
    assert server.metric("tenfold_router_moved_total") > 0
    wait_for(up(server, "w0"), 60)
    worker.signal(signal.SIGCONT)
    wait_for(up(server, "w0", "away"), 40)
    assert worker.log.read_text().count("joined the front") == 2
    assert "did not get on" in server.log.read_text()


def test_a_long_step_elsewhere_is_not_a_stopped_worker(place: Place) -> None:
    """Promise: a worker that says nothing for more seconds than a stopped one is allowed, but computes, is
    left alone: it tells its CPU time meanwhile."""
    worker = place.worker(FakeConfig(step_cpu_s=3.5))
    # How long a step may be at all is not the question here: the machine may be busy.
    server = place.front(workers=0, stall_after_s=600.0)
    assert ask(server, tokens=1) == expected.text("abc", 1, 1)
    assert server.metric("tenfold_router_silent_total") == 0
    assert worker.log.read_text().count("joined the front") == 1


def test_without_workers_of_its_own_a_server_waits_for_one(place: Place) -> None:
    """Promise: it listens at once and says that nobody is there, in every API's form; it is ready when one
    has joined; when that one leaves it is not, but a request that comes meanwhile is served by the next."""
    http = free_port()
    url = f"http://127.0.0.1:{http}"
    ready: list[ServerProcess] = []
    release = threading.Event()

    def serve() -> None:
        with place.server(workers=0, port=http) as server:
            ready.append(server)
            release.wait(120)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        wait_for(lambda: _status(f"{url}/health") == 200)
        answer = httpx.get(f"{url}/ready")
        assert answer.status_code == 503 and "none has joined" in answer.json()["reason"]
        for path in ("/v1/completions", "/v1/messages"):
            answer = httpx.post(f"{url}{path}", json={})
            assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
            assert "none has joined" in answer.json()["error"]["message"]
        assert not ready
        first = place.worker(name="first")
        wait_for(lambda: ready)
        server = ready[0]
        assert ask(server, tokens=30) == expected.text("abc", 1, 30)
        first.signal(signal.SIGTERM)
        assert first.end() == 0
        assert _status(f"{url}/ready") == 503
        load = Load(server, 2, 4)
        wait_for(lambda: server.metric("tenfold_requests_in_flight") == 2)
        place.worker(name="second")
        load.finish()
        assert _status(f"{url}/ready") == 200
    finally:
        release.set()
        thread.join(60)


def _status(url: str) -> int:
    try:
        return httpx.get(url).status_code
    except httpx.TransportError:
        return 0


def test_requests_wait_for_a_worker_to_come_back_but_not_for_ever(place: Place) -> None:
    """Promise: with the only worker killed, a request goes on where another joins; if none does, it ends with
    503 after the time that a stall may take, and so does one that came meanwhile; then others are refused at
    once, and all of these answers say when to come again."""
    first = place.worker()
    server = place.front(workers=0, stall_after_s=8.0)
    load = Load(server, 2, 400)
    load.on("away")
    first.signal(signal.SIGKILL)
    wait_for(lambda: not states(server))
    second = place.worker()
    load.finish()
    with ThreadPoolExecutor(2) as pool:
        body = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True}
        answer = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
        wait_for(lambda: server.metric('tenfold_worker_requests{worker="away"}') > 0)
        second.signal(signal.SIGKILL)
        wait_for(lambda: not states(server))
        came_meanwhile = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
        wait_for(lambda: server.metric("tenfold_requests_in_flight") == 2)
        answers = [answer.result(60), came_meanwhile.result(60)]
        answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))
        for each in answers:
            assert each.status_code == 503 and each.headers["retry-after"] == "5"
            assert "none has joined" in each.json()["error"]["message"]


def test_a_front_that_is_restarted_finds_its_workers_again(place: Place) -> None:
    """Promise: workers outlive the front and join the next one, with the pages that they have: what was asked
    before is found there."""
    prompt = "the same long beginning of a conversation " * 8
    fake = FakeConfig(prompt_token_s=0.0005)
    workers = [place.worker(fake, name="one"), place.worker(fake, name="two")]
    with place.server(fake, workers=0) as server:
        wait_for(up(server, "one", "two"))
        ask(server, prompt)
    with place.server(fake, workers=0) as server:
        wait_for(up(server, "one", "two"), 40)
        wait_for(lambda: server.metric("tenfold_router_resyncs_total") == 2)
        assert server.metric("tenfold_router_gaps_total") == 0
        ask(server, prompt)
        assert server.metric("tenfold_router_overlap_tokens_total") > 0.8 * len(prompt)
    for worker in workers:
        assert worker.process.poll() is None
        worker.signal(signal.SIGTERM)
        assert worker.end() == 0


def test_sighup_replaces_the_fronts_own_workers_alone(place: Place) -> None:
    """Promise: a rolling restart says that it leaves joined workers alone, and does."""
    server = place.front(workers=1, drain_s=0.2)
    worker = place.worker()
    wait_for(up(server, "w0", "away"))
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "replaced, but for 1 that joined" in server.log.read_text(), 30)
    assert worker.process.poll() is None and up(server, "w0", "away")()


@pytest.mark.parametrize(
    ("fault", "there", "here"),
    [
        ({"secret": "f" * 32}, "this is not its secret", "it does not have the secret"),
        ({"model_id": "another"}, "its model is another one", "its model is another one"),
        ({"format": "q8"}, "--format q8, the front with auto", "--format q8, the front with auto"),
        ({"kv_format": "q8"}, "--kv-format q8", "--kv-format q8"),
    ],
)
def test_who_does_not_belong_is_turned_away(
    shared: tuple[Place, ServerProcess], fault: dict[str, Any], there: str, here: str
) -> None:
    """Promise: a worker with another secret, model or number format ends with the reason, the front's log has
    it too, and nothing is served by it."""
    place, server = shared
    worker = place.worker(name="wrong", **fault)
    assert worker.end() == 1
    assert there in worker.log.read_text() and "refused: " in worker.log.read_text()
    assert here in server.log.read_text()
    assert states(server) == {"w0": "up"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Place, ServerProcess]]:
    """A front that many tests may use: whatever they do, it goes on."""
    with ExitStack() as stack:
        place = Place(tmp_path_factory.mktemp("shared"), stack)
        yield place, place.front(workers=1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda number, frame: [frame if number < 4 else frame[:6] + bytes([frame[6] ^ 1]) + frame[7:]],
        lambda number, frame: [frame, frame] if number == 4 else [frame],
        lambda number, frame: [] if number == 4 else [frame],
    ],
    ids=["tampered", "replayed", "left out"],
)
def test_a_message_that_was_not_sent_so_ends_the_connection(
    shared: tuple[Place, ServerProcess], spoil: Any
) -> None:
    """Promise: a frame that was changed, repeated or dropped on the way is never taken for the worker's: the
    front says so and closes, and the worker joins anew over a connection that is not spoilt."""
    place, server = shared
    wire = Wire(place.port, spoil)
    told = server.log.read_text().count("cannot be trusted")
    worker = place.worker(port=wire.port, name="far")
    wait_for(lambda: server.log.read_text().count("cannot be trusted") == told + 1, 30)
    wait_for(up(server, "w0", "far"), 30)
    assert wire.connections == 2
    worker.signal(signal.SIGTERM)
    assert worker.end() == 0
    wire.close()


def test_strangers_cost_little(shared: tuple[Place, ServerProcess]) -> None:
    """Promise: who connects and says nothing, or something else, is hung up on; as many as there are, workers
    join all the same once those are gone, and each is in the metrics."""
    place, server = shared
    strangers = [socket.create_connection(("127.0.0.1", place.port)) for _ in range(5)]
    for stranger in strangers[:3]:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5)
    worker = place.worker(name="quick")
    wait_for(up(server, "w0", "quick"))
    for stranger in strangers:
        stranger.settimeout(20)
        data = b""
        while part := _read(stranger):
            data += part
        assert data.startswith(b"tenfold1")
        stranger.close()
    assert server.metric('tenfold_workers_turned_away_total{reason="secret"}') >= 5
    worker.signal(signal.SIGTERM)
    assert worker.end() == 0


def test_many_strangers_keep_no_worker_waiting(place: Place) -> None:
    """Promise: of a hundred connections of one address that say nothing all but a few are hung up on at once,
    with a line a minute in the log; a worker of that very address joins meanwhile."""
    server = place.front(workers=1)
    began = time.monotonic()
    with ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", place.port))) for _ in range(100)
        ]
        turned_away = 'tenfold_workers_turned_away_total{reason="secret"}'
        wait_for(lambda: server.metric(turned_away) >= len(strangers) - MOST_OF_ADDRESS, 60)
        place.worker(name="quick")
        wait_for(up(server, "w0", "quick"), 60)
        lines = server.log.read_text().count("is turned away")
        assert 1 <= lines <= 1 + (time.monotonic() - began) / TELL_S


def _read(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 12)
    except ConnectionError:
        return b""


def test_a_worker_waits_for_its_front_and_ends_when_asked(place: Place) -> None:
    """Promise: while there is no front it tries again and says why; SIGTERM ends it then too, at once."""
    worker = place.worker()
    wait_for(lambda: "refused" in worker.log.read_text() and "trying again" in worker.log.read_text())
    time.sleep(0.5)
    worker.signal(signal.SIGTERM)
    assert worker.end(10) == 0


def test_an_engine_that_cannot_be_built_says_so_on_both_sides(shared: tuple[Place, ServerProcess]) -> None:
    """Promise: the reason is the worker's last word, there and in the front's log."""
    place, server = shared
    worker = place.worker(FakeConfig(fail="model.gguf is truncated"), name="broken")
    assert worker.end() == 1
    assert "model.gguf is truncated" in worker.log.read_text()
    wait_for(lambda: "is gone: model.gguf is truncated" in server.log.read_text())
    assert states(server) == {"w0": "up"}


def test_two_of_one_name_get_two_names(shared: tuple[Place, ServerProcess]) -> None:
    """Promise: nobody takes another's place by its name."""
    place, server = shared
    one, two = place.worker(name="w0"), place.worker(name="w0")
    wait_for(up(server, "w0", "w0-2", "w0-3"))
    for worker in (one, two):
        os.kill(worker.process.pid, signal.SIGINT)
        assert worker.end() == 0
    assert json.dumps(states(server)) == '{"w0": "up"}'
