"""A constraint may end the process that looks at it, and nothing else."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from tenfold.constraints import checker as checker_module
from tenfold.constraints.checker import PROCESSES, Checker, CheckFailed
from tenfold.limits import RequestError, Unsupported
from tenfold.protocol import Constraint
from tests.helpers.constraints import SMALL, constraint

COSTLY: dict[str, Any] = {"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(200)]}
"""Compiles for many minutes."""
CHAIN = "start: r0\n" + "".join(f'r{i}:"a" r{i + 1}\n' for i in range(4000)) + 'r4000: "b"'
"""Takes some 100 ms, and much stack."""


@pytest.fixture
def checker() -> Iterator[Checker]:
    """For the small vocabulary."""
    one = Checker(lambda: SMALL, 96)
    yield one
    one.close()


def costly(number: int = 0) -> Constraint:
    """One of many."""
    return constraint("json_schema", {**COSTLY, "title": str(number)})


def until(true: Callable[[], object]) -> None:
    """Waits for it."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def pids(checker: Checker) -> list[int]:
    """Of its processes."""
    return [process._process.pid for process in list(checker._processes)]


def test_the_verdict_is_the_compilers(checker: Checker) -> None:
    """Good ones pass, others are refused as in this process: by their place, and what it is."""
    for good in (constraint("regex", "a+"), constraint("json_object"), constraint("choice", ["a", "b"])):
        checker.check(good)
    with pytest.raises(Unsupported) as caught:
        checker.check(Constraint(kind="json_schema", text='{"items":{"not":{}}}', field="guided_json"))
    assert caught.value.field == "guided_json.items.not"
    assert str(caught.value).startswith("guided_json.items.not is not supported")
    for kind, text, says in (("regex", "[", "unclosed"), ("regex", "\ud800", "surrogate")):
        with pytest.raises(RequestError, match=says):
            checker.check(Constraint(kind=kind, text=text))  # type: ignore[arg-type]
    assert checker.refused == {"invalid": 3}
    assert checker.restarts == 0


def test_what_compiles_without_end_is_refused_and_remembered(checker: Checker) -> None:
    """It costs its limit once. The next is checked by another process."""
    with pytest.raises(RequestError, match=r"constraint takes more than 1 s to compile.*Make it simpler"):
        checker.check(costly())
    with pytest.raises(RequestError, match="too costly"):
        assert checker.begin(costly()) is None
    assert checker.refused == {"time": 2}
    assert checker.restarts == 1
    checker.check(constraint("regex", "a"))


def test_who_comes_meanwhile_does_not_wait(checker: Checker) -> None:
    """Behind one that is at its limit: there is another process. What is known costs nothing at all."""
    checker.check(constraint("regex", "a"))
    bad = checker.begin(costly())
    assert bad is not None
    assert checker.begin(constraint("regex", "a")) is None
    checker.check(constraint("regex", "b"))
    with pytest.raises(RequestError, match="too costly"):
        bad.result()


def test_many_that_are_costly_starve_nobody(checker: Checker) -> None:
    """The same one, sent by many at a time, is looked at no more than once by each process."""
    checks = [checker.begin(costly()) for _ in range(12)]
    checker.check(constraint("regex", "ab"))
    for check in checks:
        assert check is not None
        with pytest.raises(RequestError, match="too costly"):
            check.result()
    assert checker.restarts <= PROCESSES


def test_what_takes_too_much_memory_is_refused(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not taken from the machine."""
    monkeypatch.setattr(checker_module, "MEMORY_BYTES", 1 << 20)
    with pytest.raises(RequestError, match=r"takes too much memory|the compiler crashes|limit"):
        checker.check(constraint("grammar", CHAIN))
    assert checker.refused["memory"] + checker.refused["crash"] + checker.refused["invalid"] == 1


def test_a_process_that_crashes_refuses_what_it_looked_at(checker: Checker) -> None:
    """As of an overflowing stack; which of llguidance's faults it is does not matter."""
    checker.check(constraint("regex", "a"))
    (pid,) = pids(checker)
    os.kill(pid, signal.SIGSTOP)
    check = checker.begin(constraint("regex", "ab"))
    assert check is not None
    os.kill(pid, signal.SIGSEGV)
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(RequestError, match="constraint cannot be compiled: the compiler crashes on it"):
        check.result(60)
    assert checker.refused == {"crash": 1}
    with pytest.raises(RequestError, match="crashes"):
        checker.check(constraint("regex", "ab"))
    checker.check(constraint("regex", "abc"))


def test_a_process_that_somebody_kills_is_no_fault_of_the_constraint(checker: Checker) -> None:
    """It is checked again; killed time and again, the constraint is not judged, nor remembered."""
    checker.check(constraint("regex", "a"))
    (pid,) = pids(checker)
    os.kill(pid, signal.SIGKILL)
    checker.check(constraint("regex", "ab"))
    assert checker.restarts == 1
    stop = threading.Event()

    def kill() -> None:
        while not stop.wait(0.01):
            for pid in pids(checker):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(CheckFailed, match="ended with status -9"):
            checker.check(costly())
    finally:
        stop.set()
        killer.join()
    checker.check(constraint("regex", "abc"))
    assert checker.refused == {}


def test_no_answer_in_time_is_no_verdict(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that swaps: the constraint may be fine."""
    checker.check(constraint("regex", "a"))
    monkeypatch.setattr(checker_module, "WALL_S", 0.2)
    (pid,) = pids(checker)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(CheckFailed, match="no answer"):
        checker.check(constraint("regex", "ab"))
    monkeypatch.undo()
    checker.check(constraint("regex", "ab"))


def test_who_waits_too_long_is_told(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process was free: that says nothing of the constraint."""
    monkeypatch.setattr(checker_module, "WAIT_S", 0.0)
    with pytest.raises(CheckFailed, match="too many constraints wait"):
        checker.check(constraint("regex", "a"))


def test_closing_ends_what_is_under_way(checker: Checker) -> None:
    """At once, and no process is left."""
    checks = [checker.begin(costly(number)) for number in range(6)]
    until(lambda: len(checker._processes) == PROCESSES)
    before = pids(checker)
    checker.close()
    for check in checks:
        assert check is not None
        with pytest.raises(CheckFailed, match="shutting down"):
            check.result(0)
    with pytest.raises(CheckFailed, match="shutting down"):
        checker.check(constraint("regex", "a"))
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_verdicts_are_bounded(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was not asked for longest is forgotten."""
    monkeypatch.setattr(checker_module, "KNOWN", 2)
    for text in ("a", "b", "a", "c"):
        checker.check(constraint("regex", text))
    assert checker.begin(constraint("regex", "a")) is None
    again = checker.begin(constraint("regex", "b"))
    assert again is not None
    again.result()
