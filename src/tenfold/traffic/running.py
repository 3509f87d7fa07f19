"""Computing recorded requests in this process, many at once, as a server would."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from tenfold.protocol import Request, SamplingParams
from tenfold.server.answer import Answer
from tenfold.server.answer_stream import Sections
from tenfold.server.chat_setup import new_answer
from tenfold.server.text import Text
from tenfold.traffic.reading import TrafficRequest
from tenfold.worker.loop import EngineLike


class Job(NamedTuple):
    """A request to be computed."""

    id: str
    line: int
    """Of the traffic, for errors."""
    conversation: str
    prompt: tuple[int, ...]
    params: SamplingParams
    sections: Sections = Sections()
    """What the answer may have beside text."""


def job_of(request: TrafficRequest, id: str | None = None, params: SamplingParams | None = None) -> Job:
    """A recorded request as a job, known by its line and computed with its own parameters unless others are
    given."""
    return Job(
        str(request.line) if id is None else id,
        request.line,
        request.conversation,
        request.prompt,
        request.params if params is None else params,
        request.sections,
    )


class Done(NamedTuple):
    """What became of it. Times are of ``time.perf_counter``, in seconds."""

    job: Job
    tokens: tuple[int, ...]
    """With the one that ended it, if one did; none that came after a stop string."""
    finish: Literal["stop", "length"]
    cached_tokens: int
    began: float
    first: float
    """When the first tokens came, ..."""
    first_count: int
    """... and how many those were."""
    ended: float


class _Under:
    """A job under way."""

    def __init__(self, job: Job, output: Answer | None) -> None:
        self.job = job
        self.output = output
        self.tokens: list[int] = []
        self.cached = 0
        self.began = time.perf_counter()
        self.first = 0.0
        self.first_count = 0


class EngineFault(ValueError):
    """The engine gave a request up."""


def run_jobs(engine: EngineLike, text: Text, jobs: Iterable[Job], streams: int) -> Iterator[Done]:
    """Runs the jobs, of ``streams`` conversations at a time, and hands each out as it ends.

    The requests of a conversation come one after another, as they did when they were recorded: so each finds
    the one before it in the prefix cache. Conversations begin in the order of their first jobs. Raises
    EngineFault or RequestError, naming the line; then, or when the caller stops early, what is under way is
    aborted.
    """
    waiting: dict[str, deque[Job]] = {}
    for job in jobs:
        waiting.setdefault(job.conversation, deque()).append(job)
    queue = deque(waiting.values())
    under: dict[str, _Under] = {}
    conversations: dict[str, deque[Job]] = {}
    eos = tuple(text.tokenizer.eos_token_ids)

    def begin(conversation: deque[Job]) -> None:
        job = conversation.popleft()
        try:
            engine.add(Request(id=job.id, prompt=job.prompt, params=job.params, eos_token_ids=eos))
        except ValueError as error:
            raise EngineFault(f"line {job.line} of the traffic: {error}") from error
        # The engine knows no text: only a stop string, or a call that is to be the last, makes it necessary.
        stop, sections = job.params.stop, job.sections
        looked_at = new_answer(text, stop, sections) if stop or sections.one_call else None
        under[job.id] = _Under(job, looked_at)
        conversations[job.id] = conversation

    try:
        while queue or under:
            while queue and len(under) < streams:
                begin(queue.popleft())
            for chunk in engine.step():
                one = under.get(chunk.id)
                if one is None:  # it had hit a stop string
                    continue
                if chunk.finish == "error":
                    raise EngineFault(f"line {one.job.line} of the traffic: {chunk.error}")
                if chunk.cached_tokens is not None:
                    one.cached = chunk.cached_tokens
                if chunk.tokens and not one.tokens:
                    one.first, one.first_count = time.perf_counter(), len(chunk.tokens)
                one.tokens += chunk.tokens
                if one.output is not None:
                    one.output.push([chunk])
                finish = chunk.finish if one.output is None else one.output.engine_finish
                if finish is None:
                    continue
                if one.output is not None:
                    if chunk.finish is None:
                        engine.abort(chunk.id, one.output.completion_tokens)
                    del one.tokens[one.output.completion_tokens :]
                del under[chunk.id]
                yield Done(
                    one.job,
                    tuple(one.tokens),
                    "stop" if finish == "stop" else "length",
                    one.cached,
                    one.began,
                    one.first,
                    min(one.first_count, len(one.tokens)),
                    time.perf_counter(),
                )
                if conversation := conversations.pop(chunk.id):
                    begin(conversation)
        while engine.has_work:  # the end of what was aborted
            engine.step()
    finally:
        for id in under:
            engine.abort(id)
