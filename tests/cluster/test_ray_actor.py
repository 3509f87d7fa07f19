"""What an actor's fate is taken for, by Ray's answers alone: no Ray runs here."""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from typing import Any

import pytest

from tenfold.cluster.supervisor import Report

ray: Any = pytest.importorskip("ray", reason='Ray is not installed: pip install "tenfold[ray]"')
from tenfold.cluster import ray_actor  # noqa: E402
from tenfold.cluster.ray_actor import ActorProcess  # noqa: E402


class Method:
    """Of an actor: each call gets the next of ``answers``; None: it has not come, and never does."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def remote(self) -> list[Any]:
        return [self.answers.pop(0) if self.answers else None]


class Actor:
    """Its handle."""

    def __init__(self, *reports: Any, ends: bool = True) -> None:
        self.report = Method(*reports)
        self.end = Method(*([True] if ends else []))
        self.killed = 0


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own functions, over those; actors are asked without a pause."""

    def get(asked: list[Any]) -> Any:
        if isinstance(asked[0], Exception):
            raise asked[0]
        return asked[0]

    def wait(asked: list[list[Any]], timeout: float | None) -> tuple[list[Any], list[Any]]:
        return ([], asked) if asked[0][0] is None else (asked, [])

    def kill(actor: Actor) -> None:
        actor.killed += 1

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "kill", kill)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.0})
    monkeypatch.setattr(ray_actor, "EVERY_S", 0.0)


WELL = Report(address="10.0.0.2", output="/logs/worker-0.log", pid=7)


def unavailable() -> Exception:
    found: Exception = ray.exceptions.ActorUnavailableError("the connection was reset", None)
    return found


def test_one_that_does_well(caplog: pytest.LogCaptureFixture) -> None:
    """Promise: it is there, its place and log are said once, and what befell its worker each time."""
    caplog.set_level(logging.INFO)
    actor = Actor(
        WELL, Report(address="10.0.0.2", output="/logs/worker-0.log", lines=["worker-0 ended"]), WELL
    )
    process = ActorProcess("worker-0", actor, 2)
    assert [process.poll() for _ in range(3)] == [None] * 3 and process.pid == 7
    assert [record.getMessage() for record in caplog.records] == [
        "worker-0 is on node 10.0.0.2, its log there in /logs/worker-0.log",
        "node 10.0.0.2: worker-0 ended",
    ]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (ray.exceptions.RayActorError(None, "It died.\nIts node is gone."), "Its node is gone."),
        (Report(address="10.0.0.2", output="", refused="no model at /m"), "node 10.0.0.2: no model at /m"),
    ],
)
def test_one_that_is_gone(answer: Any, why: str) -> None:
    """Promise: it has ended, its end is told in words, and nothing of it is left to Ray."""
    actor = Actor(WELL, answer)
    process = ActorProcess("worker-0", actor, 2)
    assert [process.poll(), process.poll()] == [None, 1]
    assert why in process.why and actor.killed == 1


def test_one_that_ray_does_not_reach_for_a_while() -> None:
    """Promise: it keeps its worker, as that may well be at work."""
    actor = Actor(WELL, unavailable(), unavailable(), WELL)
    process = ActorProcess("worker-0", actor, 2)
    assert [process.poll() for _ in range(4)] == [None] * 4 and not actor.killed


@pytest.mark.parametrize("answers_then", [(), (unavailable(),) * 9])
def test_one_that_stands_still(answers_then: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: after a while without an answer it is killed, so that a new one comes."""
    actor = Actor(WELL, *answers_then)
    process = ActorProcess("worker-0", actor, 2)
    assert (process.poll(), process.poll()) == (None, None)
    later = time.monotonic() + ray_actor.HUNG_S + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert [process.poll()] == [1]
    assert "does not answer" in process.why and actor.killed == 1


def test_one_that_has_no_place(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: it waits however long that takes, and what it waits for is said once."""
    actor = Actor()
    process = ActorProcess("worker-0", actor, 2)
    assert process.poll() is None
    later = time.monotonic() + 10 * ray_actor.HUNG_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert (process.poll(), process.poll()) == (None, None) and not actor.killed
    (record,) = caplog.records
    assert "2 free CPUs (all nodes have 1)" in record.getMessage()


def test_told_to_end() -> None:
    """Promise: a worker takes its leave first; one that has not begun, or does not care to, is killed."""
    actor = Actor(WELL)
    process = ActorProcess("worker-0", actor, 2)
    process.poll()
    process.send_signal(signal.SIGTERM)
    assert actor.killed < 1 and process.poll() is None
    process.wait(1)
    assert actor.killed == 1

    deaf = Actor(WELL, ends=False)
    process = ActorProcess("worker-0", deaf, 2)
    process.poll()
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0)
    process.kill()
    process.wait()
    assert deaf.killed == 1

    waiting = Actor()
    process = ActorProcess("worker-0", waiting, 2)
    process.poll()
    process.send_signal(signal.SIGTERM)
    process.wait(0)
    assert waiting.killed == 1
