"""An engine with a disk tier: the same answers, sooner, and never for want of the disk."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, rule

from tenfold.engine.engine import Engine
from tenfold.engine.limits import EngineConfig
from tenfold.kv.disk import DiskTier
from tenfold.kv.pace import PROBE_EVERY, PROBE_PAGES, Pace
from tenfold.kv.tier import Tier
from tenfold.protocol import PagesRemoved, PagesStored, Request, TierCounts
from tenfold.router.names import page_names
from tests.helpers.fake_program import FakeProgram
from tests.helpers.requests import Outcome, request, run

PAGE = 128
SIZE = 32 * 8192


def prompt(seed: int, length: int = 100) -> list[int]:
    """Tokens that depend on the seed from the first on."""
    return [1 + (seed * 13 + i * (seed + 3)) % 39 for i in range(length)]


def engine(folder: Path, kv_pages: int = 64, program: FakeProgram | None = None) -> Engine:
    """An engine with a tier in ``folder``."""
    return Engine(
        program or FakeProgram(kv_pages=kv_pages),
        EngineConfig(max_batch_tokens=48, max_running=4),
        disk=DiskTier(folder, "identity", PAGE, SIZE),
    )


def tier_of(one: Engine) -> Tier:
    """The engine's tier."""
    assert one._tier is not None
    return one._tier


def counts(one: Engine) -> TierCounts:
    """What the tier did."""
    found = one.load().tier
    assert found is not None
    return found


def alone(one: Request) -> Outcome:
    """What comes of a request on a fresh engine without a tier."""
    return run(Engine(FakeProgram()), [one])[one.id]


def crash(one: Engine) -> None:
    """The engine's process is gone without a word."""
    tier = tier_of(one)
    tier._writer.close(10)
    tier._arrivals.close(10)
    tier.disk._own_file = -1
    tier.disk._own = None
    tier.disk.close()


def until(what: Callable[[], bool]) -> None:
    """Waits for a thread."""
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("orderly", [True, False])
def test_a_restart_keeps_the_cache(tmp_path: Path, orderly: bool) -> None:
    """After an orderly end and after a crash a prompt's pages, and its answer's, are read, and counted as
    cached."""
    first = engine(tmp_path)
    one = request("a", prompt(1), max_tokens=30, ignore_eos=True)
    law = run(first, [one])["a"]
    assert counts(first).stored_pages == (100 + 29) // 16
    (first.close if orderly else lambda: crash(first))()
    second = engine(tmp_path)
    longer = request("b", [*prompt(1), *law.tokens, 1, 2, 3])
    assert run(second, [longer])["b"].cached == [128]
    found = run(second, [one])["a"]
    assert (found.tokens, found.cached) == (law.tokens, [99])
    assert counts(second).restored_pages == 8
    assert counts(second).restores == {"restored": 1}
    second.close()


def test_what_memory_cannot_hold_is_read_again(tmp_path: Path) -> None:
    """Prompts that push each other out of a small memory come back from the disk."""
    small = engine(tmp_path, kv_pages=12)
    for round in range(2):
        for seed in range(4):
            one = request(f"{round}/{seed}", prompt(seed), max_tokens=4)
            found = run(small, [one])[one.id]
            assert found.tokens == alone(one).tokens
            assert found.cached == [96 if round else 0]
    small.close()


def test_engines_share_a_folder_while_they_run(tmp_path: Path) -> None:
    """What one engine wrote another finds; namespaces stay apart."""
    one, two = engine(tmp_path), engine(tmp_path)
    law = run(one, [request("a", prompt(1))])["a"]
    tier_of(two).disk.refresh()
    assert run(two, [request("a", prompt(1))])["a"] == Outcome(
        tokens=law.tokens, finish=law.finish, stop_token=law.stop_token, cached=[96]
    )
    other = Request(id="b", prompt=tuple(prompt(1)), params=request("b", [1]).params, namespace="other")
    assert run(two, [other])["b"].cached == [0]
    one.close()
    two.close()


def test_reading_that_does_not_pay_is_left_alone(tmp_path: Path) -> None:
    """Where computing was measured to be faster pages are computed; now and then a few are read to see."""
    first = engine(tmp_path)
    run(first, [request("a", prompt(1))])
    first.close()
    second = engine(tmp_path)
    pace = tier_of(second).pace
    pace.row_s, pace.page_s = 1e-6, 1.0
    assert run(second, [request("a", prompt(1))])["a"].cached == [0]
    assert counts(second).restores == {"declined": 1}
    second.close()


