"""Pages that are fetched for a request that comes later: it waits for them and for nothing else, holds up
nobody, and its text is that of one engine, whatever becomes of the pages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from msgspec.structs import replace

from tenfold.engine import engine as engine_module
from tenfold.engine.engine import Engine
from tenfold.kv import imports
from tenfold.protocol import Chunk, Fetch, Request
from tests.helpers.requests import Outcome, request, run
from tests.kv.test_tier import alone, prompt
from tests.kv.test_transfer import TRANSPORTS, Pair, coming

ASKED = request("a", prompt(1), max_tokens=20, ignore_eos=True)


def fetch(one: Request, handoff: dict[str, Any] | None) -> Fetch:
    assert handoff is not None
    return Fetch(request=replace(one, handoff=handoff))


def until(done: Callable[[], bool], *engines: Engine) -> list[Chunk]:
    """Steps until it is so."""
    chunks: list[Chunk] = []
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        for engine in engines:
            chunks += engine.step()
            engine.check_integrity()
    return chunks


def test_pages_come_before_their_request() -> None:
    """Promise: fetched along with the prefill, all pages are in the cache when the request comes with its
    first token; the time from the last page to its first step is told."""
    made = Pair("memory")
    made.one.add(replace(ASKED, prefill_only=True))
    (early,) = made.one.step()
    made.two.fetch(fetch(ASKED, early.handoff))
    assert made.two.has_work
    first, outcome = Chunk(id=""), Outcome()
    while made.one.has_work:
        for first in made.one.step():
            assert first.finish == "length"
        for chunk in made.two.step():
            outcome.hear(chunk)
    made.two.add(replace(ASKED, output=first.tokens, handoff=first.handoff))
    found = run(made.two, (), {"a": outcome})["a"]
    law = alone(ASKED)
    assert ([*first.tokens, *found.tokens], found.finish) == (law.tokens, law.finish)
    assert found.cached == [96]
    counts = made.counts()
    assert (counts.imported_pages, counts.imports, counts.fallbacks) == (6, {"imported": 1}, {})
    assert counts.starts == 1 and 0 < counts.start_s == counts.start_max_s
    assert counts.import_s > 0 and made.exports.seconds > 0
    made.close()


def streams(engine: Engine, count: int = 3) -> None:
    """Requests that decode, and do not end."""
    for number in range(count):
        engine.add(request(f"s{number}", prompt(number + 4, 20), max_tokens=400, ignore_eos=True))
    while engine.load().running < count:
        engine.step()


@pytest.mark.parametrize("length", [80, 96, 97, 100])
def test_it_is_in_the_next_step_that_begins(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """Promise: when all pages and the first token are there, the next step that begins draws the second,
    beside the streams, whether the front has sent the request by then or not; when it does, that says
    nothing new."""
    monkeypatch.setattr(engine_module, "LAST_PAGES_S", 60.0)  # steps are counted, not milliseconds
    asked = replace(ASKED, prompt=tuple(prompt(1, length)))
    made = Pair("memory")
    streams(made.two)
    made.one.add(replace(asked, prefill_only=True))
    (early,) = made.one.step()
    made.two.fetch(fetch(asked, early.handoff))
    heard: list[Chunk] = []
    while made.one.has_work:
        assert "a" not in {chunk.id for chunk in made.two.step()}
        heard += made.one.step()
    (joined,) = [chunk for chunk in made.two.step() if chunk.id == "a"]
    assert len(joined.tokens) == 1 and joined.cached_tokens == length // 16 * 16
    last = heard[-1]
    made.two.add(replace(asked, output=last.tokens, handoff=last.handoff))
    found = [*last.tokens, *joined.tokens]
    finishes: list[str] = []
    while not finishes:
        for chunk in made.two.step():
            if chunk.id == "a":
                found += chunk.tokens
                finishes += [] if chunk.finish is None else [chunk.finish]
        made.two.check_integrity()
    law = alone(asked)
    assert (found, finishes) == (law.tokens, [law.finish])
    assert made.counts().starts == 1 and made.counts().fallbacks == {}
    made.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_it_goes_on_without_a_word(transport: str) -> None:
    """Promise: whatever brings the pages brings the first token too, and the request goes on behind it before
    it comes itself."""
    made = Pair(transport)
    made.one.add(replace(ASKED, prefill_only=True))
    (early,) = made.one.step()
    made.two.fetch(fetch(ASKED, early.handoff))
    last = until(lambda: not made.one.has_work, made.one)[-1]
    outcome = Outcome(tokens=list(last.tokens))
    while outcome.finish is None:
        for chunk in until(lambda: made.two.load().running > 0, made.two) + made.two.step():
            outcome.hear(chunk)
        if outcome.cached:
            made.two.add(replace(ASKED, output=last.tokens, handoff=last.handoff))
            run(made.two, (), {"a": outcome})
    law = alone(ASKED)
    assert (outcome.tokens, outcome.finish, outcome.cached) == (law.tokens, law.finish, [96])
    assert made.counts().imports == {"imported": 1}
    made.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_prompts_leave_rows_for_it(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    """Promise: it is in the next step also where that is full of a prompt's rows and other prompts wait; they
    go on after it, in their order, with their texts."""
    monkeypatch.setattr(engine_module, "LAST_PAGES_S", 60.0)
    made = Pair(transport)
    streams(made.two)
    long = [request(f"l{n}", prompt(n + 8, 150), max_tokens=3, ignore_eos=True) for n in range(2)]
    last = made.prefill(ASKED)[-1]
    outcomes = {one.id: Outcome() for one in (ASKED, *long)}
    for one in long:
        made.two.add(one)
    made.two.step()
    made.two.fetch(fetch(ASKED, last.handoff))
    if transport != "memory":  # which alone is waited for
        assert made.two._imports is not None
        (arrival,) = made.two._imports._arrivals.under_way
        until(lambda: arrival.over)
    begun: dict[str, int] = {}
    for step in range(100):
        for chunk in made.two.step():
            if chunk.id in outcomes:
                outcomes[chunk.id].hear(chunk)
                begun.setdefault(chunk.id, step)
        made.two.check_integrity()
    assert begun["a"] == 0 < begun["l0"] < begun["l1"]
    assert [*last.tokens, *outcomes["a"].tokens] == alone(ASKED).tokens
    for one in long:
        assert outcomes[one.id].tokens == alone(one).tokens
    made.close()


@pytest.mark.parametrize("given_up", [False, True])
def test_it_may_end_before_it_is_sent(given_up: bool) -> None:
    """Promise: a request that ended ahead of its being sent is not begun anew; one that is given up meanwhile
    leaves nothing behind."""
    asked = replace(ASKED, params=replace(ASKED.params, max_tokens=400 if given_up else 2))
    made = Pair("memory")
    last = made.prefill(asked)[-1]
    made.two.fetch(fetch(asked, last.handoff))
    chunks = until(lambda: made.counts().starts == 1, made.two)
    if given_up:
        assert made.two.abort("a")
        chunks += until(lambda: not made.two.has_work, made.two)
        assert chunks[-1].finish == "abort"
    else:
        assert [*last.tokens, *chunks[-1].tokens] == alone(asked).tokens
        assert chunks[-1].finish == "length"
        made.two.add(replace(asked, output=last.tokens, handoff=last.handoff))
    assert not made.two.has_work and made.two.load().pages_free == 64
    assert not made.two._begun and not made.two._ahead
    made.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_prompt_whose_answer_has_ended_is_not_gone_on_with(transport: str) -> None:
    """Promise: where the first token is the last, nobody goes on behind it."""
    stops = replace(ASKED, params=replace(ASKED.params, stop_token_ids=(alone(ASKED).tokens[0],)))
    made = Pair(transport)
    made.one.add(replace(stops, prefill_only=True))
    (early,) = made.one.step()
    made.two.fetch(fetch(stops, early.handoff))
    chunks = until(lambda: not made.one.has_work, made.one)
    assert chunks[-1].finish == "stop"
    assert until(lambda: made.counts().imported_pages == 6, made.two) == []
    assert not made.two.abort("a") and not made.two.has_work
    made.close()


def test_others_do_not_wait_for_it() -> None:
    """Promise: a request whose pages are not there yet holds up nobody who came after it."""
    made = Pair("memory")
    made.one.add(replace(ASKED, prefill_only=True))
    (early,) = made.one.step()
    made.two.fetch(fetch(ASKED, early.handoff))
    made.two.add(replace(ASKED, handoff=early.handoff))
    assert made.two.load().waiting == 1
    other = request("b", prompt(2), max_tokens=5)
    outcomes = {"b": Outcome()}
    made.two.add(other)
    while outcomes["b"].finish is None:  # the exporter stands still meanwhile
        for chunk in made.two.step():
            outcomes[chunk.id].hear(chunk)
        made.two.check_integrity()
    assert outcomes["b"].tokens == alone(other).tokens
    while made.one.has_work:
        made.one.step()
    found = run(made.two, (), {"a": Outcome()})["a"]
    assert (found.tokens, found.cached) == (alone(ASKED).tokens, [96])
    made.close()


def test_a_slow_exporter_holds_up_no_other() -> None:
    """Promise: several handoffs are read at once."""
    made, slow = Pair("memory"), Pair("memory")
    slow.one.add(replace(ASKED, id="slow", prefill_only=True))
    (early,) = slow.one.step()
    made.two.fetch(fetch(replace(ASKED, id="slow"), early.handoff))
    last = made.prefill(replace(ASKED, prompt=tuple(prompt(3))))[-1]
    made.two.fetch(fetch(replace(ASKED, prompt=tuple(prompt(3))), last.handoff))
    until(lambda: made.counts().imported_pages == 6, made.two)
    made.two.abort("slow")
    until(lambda: not coming(made.two) and not made.two.has_work, made.two)
    assert made.counts().imports == {"imported": 1, "abandoned": 1}
    assert made.two.load().pages_free == 64
    made.close()
    slow.close()


def test_pages_that_stay_away_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: once its request is there, a fetch that does not end in time is called off, and counted."""
    monkeypatch.setattr(imports, "LATE_S", 0.05)
    made = Pair("memory")
    made.one.add(replace(ASKED, prefill_only=True))
    (early,) = made.one.step()  # and no step more
    made.two.fetch(fetch(ASKED, early.handoff))
    assert made.decode(ASKED, None, early.handoff).tokens == alone(ASKED).tokens
    until(lambda: not coming(made.two), made.two)
    assert made.counts().fallbacks == {"late": 1}
    made.close()


