"""Loading and unloading models while a server runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tenfold.config import ServeConfig
from tenfold.server.serve import serve
from tests.helpers import expected
from tests.helpers.fake_engine import FakeConfig
from tests.helpers.fake_text import load_fake_text
from tests.helpers.server_process import (
    FAR_AWAY,
    ServerProcess,
    path_of,
    running_server,
    serving_model,
    wait_for,
)
from tests.helpers.tiny_served import write_tiny

ADMIN = {"authorization": "Bearer admin-key"}
PATH = "/admin/models"
BODY = {"prompt": "abc", "max_tokens": 20, "ignore_eos": True, "seed": 3}


def write_keys(path: Path, *keys: str) -> str:
    path.write_text("\n".join(keys))
    path.chmod(0o600)
    return str(path)


@contextmanager
def administered(folder: Path, drain_s: float = 1) -> Iterator[ServerProcess]:
    """A server of the model `fake`, with an admin key."""
    keys = write_keys(folder / "admins", "admin-key")
    fake = FakeConfig(delay_s=0.002)
    with running_server(folder / "log", fake, admin_key_file=keys, drain_s=drain_s) as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """One whose models a test may change."""
    with administered(tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One whose models stay."""
    with administered(tmp_path_factory.mktemp("steady")) as server:
        yield server


def load(server: ServerProcess, name: str, fake: FakeConfig | None = None, **more: Any) -> httpx.Response:
    body = {"model": path_of(fake or FakeConfig()), "name": name, **more}
    return httpx.post(server.url + PATH, json=body, headers=ADMIN, timeout=60)


def unload(server: ServerProcess, name: str) -> httpx.Response:
    return httpx.delete(f"{server.url}{PATH}/{name}", headers=ADMIN, timeout=60)


def ask(server: ServerProcess, model: str, **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={**BODY, "model": model, **more}, timeout=60)


def names(server: ServerProcess) -> list[str]:
    return [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]]


def states(server: ServerProcess) -> dict[str, str]:
    listed = httpx.get(server.url + PATH, headers=ADMIN).json()["data"]
    return {model["id"]: model["state"] for model in listed}


def in_thread(work: Callable[[], httpx.Response]) -> Callable[[], httpx.Response]:
    """Begins ``work``; returns who waits for its answer."""
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()

    def wait() -> httpx.Response:
        thread.join()
        return answers[0]

    return wait


def test_nobody_may_without_admin_keys(tmp_path: Path) -> None:
    """Off by default, also for a user's key: 403 that says how to turn it on."""
    keys = write_keys(tmp_path / "keys", "user-key")
    with running_server(tmp_path / "log", api_key_file=keys) as server:
        for headers in ({}, {"authorization": "Bearer user-key"}):
            for method, path in (("GET", PATH), ("POST", PATH), ("DELETE", f"{PATH}/fake")):
                refused = httpx.request(method, server.url + path, headers=headers)
                assert refused.status_code == 403
                assert "--admin-keys FILE" in refused.json()["error"]["message"]
        assert "/admin/models" not in httpx.get(f"{server.url}/openapi.json").json()["paths"]


def test_keys_of_users_and_of_admins_are_apart(tmp_path: Path) -> None:
    """Neither opens what is the other's; a key that is both is refused at the start."""
    users = write_keys(tmp_path / "users", "user-key")
    admins = write_keys(tmp_path / "admins", "admin-key")
    with running_server(tmp_path / "log", api_key_file=users, admin_key_file=admins) as server:
        user = {"authorization": "Bearer user-key"}
        for wrong in ({}, user, {"authorization": "Bearer admin-ke"}, {"x-api-key": "admin-key2"}):
            refused = httpx.get(server.url + PATH, headers=wrong)
            assert refused.status_code == 401 and "admin key" in refused.json()["error"]["message"]
        assert httpx.get(server.url + PATH, headers={"x-api-key": "admin-key"}).status_code == 200
        for headers, status in ((user, 200), (ADMIN, 401)):
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == status
    both = write_keys(tmp_path / "both", "admin-key", "user-key")
    config = ServeConfig(model="x", port=0, api_key_file=users, admin_key_file=both)
    with pytest.raises(ValueError, match="have a key in common"):
        serve(config, "x", load_fake_text, lambda plan, url: None)


