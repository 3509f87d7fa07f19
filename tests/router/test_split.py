"""Whether a request is split: by what it costs, and never for lack of workers."""

from __future__ import annotations

import random

import pytest

from tenfold.protocol import KVEvents, PagesStored
from tenfold.router.base import Decision, RouterConfig, RouteRequest
from tenfold.router.policies import POLICIES, Policy
from tenfold.router.split import REASONS, SplitRouter, TransferTiming
from tenfold.router.timing import WorkerTiming

TIMING = WorkerTiming(
    chunk_tokens=512, prefill_step=0.005, prefill_token=0.001, decode_step=0.01, decode_row=0.001
)


def router(prefill: int = 1, decode: int = 1, policy: Policy = "cache-aware") -> SplitRouter:
    config = RouterConfig(timing=TIMING, page_tokens=16, policy=policy)
    roles = {f"p{n}": "prefill" for n in range(prefill)} | {f"d{n}": "decode" for n in range(decode)}
    made = SplitRouter(config, roles, TransferTiming(page_s=0.0001))  # type: ignore[arg-type]
    for name in roles:
        made.add_worker(name, 4096, 0.0)
    return made


def route(made: SplitRouter, id: str, tokens: int, first: int = 0, now: float = 0.0) -> Decision:
    names = tuple(range(first, first + tokens // 16))
    decision = made.route(RouteRequest(id, names, tokens), now)
    assert decision is not None and decision.choice is not None
    assert decision.choice.why in REASONS
    return decision


def streams(made: SplitRouter, count: int = 8) -> None:
    """So many requests decode, on decode workers: they came when there were no others."""
    prefill = [name for name in made.workers() if made.role(name) == "prefill"]
    for name in prefill:
        made.remove_worker(name)
    for n in range(count):
        decision = route(made, f"stream {n}", 32, 100_000 + 100 * n)
        assert made.role(decision.worker) == "decode"
        made.on_prefill_done(f"stream {n}", 0.0)
    for name in prefill:
        made.add_worker(name, 4096, 0.0)


def why(decision: Decision) -> str:
    assert decision.choice is not None
    return f"{'split' if decision.choice.split else 'not split'}: {decision.choice.why}"


def test_a_long_prompt_beside_streams_is_split_and_a_short_one_is_not() -> None:
    """Promise: the choice is by seconds, said in the reason, and counted."""
    made = router()
    streams(made)
    short, long = route(made, "short", 8, 50_000), route(made, "long", 4000)
    assert (long.worker, why(long)) == ("p0", "split: worth it")
    assert (short.worker, why(short)) == ("d0", "not split: short")
    assert "; split: worth it (apart " in long.reason
    assert "; not split: short (apart " in short.reason
    assert made.splits.split == 1
    assert made.splits.not_split["short"] >= 1
    made.check()


def test_each_part_of_a_request_goes_where_it_fits() -> None:
    """Promise: a prefill worker needs room for the prompt, a decode worker for all of it, whichever way it is
    split or not; where nobody has that, nobody gets it."""
    made = router(prefill=2, decode=2)
    for name in ("p0", "d0"):
        made.remove_worker(name)
        made.add_worker(name, 100, 0.0)
    for name in ("p1", "d1"):
        made.remove_worker(name)
        made.add_worker(name, 300, 0.0)

    def go(id: str, tokens: int, room: int) -> Decision | None:
        return made.route(RouteRequest(id, tuple(range(tokens // 16)), tokens, room_tokens=room), 0.0)

    for number in range(4):  # also amid streams, when prompts go to prefill workers
        for n in range(6):
            made.route(RouteRequest(f"stream {number} {n}", (), 32), 0.0)
            made.on_prefill_done(f"stream {number} {n}", 0.0)
        split, whole = go(f"split {number}", 1500, 4000), go(f"whole {number}", 2000, 4800)
        for decision, id in ((split, f"split {number}"), (whole, f"whole {number}")):
            assert decision is not None and decision.choice is not None
            if decision.choice.split:
                assert id.startswith("split") or decision.worker == "p1"
                assert made.take(id, 0.0) == "d1"
                assert made.hand_over(id, 0.0) == "d1"
            else:
                assert decision.worker == "d1"
    assert go("nobody", 1500, 4801) is None
    made.remove_worker("d1")
    alone = go("alone", 1500, 4000)
    assert alone is not None and alone.worker == "p1"  # the decode worker that is left is too small
    made.check()


def test_what_is_cached_where_it_decodes_stays() -> None:
    """Promise: a conversation goes on where its pages are, unless what is new is long."""
    made = router()
    streams(made)
    made.on_event("d0", KVEvents(sequence=1, events=(PagesStored(tuple(range(240))),)), 0.0)
    assert why(route(made, "next turn", 3850)) == "not split: cached"
    made.on_finish("next turn", 0.0)
    assert why(route(made, "long turn", 3840 + 3200)) == "split: worth it"


def test_nobody_to_disturb() -> None:
    """Promise: an idle decode worker computes a prompt itself."""
    assert why(route(router(), "lone", 4000)) == "not split: no streams to disturb"


def test_a_queue_before_prefill_workers_counts() -> None:
    """Promise: beyond some prompts in the queue, decode workers take their part."""
    made = router()
    streams(made, 2)
    reasons = [why(route(made, f"long {n}", 4000, 10_000 * n)) for n in range(5)]
    assert reasons[0] == "split: worth it"
    assert "not split: prefill workers busy" in reasons
    assert made.requests("d0") > {"stream 0"}


def test_one_token_is_not_handed_over() -> None:
    """Promise: what ends with its first token stays whole."""
    made = router()
    streams(made)
    decision = made.route(RouteRequest("one", (), 4000, divisible=False), 0.0)
    assert decision is not None and decision.worker == "d0"
    assert why(decision) == "not split: one token"


@pytest.mark.parametrize("policy", POLICIES)
def test_workers_that_are_left_do_all(policy: Policy) -> None:
    """Promise: without prefill workers decode workers prefill, without decode workers prefill workers decode,
    without any there is no decision; with every policy."""
    made = router(policy=policy)
    streams(made)
    made.drain("p0")
    assert why(route(made, "a", 4000)) == "not split: no prefill worker"
    made.undrain("p0")
    made.remove_worker("d0")
    decision = route(made, "b", 4000)
    assert (decision.worker, why(decision)) == ("p0", "not split: no decode worker")
    made.remove_worker("p0")
    assert made.route(RouteRequest("c", (), 4000), 0.0) is None
    made.add_worker("d0", 4096, 0.0)
    made.add_worker("p0", 4096, 0.0)
    streams(made)
    assert route(made, "c", 4000).worker == "p0"
    made.check()


def test_the_life_of_a_split_request() -> None:
    """Promise: booked on its prefill worker, reserved on the decode worker that reads along, then booked
    there under the same name."""
    made = router(1, 2)
    streams(made)
    assert route(made, "long", 4000).worker == "p0"
    taker = made.take("long", 0.1)
    assert taker is not None and made.role(taker) == "decode"
    made.check()
    assert "long" in made.requests("p0") and "long" not in made.requests(taker)
    assert made.next_tick() < float("inf") and not made.tick(0.2)
    made.on_prefill_done("long", 4.0)
    assert made.hand_over("long", 4.0) == taker
    made.check()
    assert made.requests("p0") == frozenset() and "long" in made.requests(taker)
    made.on_prefill_done("long", 4.1)
    made.on_token("long", 5, 4.2)
    made.on_finish("long", 4.3)
    made.check()
    assert made.take("unknown", 5.0) is None


@pytest.mark.parametrize("dies", ["taker", "all decode workers", "prefill worker"])
def test_deaths_on_the_way(dies: str) -> None:
    """Promise: another decode worker goes on, or the prefill worker; and the books balance."""
    made = router(1, 2)
    streams(made)
    route(made, "long", 4000)
    taker = made.take("long", 0.1)
    assert taker is not None
    if dies == "prefill worker":
        assert made.remove_worker("p0") == ("long",)
        made.check()
        assert why(route(made, "long", 4000)) == "not split: no prefill worker"
        return
    for name in ("d0", "d1") if dies == "all decode workers" else (taker,):
        assert "long" not in made.remove_worker(name)
    made.check()
    goes_to = made.hand_over("long", 4.0)
    made.check()
    assert goes_to == ("p0" if dies == "all decode workers" else {"d0": "d1", "d1": "d0"}[taker])


def test_what_transfers_take_is_learnt() -> None:
    """Promise: where handing over was measured to be slow, less is split."""
    made = router()
    streams(made)
    assert why(route(made, "before", 400)) == "split: worth it"
    made.on_finish("before", 0.0)
    for _ in range(64):
        made.transfer = made.transfer.learn(0.05, 2.0)
    assert why(route(made, "after", 400)) == "not split: short"


@pytest.mark.parametrize("seed", range(20))
def test_the_books_balance_whatever_happens(seed: int) -> None:
    """Promise: for any order of events and deaths nothing is left in the books."""
    draw = random.Random(seed)
    made = router(2, 2, draw.choice(POLICIES))
    alive: list[str] = []
    here = {"p0", "p1", "d0", "d1"}
    now = 0.0
    for number in range(300):
        now += draw.random()
        for name in sorted(here):
            made.on_life(name, now)
        for action in made.tick(now):
            request = getattr(action, "request", None)
            alive = [id for id in alive if id != request]
        kind = draw.randrange(6)
        if kind == 0 or not alive:
            if here:
                route(made, str(number), draw.randrange(1, 4000), 300 * draw.randrange(4), now)
                alive.append(str(number))
        elif kind == 1:
            made.take(draw.choice(alive), now)
        elif kind == 2:
            id = draw.choice(alive)
            if made.hand_over(id, now) is None:
                alive.remove(id)
        elif kind == 3:
            made.on_prefill_done(draw.choice(alive), now)
            made.on_token(draw.choice(alive), 3, now)
        elif kind == 4:
            made.on_finish(alive.pop(draw.randrange(len(alive))), now)
        else:
            name = draw.choice(["p0", "p1", "d0", "d1"])
            if name in here:
                here.discard(name)
                lost = made.remove_worker(name)
                alive = [id for id in alive if id not in lost]
            else:
                here.add(name)
                made.add_worker(name, 4096, now)
        made.check()
        assert sorted(alive) == sorted(id for name in here for id in made.requests(name))