def test_without_room_a_fetch_waits_for_it() -> None:
    """Promise: a fetch for which there are no pages begins when there are, and throws nobody out."""
    made = Pair("memory", two=10)
    made.two.add(request("b", prompt(2), max_tokens=20, ignore_eos=True))
    made.two.step()
    last = made.prefill(ASKED)[-1]
    made.two.fetch(fetch(ASKED, last.handoff))
    assert not coming(made.two)
    heard = until(lambda: made.counts().imported_pages == 6, made.two)
    assert made.two.load().preemptions == 0
    made.two.add(replace(ASKED, output=last.tokens, handoff=last.handoff))
    heard += until(lambda: not made.two.has_work, made.two)
    ours = [token for chunk in heard if chunk.id == "a" for token in chunk.tokens]
    assert [*last.tokens, *ours] == alone(ASKED).tokens
    made.close()


@pytest.mark.parametrize("handoff", [{}, {"pages": 6, "path": "/proc/1/fd/0", "expires": 1e12}])
def test_a_fetch_of_nothing_is_no_error(handoff: dict[str, Any]) -> None:
    """Promise: whatever a handoff says, the request that follows is answered."""
    made = Pair("memory")
    made.two.fetch(fetch(ASKED, handoff))
    assert made.decode(ASKED, None, None).tokens == alone(ASKED).tokens
    assert sum(made.counts().fallbacks.values()) == 1
    made.close()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seeds=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    aborts=st.sets(st.integers(0, 8)),
    handoffs=st.booleans(),
    pages=st.integers(8, 16),
)
def test_any_fetches(seeds: list[int], aborts: set[int], handoffs: bool, pages: int) -> None:
    """Promise: several at once, in little memory, some given up on either side: texts are those of one
    engine, and all pages are back in the end."""
    made = Pair("memory", one=pages, two=pages)
    asked = {
        str(n): request(str(n), prompt(seed, 60 + 10 * n), max_tokens=12) for n, seed in enumerate(seeds)
    }
    for one in asked.values():
        made.one.add(replace(one, prefill_only=True))
    outcomes: dict[str, Outcome] = {}
    firsts: dict[str, tuple[int, ...]] = {}
    given_up: set[str] = set()
    for step in range(5000):
        if not made.one.has_work and not made.two.has_work and not coming(made.two):
            break
        if step in aborts and str(step) in asked:
            for engine in (made.one, made.two):
                engine.abort(str(step))
            given_up.add(str(step))
        for chunk in made.one.step():
            if chunk.id in given_up:
                continue
            if chunk.finish is None:
                made.two.fetch(fetch(asked[chunk.id], chunk.handoff))
            elif chunk.finish == "length":
                firsts[chunk.id] = chunk.tokens
                handoff = chunk.handoff if handoffs else None
                made.two.add(replace(asked[chunk.id], output=chunk.tokens, handoff=handoff))
        for chunk in made.two.step():
            outcomes.setdefault(chunk.id, Outcome()).hear(chunk)
        made.one.check_integrity()
        made.two.check_integrity()
    for id, first in firsts.items():
        if id not in given_up:
            assert [*first, *outcomes[id].tokens] == alone(asked[id]).tokens
    for engine in (made.one, made.two):
        load = engine.load()
        assert (load.pages_free, load.running, load.waiting) == (pages, 0, 0)
    made.close()