def test_a_model_comes_and_goes(server: ServerProcess) -> None:
    """Loaded it answers like one that was there from the start; unloaded it is 404, its worker gone."""
    assert states(server) == {"fake": "serving"}
    answer = load(server, "more", FakeConfig(max_context=128), workers=2, threads=1, kv_memory="1MiB")
    assert answer.status_code == 200, answer.text
    entry = answer.json()
    assert entry | {"id": "more", "state": "serving", "max_model_len": 128, "threads": 1} == entry
    assert entry["workers"] == {"more/w0": "up", "more/w1": "up"}
    assert names(server) == ["fake", "more"]
    assert len(server.worker_pids()) == 3
    assert ask(server, "more").json()["choices"][0]["text"] == expected.text("abc", 3, 20)
    assert httpx.post(f"{server.url}/v1/completions", json=BODY).status_code == 400
    gone = unload(server, "more")
    assert gone.json() == {"id": "more", "object": "model", "deleted": True}
    assert states(server) == {"fake": "serving"} and len(server.worker_pids()) == 1
    lost = ask(server, "more")
    assert lost.status_code == 404 and "there is: fake" in lost.json()["error"]["message"]
    assert unload(server, "more").status_code == 404
    assert httpx.post(f"{server.url}/v1/completions", json=BODY).status_code == 200


def test_the_last_model_may_go_and_another_come(server: ServerProcess) -> None:
    """Where there is room for one alone. With none the server is not ready, and says why."""
    assert unload(server, "fake").status_code == 200
    assert names(server) == []
    ready = httpx.get(f"{server.url}/ready")
    assert (ready.status_code, ready.json()["reason"]) == (503, "no model is loaded")
    for path in ("/health", "/metrics", "/openapi.json"):
        assert httpx.get(server.url + path).status_code == 200
    for lost in (ask(server, "fake"), httpx.get(f"{server.url}/stats")):
        assert lost.status_code == 404
        assert lost.json()["error"]["message"] == "no model is loaded here now"
    assert load(server, "next").status_code == 200
    assert ask(server, "next").status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "model", "model is missing"),
        ({"model": ""}, "model", "model is missing"),
        ({"model": 5}, "model", "must be a string"),
        ({"model": "x", "name": "a\nb"}, "name", "readable"),
        ({"model": "x", "threads": -1}, "threads", "from 0 to 1024"),
        ({"model": "x", "workers": 0}, "workers", "from 1 to 256"),
        ({"model": "x", "kv_memory": "much"}, "kv_memory", "is not a size"),
        ({"model": "x", "kv_memory": True}, "kv_memory", "is not a size"),
        ({"model": "x", "kv_memory": 0}, "kv_memory", "from 1 to"),
        ({"model": "x", "format": "q8"}, "format", "unknown field format"),
    ],
)
def test_a_wrong_field_is_named(steady: ServerProcess, body: Any, param: str, says: str) -> None:
    """400, and nothing was begun."""
    refused = httpx.post(steady.url + PATH, json=body, headers=ADMIN)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param and says in refused.json()["error"]["message"]
    assert states(steady) == {"fake": "serving"}


def test_loading_that_fails_changes_nothing(server: ServerProcess) -> None:
    """The reason is the answer, no process is left, and the name is free."""
    failed = load(server, "more", FakeConfig(fail="the file is damaged"))
    assert failed.status_code == 400
    assert "more was not loaded" in failed.json()["error"]["message"]
    assert "the file is damaged" in failed.json()["error"]["message"]
    assert states(server) == {"fake": "serving"}
    wait_for(lambda: len(server.worker_pids()) == 1)
    assert load(server, "more").status_code == 200


def test_a_name_is_loaded_once(server: ServerProcess) -> None:
    """A second load is 409 while the first is under way and when it is done; meanwhile the others answer."""
    first = in_thread(lambda: load(server, "more", FakeConfig(load_s=1.5)))
    wait_for(lambda: states(server).get("more") == "loading")
    assert load(server, "more").status_code == 409
    assert unload(server, "more").status_code == 409
    assert load(server, "fake").status_code == 409
    assert ask(server, "more").status_code == 404
    assert ask(server, "fake").status_code == 200
    assert names(server) == ["fake"]
    assert first().status_code == 200
    assert load(server, "more").status_code == 409


@pytest.mark.parametrize("model", [path_of(FakeConfig(load_s=30)), FAR_AWAY])
def test_a_stop_ends_loading_too(server: ServerProcess, model: str) -> None:
    """SIGTERM while a model loads, or is fetched: whoever asked for it is told, and the server ends."""
    body = {"model": model, "name": "more"}
    waiting = in_thread(lambda: httpx.post(server.url + PATH, json=body, headers=ADMIN, timeout=60))
    wait_for(lambda: states(server).get("more") == "loading")
    assert server.stop() == 0
    assert waiting().status_code == 503


