"""Pages from one engine to another: the same answers, whatever becomes of the pages on their way."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from msgspec.structs import replace

from tenfold.engine.engine import Engine
from tenfold.engine.limits import EngineConfig
from tenfold.kv import nixl
from tenfold.kv.arena import Arena
from tenfold.kv.imports import Transfer
from tenfold.kv.region import Contents, FileReach, Mapped, Region, TransferError, right
from tenfold.kv.segment import token_bytes
from tenfold.kv.tcp import _ASK, _LENGTH, PageServer, TcpSource, _fill, _receive
from tenfold.kv.transfer import (
    Exports,
    Handoff,
    MemorySource,
    NixlOffer,
    Offer,
    Opener,
    await_pages,
    offer_memory,
)
from tenfold.protocol import Chunk, Request, TransferCounts
from tests.helpers.fake_program import FakeProgram
from tests.helpers.requests import Outcome, request, run
from tests.kv.test_tier import alone, prompt

PAGE = 128
SECRET = b"sixteen or more bytes"


def coming(engine: Engine) -> bool:
    """Whether pages are on their way, wanted or not."""
    return engine._imports is not None and bool(engine._imports.tables())


needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason=f"needs NIXL: {nixl.INSTALL}"
)
TRANSPORTS = ["memory", "tcp", pytest.param("nixl", marks=needs_nixl)]
"""Each does all that a transport must; NIXL within this machine by whatever UCX finds."""


def end_of(transport: str, arena: Arena) -> tuple[Offer, Opener, Callable[[], None]]:
    """An engine's end of one transport: how it offers, how it opens, how all of that ends."""
    if transport == "tcp":
        server = PageServer(SECRET, "127.0.0.1")
        return server.offer, lambda handoff: TcpSource(handoff, SECRET), server.close
    if transport == "nixl":
        agent = nixl.NixlAgent(arena, PAGE, SECRET)
        return agent.offer, agent.open, agent.close
    return offer_memory, MemorySource, lambda: None


class Pair:
    """Two engines, and what connects them: one transport and no other."""

    def __init__(
        self, transport: str, most_bytes: int = 1 << 20, lease_s: float = 30.0, **pages: int
    ) -> None:
        arena, none = Arena(most_bytes), Arena(0)
        offer, _, end_one = end_of(transport, arena)
        _, open, end_two = end_of(transport, none)
        self._ends = (end_one, end_two)

        def near(handoff: Handoff) -> bool:
            return transport == "memory"

        self.arena = arena
        self.exports = Exports("same", PAGE, arena, [offer], lease_s)
        config = EngineConfig(max_batch_tokens=32)
        self.one = Engine(
            FakeProgram(kv_pages=pages.get("one", 64)),
            config,
            transfer=Transfer(identity="same", exports=self.exports, open=open, near=near),
        )
        self.two = Engine(
            FakeProgram(kv_pages=pages.get("two", 64)),
            config,
            transfer=Transfer(identity="same", exports=Exports("same", PAGE, none), open=open, near=near),
        )

    def prefill(self, one: Request) -> list[Chunk]:
        """The chunks of a prefill."""
        self.one.add(replace(one, prefill_only=True))
        chunks: list[Chunk] = []
        while self.one.has_work:
            chunks += self.one.step()
            self.one.check_integrity()
        return chunks

    def decode(self, one: Request, first: Chunk | None, handoff: dict[str, Any] | None) -> Outcome:
        """What becomes of the request in the second engine."""
        tokens = () if first is None else first.tokens
        found = run(self.two, [replace(one, output=tokens, handoff=handoff)])[one.id]
        return Outcome(tokens=[*tokens, *found.tokens], finish=found.finish, cached=found.cached)

    def counts(self) -> TransferCounts:
        """Of the second engine."""
        counts = self.two.load().transfer
        assert counts is not None
        return counts

    def close(self) -> None:
        """Ends all."""
        self.one.close()
        self.two.close()
        for end in self._ends:
            end()