def test_the_pace_weighs_expected_times() -> None:
    """All pages, none, or a few from time to time; what comes first in the queue counts too."""
    pace = Pace(16)
    assert pace.worth(100) == 100
    pace.stepped(512, 0.512)
    pace.stepped(8, 100.0)
    pace.restored(100, 0.1)
    assert pace.compute_s(100) == pytest.approx(1.6)
    assert pace.worth(100) == 100
    assert pace.worth(100, queued=2000) == 0
    pace.page_s = 0.02
    assert [pace.worth(100) for _ in range(PROBE_EVERY - 1)].count(PROBE_PAGES) == 1


class Slow(DiskTier):
    """Reads when it is told to."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.go = threading.Event()
        self.reads = 0

    def read(self, *given: Any) -> int:
        """Waits first."""
        self.reads += 1
        assert self.go.wait(60)
        return super().read(*given)


def test_a_late_disk_is_not_waited_for(tmp_path: Path) -> None:
    """A read that hangs costs its deadline once: the request is computed, later ones do not try, others go on
    meanwhile, and when the disk comes back nothing has leaked."""
    first = engine(tmp_path)
    run(first, [request("a", prompt(1)), request("b", prompt(2))])
    first.close()
    disk = Slow(tmp_path, "identity", PAGE, SIZE)
    second = Engine(FakeProgram(), disk=disk)
    tier_of(second).pace.row_s = 1e-9
    second.add(request("a", prompt(1)))
    outcome, chunks = Outcome(), 0
    while outcome.finish is None:
        for chunk in second.step():
            outcome.hear(chunk)
            chunks += 1
        second.check_integrity()
    assert outcome.tokens == alone(request("a", prompt(1))).tokens
    assert outcome.cached == [0]
    second.add(request("b", prompt(2)))
    while second.load().running or second.load().waiting:
        second.step()
    assert disk.reads == 1
    disk.go.set()
    until(lambda: bool(second.step() or not tier_of(second)._arrivals.under_way))
    second.check_integrity()
    assert second.load().pages_free == second.load().pages_total
    assert counts(second).restored_pages == 6
    second.close()


def test_running_requests_step_while_pages_are_read(tmp_path: Path) -> None:
    """A request that waits for the disk holds nobody up who runs."""
    first = engine(tmp_path)
    run(first, [request("a", prompt(1))])
    first.close()
    disk = Slow(tmp_path, "identity", PAGE, SIZE)
    second = Engine(FakeProgram(), disk=disk)
    second.add(request("b", prompt(2), max_tokens=20, ignore_eos=True))
    second.step()
    second.add(request("a", prompt(1)))
    tier_of(second).pace.row_s = 1.0
    tokens = [token for _ in range(10) for chunk in second.step() for token in chunk.tokens]
    assert len(tokens) == 10
    assert second.load().waiting == 1
    disk.go.set()
    outcomes = run(second, (), {"b": Outcome(tokens=[])})
    assert outcomes["a"].cached == [96]
    second.close()


def test_an_abort_while_pages_are_read_leaks_nothing(tmp_path: Path) -> None:
    """The request is gone at once; its pages are when the reader lets go of them."""
    first = engine(tmp_path)
    run(first, [request("a", prompt(1))])
    first.close()
    disk = Slow(tmp_path, "identity", PAGE, SIZE)
    second = Engine(FakeProgram(), disk=disk)
    second.add(request("a", prompt(1)))
    second.step()
    until(lambda: disk.reads == 1)
    assert second.abort("a")
    assert [chunk.finish for chunk in second.step()] == ["abort"]
    second.check_integrity()
    disk.go.set()
    until(lambda: bool(second.step() or not tier_of(second)._arrivals.under_way))
    second.check_integrity()
    assert second.load().pages_free == 64
    second.close()


def test_a_corrupt_page_is_computed(tmp_path: Path) -> None:
    """Pages up to the changed one are used, the others computed and counted; the text is the same."""
    first = engine(tmp_path)
    run(first, [request("a", prompt(1))])
    first.close()
    (path,) = tmp_path.glob("identity/*.kv")
    data = bytearray(path.read_bytes())
    at = data.index(FakeProgramPage(prompt(1), 3))
    data[at + 5] ^= 1
    path.write_bytes(data)
    second = engine(tmp_path)
    found = run(second, [request("a", prompt(1))])["a"]
    assert found.tokens == alone(request("a", prompt(1))).tokens
    assert found.cached == [48]
    assert (counts(second).corrupt, counts(second).restores) == (1, {"partly": 1})
    second.close()


def FakeProgramPage(tokens: list[int], page: int) -> bytes:
    """The bytes of a page of a prompt."""
    program = FakeProgram()
    served = Engine(program)
    served.add(request("p", tokens, max_tokens=2))
    while not served.load().generated_tokens:
        served.step()
    (sequence,) = [*served._sequences.values()]
    assert sequence.table is not None
    return program.read_page(int(sequence.table.pages[page]))


def test_a_folder_that_cannot_be_used_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file where the folder should be: computing goes on, faults are counted, and the log has one line
    each."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        one = engine(blocked)
        for seed in range(3):
            tier_of(one)._quiet_until = 0.0
            asked = request(str(seed), prompt(seed))
            assert run(one, [asked])[str(seed)].tokens == alone(asked).tokens
    assert counts(one).errors["write"] == 3
    assert counts(one).dropped_pages == 18
    lines = [record.getMessage() for record in caplog.records if "cannot write" in record.getMessage()]
    assert len(lines) == 1
    one.close()


class Failing(DiskTier):
    """A disk that is full."""

    def append(self, *given: Any) -> bool:
        """Fails."""
        raise OSError(28, "No space left on device")


def test_a_full_disk_costs_nothing_but_the_cache(tmp_path: Path) -> None:
    """Requests are served as without a tier, and after a fault the disk is left alone for a while."""
    one = Engine(FakeProgram(), disk=Failing(tmp_path, "identity", PAGE, SIZE))
    for seed in range(3):
        asked = request(str(seed), prompt(seed))
        assert run(one, [asked])[str(seed)].tokens == alone(asked).tokens
    assert counts(one).errors == {"write": 1}
    one.close()


class Held(DiskTier):
    """Stores when it is told to."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.go = threading.Event()
        self.began = threading.Event()

    def append(self, *given: Any) -> bool:
        """Waits first."""
        self.began.set()
        assert self.go.wait(60)
        return super().append(*given)


