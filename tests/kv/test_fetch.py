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

from tenfold.engine.engine import Engine
from tenfold.kv import imports
from tenfold.protocol import Chunk, Fetch, Request
from tests.helpers.requests import Outcome, request, run
from tests.kv.test_tier import alone, prompt
from tests.kv.test_transfer import Pair, coming

ASKED = request("a", prompt(1), max_tokens=20, ignore_eos=True)


def fetch(one: Request, handoff: dict[str, Any] | None) -> Fetch:
    assert handoff is not None
    return Fetch(id=one.id, tokens=one.prompt + one.output, handoff=handoff, namespace=one.namespace)


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
    chunks = until(lambda: not made.one.has_work, made.one, made.two)
    first = next(chunk for chunk in chunks if chunk.tokens)
    found = made.decode(ASKED, first, first.handoff)
    law = alone(ASKED)
    assert (found.tokens, found.finish, found.cached) == (law.tokens, law.finish, [96])
    counts = made.counts()
    assert (counts.imported_pages, counts.imports, counts.fallbacks) == (6, {"imported": 1}, {})
    assert counts.starts == 1 and 0 < counts.start_s == counts.start_max_s
    assert counts.import_s > 0 and made.exports.seconds > 0
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
    until(lambda: not coming(made.two), made.two)
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
    until(lambda: made.counts().imported_pages == 6, made.two)
    assert made.two.load().preemptions == 0
    assert made.decode(ASKED, last, last.handoff).tokens == alone(ASKED).tokens
    made.close()


@pytest.mark.parametrize("handoff", [{}, {"pages": 6, "path": "/proc/1/fd/0", "expires": 1e12}])
def test_a_fetch_of_nothing_is_no_error(handoff: dict[str, Any]) -> None:
    """Promise: whatever a handoff says, the request that follows is answered."""
    made = Pair("memory")
    made.two.fetch(Fetch(id="a", tokens=ASKED.prompt, handoff=handoff))
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
                outcomes[chunk.id] = Outcome(tokens=list(chunk.tokens))
                handoff = chunk.handoff if handoffs else None
                made.two.add(replace(asked[chunk.id], output=chunk.tokens, handoff=handoff))
        for chunk in made.two.step():
            outcomes[chunk.id].hear(chunk)
        made.one.check_integrity()
        made.two.check_integrity()
    for id, outcome in outcomes.items():
        if outcome.finish != "abort":
            assert outcome.tokens == alone(asked[id]).tokens
    for engine in (made.one, made.two):
        load = engine.load()
        assert (load.pages_free, load.running, load.waiting) == (pages, 0, 0)
    made.close()