@pytest.fixture(params=TRANSPORTS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two engines for each transport."""
    made = Pair(request.param)
    yield made
    made.close()


ASKED = request("a", prompt(1), max_tokens=20, ignore_eos=True)


def test_a_request_goes_on_elsewhere(pair: Pair) -> None:
    """Prefilled here, decoded there: the text of one engine, all full pages taken, nothing kept."""
    chunks = pair.prefill(ASKED)
    assert [len(chunk.tokens) for chunk in chunks] == [0, 1]
    assert chunks[-1].finish == "length"
    found = pair.decode(ASKED, chunks[-1], chunks[-1].handoff)
    law = alone(ASKED)
    assert (found.tokens, found.finish, found.cached) == (law.tokens, law.finish, [96])
    assert (pair.counts().imported_pages, pair.counts().imports) == (6, {"imported": 1})
    deadline = time.monotonic() + 30
    while pair.exports.bytes and time.monotonic() < deadline:
        pair.exports.sweep()
    assert pair.exports.bytes == 0
    assert pair.one.load().pages_free == 64


def test_pages_are_read_while_they_are_made(pair: Pair) -> None:
    """The handoff of the first chunk will do: pages come as they become ready, and without a first token the
    second engine draws it."""
    pair.one.add(replace(ASKED, prefill_only=True))
    (early,) = pair.one.step()
    assert early.handoff is not None
    pair.one.step()
    pair.two.add(replace(ASKED, handoff=early.handoff))
    deadline = time.monotonic() + 60
    while not pair.two._cache.index.by_key(next(pair.two._cache.index.keys_after("", ASKED.prompt))):
        assert not pair.two.step()
        pair.two.check_integrity()
        assert time.monotonic() < deadline
    assert pair.one.has_work
    while pair.one.has_work:
        pair.one.step()
    found = run(pair.two, (), {"a": Outcome()})["a"]
    law = alone(ASKED)
    assert (found.tokens, found.cached) == (law.tokens, [96])


def test_an_exporter_that_gives_up_costs_what_was_missing(pair: Pair) -> None:
    """Aborted amid its prefill: the pages that came are used, the others computed."""
    pair.one.add(replace(ASKED, prefill_only=True))
    (early,) = pair.one.step()
    pair.one.abort("a")
    pair.one.step()
    found = pair.decode(ASKED, None, early.handoff)
    assert found.tokens == alone(ASKED).tokens
    assert pair.counts().imports == {"failed": 1}


@pytest.mark.parametrize("page", [0, 3])
def test_a_corrupt_page_is_computed(pair: Pair, page: int) -> None:
    """No page whose checksum is wrong enters the cache, nor any after it."""
    chunks = pair.prefill(ASKED)
    (export,) = pair.exports._lent
    at = export.region.at + export.region.contents.page_at(page) + 7
    byte = os.pread(export.region.file, 1, at)
    os.pwrite(export.region.file, bytes([byte[0] ^ 1]), at)
    found = pair.decode(ASKED, chunks[-1], chunks[-1].handoff)
    assert found.tokens == alone(ASKED).tokens
    assert found.cached == [16 * page]
    assert pair.counts().imports == {"partly" if page else "failed": 1}


GOOD: dict[str, Any] = {"pages": 6, "expires": 1e12}
BAD: list[dict[str, Any]] = [
    {},
    {**GOOD, "pages": 0},
    {**GOOD, "expires": "never"},
    GOOD,
    {**GOOD, "path": "/etc/passwd"},
    {**GOOD, "path": f"/proc/{os.getpid()}/fd/99999"},
    {**GOOD, "path": f"/proc/{os.getpid()}/fd/0"},
    {**GOOD, "host": "127.0.0.1", "port": 1, "key": "x"},
    {**GOOD, "unknown": 1},
    {**GOOD, "nixl": {}},
    {**GOOD, "nixl": {"metadata": "x" * 100_000, "address": 0, "proof": ""}},
]


@pytest.mark.parametrize("handoff", BAD)
def test_a_handoff_that_is_none_is_no_error(handoff: dict[str, Any]) -> None:
    """Whatever a handoff says, the request is answered."""
    made = Pair("memory")
    assert made.decode(ASKED, None, handoff).tokens == alone(ASKED).tokens
    assert made.counts().imports == {"failed": 1}
    made.close()


def test_pages_of_something_else_are_refused(pair: Pair) -> None:
    """Another prompt, another namespace, another model: nothing is taken."""
    chunks = pair.prefill(ASKED)
    other = request("b", prompt(2), max_tokens=20)
    assert pair.decode(other, None, chunks[-1].handoff).tokens == alone(other).tokens
    spaced = replace(ASKED, id="c", namespace="other")
    assert pair.decode(spaced, None, chunks[-1].handoff).cached == [0]
    assert pair.counts().imports == {"failed": 2}
    assert pair.counts().imported_pages == 0


def test_a_lease_ends(pair: Pair) -> None:
    """A region that nobody takes is given back when its time is over, and who comes then computes."""
    pair.exports._lease_s = 0.0
    chunks = pair.prefill(ASKED)
    pair.exports.sweep()
    assert pair.exports.bytes == 0
    assert pair.decode(ASKED, chunks[-1], chunks[-1].handoff).tokens == alone(ASKED).tokens
    assert pair.counts().imports == {"failed": 1}


def test_without_room_nothing_is_exported() -> None:
    """Regions are bounded; a prefill beyond it has no handoff, and its request is computed anew."""
    made = Pair("memory", most_bytes=8192)
    chunks = [made.prefill(replace(ASKED, id=str(n)))[-1] for n in range(3)]
    assert [chunk.handoff is not None for chunk in chunks] == [True, False, False]
    assert made.exports.declined == 2
    assert made.decode(ASKED, chunks[2], None).tokens == alone(ASKED).tokens
    made.close()


def test_a_prompt_that_begins_in_the_last_step_of_another_is_exported_too() -> None:
    """Promise: where there is room for one region alone, a prompt for which there is none yet gets it when
    the one before has been taken, with all its pages: the prefill is not lost to the decode worker."""
    made = Pair("memory", most_bytes=8192)
    asked = [replace(ASKED, id=str(n), prompt=tuple(prompt(n + 1))) for n in range(2)]
    for one in asked:
        made.one.add(replace(one, prefill_only=True))
    found: list[Outcome] = []
    last: dict[str, Chunk] = {}
    steps: dict[str, int] = {}
    for step in range(100):
        for chunk in made.one.step():
            if chunk.tokens:
                last[chunk.id] = chunk
            steps.setdefault(chunk.id, step)
        made.one.check_integrity()
        for one in asked[len(found) : len(last)]:  # taken at once
            found.append(made.decode(one, last[one.id], last[one.id].handoff))
        if not made.one.has_work:
            break
    assert steps["1"] == steps["0"] + 4  # the second has begun in step 3, and is announced a step later
    assert [one.tokens for one in found] == [alone(one).tokens for one in asked]
    assert [one.cached for one in found] == [[96], [96]]
    assert made.exports.declined == 0
    made.close()


def test_an_answer_of_one_token_needs_no_handoff(pair: Pair) -> None:
    """Where the first token is the last, by its number or as a stop, nothing is handed over."""
    assert pair.prefill(replace(ASKED, params=replace(ASKED.params, max_tokens=1)))[-1].handoff is None
    law = alone(ASKED)
    stops = replace(ASKED, params=replace(ASKED.params, stop_token_ids=(law.tokens[0],)))
    last = pair.prefill(stops)[-1]
    assert (last.finish, last.handoff) == ("stop", None)


def test_who_does_not_know_the_secret_gets_nothing() -> None:
    """Neither side talks to one that cannot prove itself."""
    made = Pair("tcp")
    handoff = Handoff(**(made.prefill(ASKED)[-1].handoff or {}))
    with pytest.raises(TransferError, match="closed the connection"):
        TcpSource(handoff, b"some other secret")
    with pytest.raises(TransferError, match="given the region up"):
        TcpSource(replace(handoff, key="0" * 32), SECRET)
    with pytest.raises(ValueError, match="16 or more"):
        PageServer(b"short", "127.0.0.1")
    liar = PageServer(b"a secret of its own", "127.0.0.1")
    with pytest.raises(TransferError):
        TcpSource(replace(handoff, port=liar.port), SECRET)
    liar.close()
    made.close()


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seeds=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    early=st.booleans(),
    aborts=st.sets(st.integers(0, 4)),
    pages=st.integers(8, 16),
)
def test_any_handovers(seeds: list[int], early: bool, aborts: set[int], pages: int) -> None:
    """Several at once, in little memory, some given up on either side: texts are those of one engine, and all
    pages are back in the end."""
    made = Pair("memory", one=pages, two=pages)
    asked = {
        str(n): request(str(n), prompt(seed, 60 + 10 * n), max_tokens=12) for n, seed in enumerate(seeds)
    }
    for one in asked.values():
        made.one.add(replace(one, prefill_only=True))
    outcomes: dict[str, Outcome] = {}
    given_up: set[str] = set()

    def hand_over(chunk: Chunk) -> None:
        ready = chunk.handoff is not None if early else chunk.finish == "length"
        if ready and chunk.id not in outcomes and chunk.id not in given_up:
            outcomes[chunk.id] = Outcome(tokens=[])
            made.two.add(replace(asked[chunk.id], handoff=chunk.handoff))

    for step in range(5000):
        if not made.one.has_work and not made.two.has_work and not coming(made.two):
            break
        if step in aborts and str(step) in asked:
            for engine in (made.one, made.two):
                engine.abort(str(step))
            given_up.add(str(step))
        for chunk in made.one.step():
            hand_over(chunk)
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


EXPORTER = """
import json, sys, time
from tests.kv.test_transfer import *
arena = Arena(1 << 20)
offer, _, _ = end_of(sys.argv[1], arena)
exports = Exports("same", PAGE, arena, [offer])
handoff = exports.begin("a", "", CONTENTS.tokens, 4)
exports.add("a", [memoryview(bytes([1]) * PAGE)] * 2)
print(json.dumps(handoff), flush=True)
time.sleep(600)
"""
CONTENTS = Contents(identity="same", namespace=b"", tokens=token_bytes(range(64)), pages=4, page_bytes=PAGE)


@contextmanager
def exporter(transport: str, prefix: Sequence[str] = ()) -> Iterator[tuple[subprocess.Popen[bytes], Handoff]]:
    """Another process whose region has two pages ready of four, and its handoff."""
    command = [*prefix, sys.executable, "-c", EXPORTER, transport]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield process, msgspec.convert(json.loads(process.stdout.readline()), Handoff)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_exporter_is_noticed(transport: str) -> None:
    """Across processes: what is ready is read, and when the exporter is killed its importer does not wait."""
    _, open, end = end_of(transport, Arena(0))
    with exporter(transport) as (process, handoff):
        source = open(handoff)
        assert source.contents == CONTENTS
        views = [memoryview(bytearray(PAGE)) for _ in range(2)]
        assert source.read(0, views) == 2
        assert bytes(views[1]) == bytes([1]) * PAGE
        process.send_signal(signal.SIGKILL)
        process.wait()
        began = time.monotonic()
        with pytest.raises((TransferError, OSError)):
            source.read(2, views)
        assert time.monotonic() < began + 15
        source.close()
    end()


def test_waiting_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exporter without progress, and a deadline, end the wait; progress prolongs it."""
    monkeypatch.setattr("tenfold.kv.transfer.STALL_S", 0.02)
    with pytest.raises(TransferError, match="late"):
        await_pages(lambda: (1, "open"), 2, time.time() + 60)
    with pytest.raises(TransferError, match="late"):
        await_pages(lambda: (1, "open"), 2, time.time() - 1)
    ready = iter(range(100))
    await_pages(lambda: (next(ready), "open"), 90, time.time() + 60)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_memory_that_is_used_again_is_not_taken_for_what_it_held(transport: str) -> None:
    """Two importers of one region: when one has taken it, it is filled anew; the other, which still has it
    open, is refused, and not given the new pages, which are whole. Nor can it say that it has taken those."""
    arena = Arena(1 << 20)
    offer, _, end_one = end_of(transport, arena)
    _, open, end_two = end_of(transport, Arena(0))
    exports = Exports("same", PAGE, arena, [offer])

    def export(id: str, byte: int) -> Handoff:
        handoff = exports.begin(id, "", token_bytes(range(64)), 4)
        exports.add(id, [memoryview(bytes([byte]) * PAGE)] * 4)
        assert handoff is not None
        assert exports.end(id) is not None
        return msgspec.convert(handoff, Handoff)

    first = export("a", 1)
    slow, quick = open(first), open(first)
    views = [memoryview(bytearray(PAGE)) for _ in range(4)]
    assert slow.read(0, views[:1]) == 1
    assert quick.read(0, views) == 4
    quick.take()
    quick.close()
    deadline = time.monotonic() + 60
    while exports.bytes:
        assert time.monotonic() < deadline
        exports.sweep()
    second = export("b", 2)
    assert second.at == first.at
    with pytest.raises((TransferError, OSError)):
        slow.read(0, views)
    if transport != "tcp":
        with pytest.raises(TransferError, match="given the region up"):
            slow.take()
    slow.close()
    exports.sweep()
    assert exports.bytes
    exports.close()
    end_two()
    end_one()


def test_what_is_read_of_a_region_is_its_own() -> None:
    """Promise: who has seen that all is there, and then reads sums or the token, is refused when another
    region took the place in between; and a token of the one before is none of the new one's."""
    arena = Arena(1 << 20)

    def filled(byte: int, token: int | None) -> Region:
        region = Region(CONTENTS, arena)
        region.add([memoryview(bytes([byte]) * PAGE)] * 4)
        assert region.end(token)
        return region

    first = filled(1, 7)
    early = Mapped(FileReach(first.file, first.at))
    assert (early.progress(), early.token()) == ((4, "complete"), 7)
    first.close()
    second = filled(2, None)
    assert second.at == first.at
    for read in (early.token, early.complete_at, lambda: early.sums(0, 4)):
        with pytest.raises(TransferError, match="given the region up"):
            read()
    assert Mapped(FileReach(second.file, second.at)).token() is None
    second.close()
    arena.close()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = (*Handoff.__struct_fields__, *NixlOffer.__struct_fields__, "other")


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(_FIELDS),
        _JSON | st.integers(-(2**70), 2**70) | st.dictionaries(st.sampled_from(_FIELDS), _JSON),
    )
)
def test_a_handoff_is_whole_or_none(said: dict[str, Any]) -> None:
    """Promise: whatever is said in the place of a handoff is refused, or within the bounds of one."""
    try:
        handoff = msgspec.convert(said, Handoff)
    except msgspec.ValidationError:
        return
    assert 1 <= handoff.pages < 1 << 32 and 0 <= handoff.at < 1 << 63 and 0 <= handoff.port < 1 << 16
    assert msgspec.to_builtins(handoff).items() >= {k: v for k, v in said.items() if k != "nixl"}.items()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40_000)), max_size=60))