def test_requests_under_way_end_before_their_model_goes(tmp_path: Path) -> None:
    """They have the drain time, choices of theirs that have not begun too; new ones are 404 at once."""
    with administered(tmp_path, drain_s=60) as server:
        assert load(server, "more", FakeConfig(delay_s=0.1)).status_code == 200
        under_way = in_thread(lambda: ask(server, "more", n=2))
        wait_for(lambda: server.metric('tenfold_requests_in_flight{model="more"}'))
        going = in_thread(lambda: unload(server, "more"))
        wait_for(lambda: states(server).get("more") == "unloading")
        assert ask(server, "more").status_code == 404
        assert unload(server, "more").status_code == load(server, "more").status_code == 409
        texts = [choice["text"] for choice in under_way().json()["choices"]]
        assert texts == [expected.text("abc", seed, 20) for seed in (3, 4)]
        assert going().status_code == 200


def test_what_takes_longer_than_the_drain_time_is_ended(server: ServerProcess) -> None:
    """With an error as its last event, and no [DONE]; the model is gone then."""
    assert load(server, "more", FakeConfig(delay_s=0.05)).status_code == 200
    long = in_thread(lambda: ask(server, "more", max_tokens=400, stream=True))
    wait_for(lambda: server.metric('tenfold_requests_in_flight{model="more"}'))
    began = time.monotonic()
    assert unload(server, "more").status_code == 200
    assert time.monotonic() - began < 10
    last = long().text.strip().rpartition("\n\n")[2]
    assert "the model more was unloaded" in last
    assert states(server) == {"fake": "serving"}


def test_others_stream_on_while_models_come_and_go(server: ServerProcess) -> None:
    """Under load, over and over: every text of the model that stays is whole, and so is each answer of the
    other; when it is not there it is 404, and nothing else ever."""
    stop = threading.Event()
    wrong: list[str] = []
    seen: set[int] = set()

    def keep_asking(model: str) -> None:
        while not stop.is_set():
            answer = ask(server, model)
            if model == "more":
                seen.add(answer.status_code)
            if answer.status_code == 200:
                text = answer.json()["choices"][0]["text"]
                if text != expected.text("abc", 3, 20):
                    wrong.append(text)
            elif model == "fake" or answer.status_code != 404:
                wrong.append(answer.text)

    threads = [
        threading.Thread(target=keep_asking, args=(name,)) for name in ("fake", "fake", "more", "more")
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            assert load(server, "more").status_code == 200
            time.sleep(0.2)
            assert unload(server, "more").status_code == 200
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert seen == {200, 404}
    assert server.metric("tenfold_requests_in_flight") == 0


def resident_bytes(server: ServerProcess) -> int:
    """Of the front and all workers."""
    total = 0
    for pid in (server.process.pid, *server.worker_pids()):
        status = Path(f"/proc/{pid}/status").read_text()
        total += next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) << 10
    return total


def test_memory_is_given_back(tmp_path: Path) -> None:
    """A real model: what it took, weights, KV memory and text side, is free again when unloading answers; and
    nothing piles up."""
    path = write_tiny(tmp_path / "tiny.gguf", 1)
    keys = write_keys(tmp_path / "admins", "admin-key")
    with serving_model(tmp_path / "log", path, kv_memory="4MiB", options=["--admin-keys", keys]) as server:
        after = []
        for _ in range(3):
            before = resident_bytes(server)
            body = {"model": path, "name": "more", "kv_memory": "8MiB"}
            assert httpx.post(server.url + PATH, json=body, headers=ADMIN, timeout=60).status_code == 200
            assert ask(server, "more").status_code == 200
            loaded = resident_bytes(server)
            assert unload(server, "more").status_code == 200
            after.append(resident_bytes(server))
            assert loaded - before > 30 << 20, "a worker with its weights and libraries"
            assert after[-1] - before < (loaded - before) // 5
        assert after[-1] - after[0] < 2 << 20


def test_a_model_that_is_too_large_is_not_begun(tmp_path: Path) -> None:
    """More KV memory than is free: 400 with what is wanted, what is free and what to do."""
    path = write_tiny(tmp_path / "tiny.gguf", 1)
    keys = write_keys(tmp_path / "admins", "admin-key")
    with serving_model(tmp_path / "log", path, kv_memory="4MiB", options=["--admin-keys", keys]) as server:
        for body, says in (
            ({"model": path, "name": "more", "kv_memory": "900TiB"}, "there is no room for more"),
            ({"model": str(tmp_path / "nothing.gguf"), "name": "more"}, "no such file or folder"),
            (
                {"model": path, "name": "more", "kv_memory": 8},
                "more was not loaded: kv_memory is 8; a page of",
            ),
            (
                {"model": path, "name": "more", "workers": 256, "kv_memory": "64TiB"},
                "256 workers of 64.0 MiB",
            ),
            ({"model": path + "\nforged"}, "which is no name for the API: it must be"),
        ):
            refused = httpx.post(server.url + PATH, json=body, headers=ADMIN, timeout=60)
            assert refused.status_code == 400 and says in refused.json()["error"]["message"]
        assert states(server) == {"tiny.gguf": "serving"}