def test_a_page_that_is_evicted_while_it_is_written_does_not_count(tmp_path: Path) -> None:
    """The writer owns no page: its pages are taken when they are needed, and what it wrote of them is
    void."""
    disk = Held(tmp_path, "identity", PAGE, SIZE)
    one = Engine(FakeProgram(kv_pages=8), disk=disk)
    for seed in range(3):
        asked = request(str(seed), prompt(seed), max_tokens=4)
        one.add(asked)
        outcome = Outcome()
        while outcome.finish is None:
            for chunk in one.step():
                outcome.hear(chunk)
            one.check_integrity()
            if seed == 0 and one._tier is not None and one._tier._writing is not None:
                assert disk.began.wait(60)
        assert outcome.tokens == alone(asked).tokens
    disk.go.set()
    one.close()
    two = engine(tmp_path)
    for seed in range(3):
        asked = request(str(seed), prompt(seed), max_tokens=4)
        assert run(two, [asked])[str(seed)].tokens == alone(asked).tokens
    assert counts(two).corrupt == 0
    two.close()


def test_a_write_that_hangs_lets_the_engine_rest(tmp_path: Path) -> None:
    """An engine whose disk hangs has no work for ever, only for a moment."""
    disk = Held(tmp_path, "identity", PAGE, SIZE)
    one = Engine(FakeProgram(), disk=disk)
    run(one, [request("a", prompt(1))])
    assert not one.has_work
    disk.go.set()
    one.close()


def test_pages_whose_file_is_deleted_are_written_again(tmp_path: Path) -> None:
    """What memory still holds returns to the disk: chains that follow it there would be of no use
    otherwise."""
    one = engine(tmp_path)
    run(one, [request("a", prompt(1))])
    tier_of(one).disk.refresh()
    shutil.rmtree(tmp_path / "identity")
    tier_of(one).disk.refresh()
    tier_of(one)._quiet_until = 0.0
    one.step()
    until(lambda: bool(one.step() or not one.has_work))
    tier_of(one)._quiet_until = 0.0
    one.close()
    two = engine(tmp_path)
    assert run(two, [request("a", prompt(1))])["a"].cached == [96]
    two.close()


PREFIXES = [prompt(seed, 96) for seed in range(3)]