def test_no_two_regions_share_memory(steps: list[tuple[bool, int]]) -> None:
    """Promise: what is lent is apart from all else that is lent, whole, and within the arena; all of it can
    be had again when all was given back."""
    arena = Arena(1 << 18)
    lent: dict[int, int] = {}
    for take, number in steps:
        if take:
            at = arena.take(number)
            if at is not None:
                assert at >= 0 and at + number <= arena.size
                assert all(at + number <= other or other + size <= at for other, size in lent.items())
                lent[at] = number
        elif lent:
            at = sorted(lent)[number % len(lent)]
            arena.give(at)
            del lent[at]
    for at in lent:
        arena.give(at)
    assert arena.used == 0 and arena.take(arena.size) == 0
    arena.close()


def test_a_reader_that_is_slower_than_the_network() -> None:
    """Promise: an exporter whose socket is full waits for its importer, and the pages come right."""
    pages = 64
    contents = Contents(
        identity="same", namespace=b"", tokens=bytes(4 * 16 * pages), pages=pages, page_bytes=1 << 18
    )
    made = [bytes([number]) * (1 << 18) for number in range(pages)]
    server, region = PageServer(SECRET, "127.0.0.1"), Region(contents, Arena(contents.size))
    region.add([memoryview(page) for page in made])
    fields, retract = server.offer(region)
    source = TcpSource(Handoff(**fields, pages=pages, expires=time.time() + 60), SECRET)
    source._socket.sendall(_LENGTH.pack(_ASK.size) + _ASK.pack(0, pages))
    time.sleep(0.5)  # so much is on its way that nothing more can be sent
    sums = _receive(source._socket)
    views = [memoryview(bytearray(1 << 18)) for _ in range(pages)]
    for view in views:
        _fill(source._socket, view)
    assert [bytes(view) for view in views] == made and right(views, sums) == pages
    source.close()
    retract()
    region.close()
    server.close()
