"""`tenfold replay`: recorded requests computed again, with speculation and without, side by side.

Two engines of one model take turns over the same requests, so both see the same minutes of the machine. Each
side computes every request once: a second time the speculator would know the answer by heart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from tenfold.bench.recording import Recorder, Tally
from tenfold.server.text import Text
from tenfold.speculate.base import DrafterReport, SpeculationReport
from tenfold.traffic.reading import TrafficRequest
from tenfold.traffic.repetition import repetitive
from tenfold.traffic.running import Done, Job, job_of, run_jobs
from tenfold.worker.loop import EngineLike

REQUESTS_A_STREAM = 4
"""Requests of a turn for each of several streams. One stream takes turns request by request."""


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """One side's time for a request."""

    ttft_s: float
    decode_s: float
    """From its first tokens to its last."""
    cached_tokens: int


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """A request after both sides have computed it."""

    line: int
    kind: str
    conversation: str
    prompt_tokens: int
    tokens: int
    decode_tokens: int
    """Those after the first: what the decode times are of."""
    repetitive: bool
    same: bool
    """Whether both sides gave the same tokens and ended for the same reason."""
    plain: Timed
    speculative: Timed
    tally: Tally


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """Some requests of one class, computed by both sides one after the other."""

    kind: str
    group: str
    """Turns of one group are alike: the conversation, where a turn is of one."""
    tokens: int
    plain_s: float
    speculative_s: float
    """Wall time of the whole turn, prompts included."""
    drafters: tuple[DrafterReport, ...]
    idle: dict[str, int]


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found."""

    streams: int
    turns: tuple[Turn, ...]
    requests: tuple[Replayed, ...]


class Side:
    """An engine that takes turns, and the recorder of its speculator if it has one."""

    def __init__(
        self, engine: EngineLike, text: Text, streams: int, recorder: Recorder | None = None
    ) -> None:
        self.recorder = recorder
        self._engine = engine
        self._text = text
        self._streams = streams

    def faults(self) -> int:
        """Calls of the speculator that failed, so that nothing was drafted."""
        counts = self._engine.load().speculation
        return 0 if counts is None else counts.faults

    def run(self, jobs: Sequence[Job]) -> tuple[float, dict[str, Done]]:
        """Seconds for all, and what became of each by its id. Raises EngineFault."""
        done = {one.job.id: one for one in run_jobs(self._engine, self._text, jobs, self._streams)}
        seconds = max(one.ended for one in done.values()) - min(one.began for one in done.values())
        return seconds, done


def turns_of(requests: Sequence[TrafficRequest], streams: int) -> list[list[TrafficRequest]]:
    """The requests in turns of one class, each class in its order of time, turns in the order of their first
    requests."""
    size = 1 if streams == 1 else REQUESTS_A_STREAM * streams
    open_: dict[str, list[TrafficRequest]] = {}
    turns: list[list[TrafficRequest]] = []
    for request in requests:
        turn = open_.get(request.kind)
        if turn is None or len(turn) == size:
            turn = open_[request.kind] = []
            turns.append(turn)
        turn.append(request)
    return turns


def replay(
    plain: Side,
    speculative: Side,
    requests: Sequence[TrafficRequest],
    streams: int,
    progress: Callable[[int, int], None] = lambda requests, tokens: None,
) -> ReplayResult:
    """Runs all requests on both sides, which alternate in who begins a turn.

    ``progress`` hears how many requests are done, and how many tokens both sides have generated. Raises
    ValueError where there are no requests, EngineFault.
    """
    if not requests:
        raise ValueError("there are no requests to replay")
    recorder = speculative.recorder
    assert recorder is not None, "the speculative side has a speculator"
    turns: list[Turn] = []
    replayed: list[Replayed] = []
    generated = 0
    before = recorder.report()
    for number, turn in enumerate(turns_of(requests, streams)):
        jobs = [job_of(one) for one in turn]
        order = (plain, speculative) if number % 2 == 0 else (speculative, plain)
        found = {side: side.run(jobs) for side in order}
        (plain_s, first), (speculative_s, second) = found[plain], found[speculative]
        after = recorder.report()
        for request, job in zip(turn, jobs, strict=True):
            replayed.append(_replayed(request, first[job.id], second[job.id], recorder.take(job.id)))
        tokens = sum(len(one.tokens) for one in first.values())
        generated += tokens + sum(len(one.tokens) for one in second.values())
        turns.append(
            Turn(
                kind=turn[0].kind,
                group=turn[0].conversation if len(turn) == 1 else f"turn {number}",
                tokens=tokens,
                plain_s=plain_s,
                speculative_s=speculative_s,
                drafters=_since(before, after),
                idle={why: count - before.idle.get(why, 0) for why, count in after.idle.items()},
            )
        )
        before = after
        progress(len(replayed), generated)
    return ReplayResult(streams=streams, turns=tuple(turns), requests=tuple(replayed))


def _replayed(request: TrafficRequest, first: Done, second: Done, tally: Tally) -> Replayed:
    return Replayed(
        line=request.line,
        kind=request.kind,
        conversation=request.conversation,
        prompt_tokens=len(request.prompt),
        tokens=len(first.tokens),
        decode_tokens=len(first.tokens) - first.first_count,
        repetitive=repetitive(first.tokens),
        same=(first.tokens, first.finish) == (second.tokens, second.finish),
        plain=_timed(first),
        speculative=_timed(second),
        tally=tally,
    )


def _timed(done: Done) -> Timed:
    return Timed(
        ttft_s=done.first - done.began, decode_s=done.ended - done.first, cached_tokens=done.cached_tokens
    )


def _since(before: SpeculationReport, after: SpeculationReport) -> tuple[DrafterReport, ...]:
    """What each drafter did between two reports."""
    earlier = {drafter.name: drafter for drafter in before.drafters}
    return tuple(
        DrafterReport(
            drafter.name,
            drafter.drafts - earlier[drafter.name].drafts,
            drafter.drafted_tokens - earlier[drafter.name].drafted_tokens,
            drafter.accepted_tokens - earlier[drafter.name].accepted_tokens,
            drafter.asks - earlier[drafter.name].asks,
            drafter.asking_ms - earlier[drafter.name].asking_ms,
        )
        if drafter.name in earlier
        else drafter
        for drafter in after.drafters
    )