class AnyTier(RuleBasedStateMachine):
    """Two engines over one folder with little memory and little disk: whatever ends, crashes, aborts or is
    deleted or corrupted, each request gets the text that it has alone, and the books balance."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.engines = [self.open(), self.open()]
        self.outcomes: list[dict[str, Outcome]] = [{}, {}]
        self.requests: dict[str, Request] = {}
        self.ended: dict[str, Outcome] = {}

    def open(self) -> Engine:
        """An engine with memory for a few prompts."""
        return engine(self.folder, kv_pages=14)

    @rule(
        who=st.integers(0, 1),
        prefix=st.integers(0, 2),
        shared=st.integers(1, 96),
        tail=st.lists(st.integers(1, 39), max_size=20),
        tokens=st.sampled_from([1, 5, 20]),
    )
    def add(self, who: int, prefix: int, shared: int, tail: list[int], tokens: int) -> None:
        """A request that may have its beginning in common with others."""
        id = str(len(self.requests))
        one = request(id, [*PREFIXES[prefix][:shared], *tail], max_tokens=tokens)
        self.requests[id] = one
        self.engines[who].add(one)
        self.outcomes[who][id] = Outcome()

    @rule(who=st.integers(0, 1), steps=st.integers(1, 30))
    def step(self, who: int, steps: int) -> None:
        """Some steps."""
        for _ in range(steps):
            for chunk in self.engines[who].step():
                self.outcomes[who][chunk.id].hear(chunk)
                if chunk.finish is not None:
                    self.ended[chunk.id] = self.outcomes[who].pop(chunk.id)
            self.engines[who].check_integrity()

    @rule(who=st.integers(0, 1))
    def finish(self, who: int) -> None:
        """Steps until nothing is left to do."""
        for _ in range(5000):
            if not self.engines[who].has_work:
                break
            self.step(who, 1)
        assert not self.outcomes[who]
        load = self.engines[who].load()
        assert load.pages_free == load.pages_total

    @rule(who=st.integers(0, 1))
    def abort(self, who: int) -> None:
        """The oldest request is given up."""
        for id in list(self.outcomes[who])[:1]:
            self.engines[who].abort(id)

    @rule(who=st.integers(0, 1), orderly=st.booleans())
    def restart(self, who: int, orderly: bool) -> None:
        """An engine ends, and its requests with it; another takes its place."""
        self.outcomes[who].clear()
        if orderly:
            self.engines[who].close()
        else:
            crash(self.engines[who])
        self.engines[who] = self.open()

    @rule(part=st.floats(0, 1, exclude_max=True), which=st.floats(0, 1, exclude_max=True), gone=st.booleans())
    def damage(self, part: float, which: float, gone: bool) -> None:
        """A file is deleted, or a byte of it changes."""
        files = [path for path in sorted(self.folder.glob("*/*.kv")) if path.stat().st_size]
        if files:
            path = files[int(which * len(files))]
            if gone:
                path.unlink()
                return
            with path.open("r+b") as file:
                file.seek(int(part * path.stat().st_size))
                file.write(b"\x5a")

    def teardown(self) -> None:
        """All that ended has its own text."""
        for who in (0, 1):
            self.finish(who)
            self.engines[who].close()
        for id, outcome in self.ended.items():
            law = alone(self.requests[id])
            assert outcome.error is None
            if outcome.finish == "abort":
                assert outcome.tokens == law.tokens[: len(outcome.tokens)]
            else:
                assert (outcome.tokens, outcome.finish) == (law.tokens, law.finish)
        shutil.rmtree(self.folder)


TestAnyTier = AnyTier.TestCase
TestAnyTier.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_router_is_told_of_pages_that_come_from_disk(tmp_path: Path) -> None:
    """Promise: pages that are read are told like pages that are computed, and so is their eviction, while
    they are written and read: at every step what was told is what is there."""
    first = engine(tmp_path)
    asked = [request(str(seed), prompt(seed)) for seed in range(6)]
    run(first, asked)
    first.close()
    second = Engine(
        FakeProgram(kv_pages=16),
        EngineConfig(max_batch_tokens=48, max_running=4),
        disk=DiskTier(tmp_path, "identity", PAGE, SIZE),
        routed=True,
    )
    tier_of(second).pace.row_s = 1.0
    known: set[int] = set()
    removed = 0
    for one in asked:
        second.add(one)
        while second.has_work:
            second.step()
            batch = second.kv_events()
            for event in () if batch is None else batch.events:
                if isinstance(event, PagesStored):
                    known.update(event.names)
                elif isinstance(event, PagesRemoved):
                    known.difference_update(event.names)
                    removed += len(event.names)
            assert known == set(second.kv_snapshot().names)
            second.check_integrity()
        assert known.issuperset(page_names(one.prompt, 16, ""))
    assert counts(second).restored_pages >= 6 * 5
    assert removed
    second.close()
