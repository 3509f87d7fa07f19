"""Decisions: what a request costs where."""

import pytest

from tenfold.protocol import KVEvents, PagesStored
from tenfold.router.base import Overdue, RouterConfig, RouteRequest, Silent
from tenfold.router.policies import POLICIES, Policy
from tenfold.router.router import Router
from tenfold.router.timing import mocker_timing


def fleet(workers: int, policy: Policy = "cache-aware", pages: int = 1000) -> Router:
    router = Router(RouterConfig(timing=mocker_timing(1 << 20), page_tokens=64, policy=policy))
    for number in range(workers):
        router.add_worker(f"w{number}", pages, 0.0)
    return router


def holds(router: Router, worker: str, names: range) -> None:
    router.on_event(worker, KVEvents(sequence=1, events=(PagesStored(tuple(names)),)), 0.0)


def asked(request: str, pages: range, tail: int = 0) -> RouteRequest:
    return RouteRequest(request, tuple(pages), 64 * len(pages) + tail)


def test_a_prompt_goes_where_it_lies() -> None:
    """Promise: with nothing else to choose by, the worker with most of the prompt gets it, and says so."""
    router = fleet(4)
    holds(router, "w2", range(50))
    holds(router, "w3", range(20))
    decision = router.route(asked("r", range(60)), 0.0)
    assert decision is not None
    assert (decision.worker, decision.overlap_tokens, decision.best_overlap_tokens) == ("w2", 3200, 3200)
    assert "w2 of 4" in decision.reason


def test_a_prefix_that_all_share_spreads() -> None:
    """Promise: a hot prefix (a system prompt) does not pull all traffic to one worker: when requests come
    faster than one worker answers, all work."""
    router = fleet(4)
    holds(router, "w0", range(8))
    places = []
    for number in range(32):
        own = range(1000 * (number + 1), 1000 * (number + 1) + 40)
        request = RouteRequest(str(number), (*range(8), *own), 48 * 64)
        decision = router.route(request, 0.0)
        assert decision is not None
        places.append(decision.worker)
    assert {name: places.count(name) for name in places} == pytest.approx(
        dict.fromkeys(router.workers(), 8), abs=2
    )


def test_a_slow_worker_gets_less() -> None:
    """Promise: work is weighed in measured seconds: a worker that takes ten times as long as it should gets
    fewer requests, though no request count tells it from the others."""
    router = fleet(2)
    now = 0.0
    places = []
    for number in range(60):
        decision = router.route(asked(str(number), range(100 * number, 100 * number + 50)), now)
        assert decision is not None
        places.append(decision.worker)
        now += decision.cost.prefill * (10 if decision.worker == "w0" else 1)
        router.on_prefill_done(str(number), now)
        router.on_finish(str(number), now)
    assert places[30:].count("w0") < 10
    router.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_calls_give_the_same_decisions(policy: Policy) -> None:
    """Promise: routing is deterministic, also by ``random``; a tie goes to who got fewest so far."""
    runs = []
    for _ in range(2):
        router = fleet(5, policy)
        decisions = [router.route(asked(str(n), range(n, n + 3)), 0.1 * n) for n in range(20)]
        runs.append([decision.worker for decision in decisions if decision is not None])
    assert runs[0] == runs[1] and len(runs[0]) == 20
    if policy in ("round-robin", "least-loaded"):
        assert sorted(runs[0][:5]) == [f"w{n}" for n in range(5)]


def test_waits_have_deadlines() -> None:
    """Promise: a request without progress is handed back once, a silent worker is said once and gets nothing
    until it speaks; with no worker left, routing says so and nothing waits inside."""
    router = fleet(1)
    decision = router.route(asked("r", range(5)), 0.0)
    assert decision is not None
    assert router.next_tick() == 3.0
    (silent,) = router.tick(3.0)
    assert isinstance(silent, Silent) and silent.worker == "w0"
    assert router.route(asked("s", range(5)), 3.0) is None
    assert router.next_tick() == decision.deadline
    (overdue,) = router.tick(decision.deadline)
    assert isinstance(overdue, Overdue) and overdue.request == "r"
    assert router.next_tick() == float("inf")
    holds(router, "w0", range(5))
    assert router.route(asked("r", range(5)), 20.0) is not None
    assert router.remove_worker("w0") == ("r",)
    assert router.remove_worker("w0") == ()


def test_a_drained_worker_keeps_what_it_has() -> None:
    """Promise: draining sends nothing new, and takes nothing away."""
    router = fleet(2)
    first = router.route(asked("a", range(9)), 0.0)
    assert first is not None
    router.drain(first.worker)
    second = router.route(asked("b", range(9)), 0.0)
    assert second is not None and second.worker != first.worker
    assert router.requests(first.worker) == {"a"}


def test_misuse_is_refused() -> None:
    """Promise: a name used twice is an error that says so."""
    router = fleet(1)
    with pytest.raises(ValueError, match="there already"):
        router.add_worker("w0", 5, 0.0)
    router.route(asked("a", range(3)), 0.0)
    with pytest.raises(ValueError, match="under way"):
        router.route(asked("a", range(3)), 0.0)
