"""Replaying traffic with speculation and without, over the fake engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tenfold.bench.recording import Recorder, Tally
from tenfold.bench.replay import Replayed, ReplayResult, Side, Timed, Turn, replay, turns_of
from tenfold.bench.replay_report import report, summarize
from tenfold.protocol import Chunk, EngineSettings, Request
from tenfold.speculate.base import DrafterReport, DraftSequence, Outcome, SpeculationReport
from tenfold.traffic.running import EngineFault
from tests.helpers.fake_engine import REFUSED, FakeConfig, FakeEngine
from tests.helpers.fake_text import load_fake_text
from tests.helpers.traffic import traffic_request

TEXT = load_fake_text("")


class Guesses:
    """A speculator that counts as if its drafts of three stood as far as they are used."""

    wants_features = False

    def __init__(self) -> None:
        self.drafts = self.accepted = 0

    def begin(self, sequence: DraftSequence) -> None: ...

    def end(self, sequence: DraftSequence, learn: bool) -> None: ...

    def close(self) -> None: ...

    def propose(
        self, sequences: Sequence[DraftSequence], rows: int, limits: Sequence[int]
    ) -> list[Sequence[int]]:
        return [(1, 2, 3) for _ in sequences]

    def observe(self, outcomes: Sequence[Outcome], rows: int, step_ms: float) -> None:
        self.drafts += len(outcomes)
        self.accepted += sum(outcome.accepted for outcome in outcomes)

    def report(self) -> SpeculationReport:
        drafter = DrafterReport("suffix", self.drafts, 3 * self.drafts, self.accepted)
        return SpeculationReport(0, 0, (drafter,), {"no draft": self.drafts // 2})


class Speculating(FakeEngine):
    """After a request's first token each step gives two more: a draft of three, the first of which stood. Of
    requests in ``wrong`` a token is another one."""

    def __init__(self, recorder: Recorder, wrong: frozenset[str] = frozenset()) -> None:
        super().__init__(EngineSettings(model="", max_running=8), FakeConfig())
        self.recorder = recorder
        self.wrong = wrong
        self.begun: set[str] = set()

    def step(self) -> list[Chunk]:
        chunks = super().step()
        for i, chunk in enumerate(chunks):
            if chunk.id in self.begun and chunk.finish is None:
                (more,) = [self._advance(*self._running[chunk.id])]
                chunks[i] = chunk = Chunk(id=chunk.id, tokens=chunk.tokens + more.tokens, finish=more.finish)
            if chunk.id in self.begun:
                outcome = Outcome(SimpleNamespace(id=chunk.id), 3, len(chunk.tokens) - 1, chunk.tokens)
                self.recorder.observe([outcome], 4, 1.0)
            self.begun.add(chunk.id)
            if chunk.id in self.wrong:
                chunks[i] = Chunk(id=chunk.id, tokens=(7,) * len(chunk.tokens), finish=chunk.finish)
            if chunk.finish is not None:
                self.begun.remove(chunk.id)
        return chunks


def sides(streams: int, wrong: frozenset[str] = frozenset()) -> tuple[Side, Side]:
    recorder = Recorder(Guesses())
    plain = FakeEngine(EngineSettings(model="", max_running=8), FakeConfig())
    return Side(plain, TEXT, streams), Side(Speculating(recorder, wrong), TEXT, streams, recorder)


@pytest.mark.parametrize("streams", [1, 2])
def test_both_sides_answer_every_request_once(streams: int) -> None:
    """And what the speculator did is told for each request and each turn."""
    requests = [traffic_request(i, kind="ab"[i % 2], ignore_eos=True) for i in range(10)]
    found = replay(*sides(streams), requests, streams)
    assert sorted(one.line for one in found.requests) == list(range(10))
    for one in found.requests:
        # 1 token, then 2 + 2 + 2 + 1.
        assert (one.tokens, one.decode_tokens, one.same) == (8, 7, True)
        assert one.tally == Tally(steps=4, committed=7, judged=[4, 3], stood=[3, 0])
        assert one.plain.cached_tokens == one.speculative.cached_tokens == 0
        assert one.plain.decode_s > 0 and one.speculative.decode_s > 0
    assert sum(turn.tokens for turn in found.turns) == 80
    assert sum(drafter.drafts for turn in found.turns for drafter in turn.drafters) == 40
    assert sum(turn.idle["no draft"] for turn in found.turns) == 20
    assert {turn.group for turn in found.turns} >= ({"talk 3"} if streams == 1 else {"turn 0", "turn 1"})


def test_an_answer_that_differs_is_told() -> None:
    """The one thing that must never be averaged away."""
    requests = [traffic_request(i, ignore_eos=True) for i in range(6)]
    found = replay(*sides(1, frozenset({"4"})), requests, 1)
    assert [one.line for one in found.requests if not one.same] == [4]
    told = report(found, model="m", version="1", threads=1, isa="none")
    assert told.overall.all.differ == 1
    assert "1 of 6 answers differ" in told.text()


def test_sides_alternate_in_who_begins() -> None:
    """So that neither always has the machine as the other left it."""
    order: list[str] = []

    class Noting(FakeEngine):
        def __init__(self, name: str) -> None:
            super().__init__(EngineSettings(model=""), FakeConfig())
            self.name = name

        def add(self, request: Request) -> None:
            order.append(self.name)
            super().add(request)

    engines = [Noting(name) for name in "ab"]
    recorder = Recorder(Guesses())
    replay(
        Side(engines[0], TEXT, 1),
        Side(engines[1], TEXT, 1, recorder),
        [traffic_request(i) for i in range(4)],
        1,
    )
    assert "".join(order) == "abbaabba"


def test_turns_are_of_one_class_and_in_order() -> None:
    """A turn's time must be its class's own."""
    requests = [traffic_request(i, kind="aab"[i % 3]) for i in range(60)]
    for streams, size in ((1, 1), (3, 12)):
        turns = turns_of(requests, streams)
        assert sorted(one.line for turn in turns for one in turn) == list(range(60))
        for turn in turns:
            assert len({one.kind for one in turn}) == 1 and len(turn) <= size
            assert [one.line for one in turn] == sorted(one.line for one in turn)
        assert [turn[0].line for turn in turns] == sorted(turn[0].line for turn in turns)


def test_a_request_that_cannot_be_served_ends_the_replay() -> None:
    """With its line."""
    with pytest.raises(EngineFault, match="line 3 of the traffic"):
        replay(*sides(1), [traffic_request(3, prompt=(REFUSED,))], 1)
    with pytest.raises(ValueError, match="no requests"):
        replay(*sides(1), [], 1)


@pytest.mark.parametrize(
    ("drafted", "accepted", "drawn", "judged", "stood"),
    [
        (0, 0, 1, [], []),
        (3, 0, 1, [1], [0]),
        (3, 2, 3, [1, 1, 1], [1, 1, 0]),
        (3, 3, 4, [1, 1, 1], [1, 1, 1]),
        (3, 2, 2, [1, 1], [1, 1]),  # it ended on the second: the third was not judged
    ],
)
def test_only_tokens_that_were_judged_count(
    drafted: int, accepted: int, drawn: int, judged: list[int], stood: list[int]
) -> None:
    """A position counts when all before it stood and the target drew there."""
    tally = Tally()
    tally.add(Outcome(None, drafted, accepted, range(drawn)))  # type: ignore[arg-type]
    assert (tally.steps, tally.committed, tally.judged, tally.stood) == (1, drawn, judged, stood)
    both = Tally()
    both.merge(tally)
    both.merge(tally)
    assert both.judged == [2 * count for count in judged] and both.committed == 2 * drawn


def replayed(number: int, kind: str = "a", repetitive: bool = False, speed: float = 2.0) -> Replayed:
    """30 tokens, at 100 tokens a second without speculation."""
    return Replayed(
        line=number,
        kind=kind,
        conversation=f"talk {number // 2}",
        prompt_tokens=50,
        tokens=31,
        decode_tokens=30,
        repetitive=repetitive,
        same=True,
        plain=Timed(ttft_s=0.2, decode_s=0.3, cached_tokens=16),
        speculative=Timed(ttft_s=0.2, decode_s=0.3 / speed, cached_tokens=16),
        tally=Tally(steps=15, committed=30, judged=[10, 5], stood=[5, 1]),
    )


def result(requests: Sequence[Replayed]) -> ReplayResult:
    turns = [
        Turn(
            kind=one.kind,
            group=one.conversation,
            tokens=31,
            plain_s=0.5,
            speculative_s=0.2 + one.speculative.decode_s,
            drafters=(DrafterReport("suffix", 10, 30, 10), DrafterReport("head", 5, 10, 5)),
            idle={"load": 1, "no draft": 0},
        )
        for one in requests
    ]
    return ReplayResult(streams=1, turns=tuple(turns), requests=tuple(requests))


def test_speeds_acceptance_and_interval_are_those_of_the_requests() -> None:
    """Known times give known figures; an interval needs five conversations."""
    found = summarize([replayed(i, speed=2 + i % 2) for i in range(12)])
    assert found.plain_tokens_per_s == pytest.approx(100)
    assert found.speculative_tokens_per_s == pytest.approx(2 * 30 / (0.15 + 0.1))
    assert found.speedup is not None and found.speedup.ratio == pytest.approx(2.4)
    assert found.speedup.low == pytest.approx(2.4), "each conversation has one request of each speed"
    assert found.acceptance_length == 2
    assert found.acceptance == (0.5, 0.2)
    assert found.judged == (120, 60)
    few = summarize([replayed(i) for i in range(8)])
    assert few.speedup is not None and few.speedup.low is None
    none = summarize([])
    assert (none.requests, none.speedup, none.acceptance_length) == (0, None, None)


def test_repetitive_answers_are_apart_in_every_figure() -> None:
    """They may be as fast as they like: the main table does not know of it."""
    requests = [replayed(i, repetitive=i % 4 == 0, speed=9 if i % 4 == 0 else 2) for i in range(40)]
    told = report(result(requests), model="m", version="1", threads=2, isa="avx2")
    assert told.overall.varied.requests == 30 and told.overall.repetitive.requests == 10
    assert told.overall.varied.speedup is not None
    assert told.overall.varied.speedup.ratio == pytest.approx(2)
    assert told.overall.repetitive.speedup is not None
    assert told.overall.repetitive.speedup.ratio == pytest.approx(9)


def test_the_report_says_all_to_people_and_to_machines() -> None:
    """Per class and overall, with forecast, drafters, cache and idle steps."""
    requests = [replayed(i, kind="ab"[i // 20], repetitive=i == 3) for i in range(40)]
    told = report(
        result(requests),
        model="m",
        version="1",
        threads=2,
        isa="avx2",
        left_out=3,
        faults=2,
        forecast={"a": 1.9, "overall": 1.8},
    )
    text = told.text()
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| a ")]
    assert [cell.strip() for cell in rows[0][2:8]] == [
        "19",
        "100.0",
        "200.0",
        "2.00 (2.00 to 2.00)",
        "1.90",
        "2.00",
    ]
    for words in (
        "All 40 answers are the same",
        "640 of 2000, both ways",
        "suffix 75% (33% stood), head 25% (50% stood)",
        "load 40.",
        "3 requests were left out",
        "failed 2 times",
        "go in circles",
        "overall",
    ):
        assert words in text
    assert "no draft 0" not in text
    data: Any = json.loads(json.dumps(told.to_json()))
    assert data["classes"]["b"]["varied"]["speedup"]["ratio"] == pytest.approx(2)
    assert data["classes"]["b"]["forecast"] is None
    assert len(data["requests"]) == 40 and len(data["turns"]) == 40


def test_a_cache_that_speculation_changed_is_told() -> None:
    """It must not, so both numbers are shown."""
    one = replayed(1)
    changed = msgspec.structs.replace(one, speculative=Timed(ttft_s=0.2, decode_s=0.1, cached_tokens=0))
    text = report(result([changed]), model="m", version="1", threads=2, isa="avx2").text()
    assert "16 of 50; with speculation 0." in text
