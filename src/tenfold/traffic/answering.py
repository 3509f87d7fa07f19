"""Having the target answer recorded traffic itself, and keeping what it saw while it did.

A drafter learns to guess the target's own next token, so it must learn from the target's own answers, however
good the recorded ones are. What earlier turns of a conversation said is kept as it was recorded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from tenfold.backends.base import Floats
from tenfold.config import OptionError
from tenfold.formats.matrix import Format, Layout
from tenfold.formats.rounding import quantize
from tenfold.protocol import SamplingParams
from tenfold.server.text import Text
from tenfold.speculate.base import DraftSequence, Outcome, SpeculationReport
from tenfold.traffic.reading import TrafficRequest, contents
from tenfold.traffic.running import EngineFault, Job, job_of, run_jobs
from tenfold.traffic.store import Answer, AnswerStore, Features
from tenfold.worker.loop import EngineLike

MODES = ("own", "greedy", "sampled")
"""How an answer is drawn: with the body's own parameters, or with another temperature, ..."""
SAMPLED_TEMPERATURE = 0.7
"""... 0 for ``greedy``, this for ``sampled``."""
MAX_ANSWER = 256
STREAMS = 16


class Capture:
    """A `speculate.base.Speculator` that drafts nothing and keeps the features of every sequence.

    The first token's are there when drafts are asked for, each further one's when its step is told of. Of an
    answer of a single token there are none.
    """

    wants_features = True

    def __init__(self, width: int) -> None:
        self._width = width
        self._rows: dict[str, list[Floats]] = {}

    def take(self, id: str, tokens: int) -> Features:
        """[rows, width] of the first tokens of a sequence that has ended, of at most ``tokens``; forgets
        it."""
        rows = self._rows.pop(id, [])[:tokens]
        if not rows:
            return np.zeros((0, self._width), np.uint16)
        return quantize(np.stack(rows), Layout(Format.BF16)).codes

    def begin(self, sequence: DraftSequence) -> None:
        """Nothing: a resumed sequence goes on with what it has."""

    def end(self, sequence: DraftSequence, learn: bool) -> None:
        """Nothing: `take` comes after it."""

    def propose(
        self, sequences: Sequence[DraftSequence], rows: int, limits: Sequence[int]
    ) -> list[Sequence[int]]:
        """No drafts."""
        for sequence in sequences:
            self._keep(sequence)
        return [() for _ in sequences]

    def observe(self, outcomes: Sequence[Outcome], rows: int, step_ms: float) -> None:
        """Keeps what is new."""
        for outcome in outcomes:
            self._keep(outcome.sequence)

    def report(self) -> SpeculationReport:
        """Nothing to report."""
        return SpeculationReport(steps=0, committed_tokens=0, drafters=(), idle={})

    def close(self) -> None:
        """Forgets what was not taken."""
        self._rows.clear()

    def _keep(self, sequence: DraftSequence) -> None:
        """The newest token's features, if they are the next in order: behind a gap nothing is of use."""
        rows = self._rows.setdefault(sequence.id, [])
        newest = len(sequence.tokens) - sequence.prompt_length - 1
        if sequence.features is not None and newest == len(rows):
            rows.append(sequence.features)


class Answered(NamedTuple):
    """A request and what the target said to it in one of the ways."""

    request: TrafficRequest
    mode: str
    answer: Answer


def parse_modes(options: Iterable[str]) -> dict[str | None, tuple[str, ...]]:
    """How to answer, by class (None: all other classes), from texts like ``greedy,sampled`` and
    ``agent=greedy``. Raises ValueError."""
    modes: dict[str | None, tuple[str, ...]] = {}
    for option in options:
        kind, equals, names = option.rpartition("=")
        chosen = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
        unknown = [name for name in chosen if name not in MODES]
        if unknown or (equals and not kind):
            raise OptionError(
                f"answers is {option!r}; write some of {', '.join(MODES)} with commas, and CLASS= before "
                "them if they are for one class, like greedy,sampled or agent=greedy",
                "answers",
            )
        if (kind or None) in modes:
            raise OptionError(f"answers for {kind or 'all classes'} is given twice", "answers")
        modes[kind or None] = chosen
    modes.setdefault(None, ("own",))
    return modes


def check_modes(modes: dict[str | None, tuple[str, ...]], requests: Iterable[TrafficRequest]) -> None:
    """Raises ValueError for a class that the traffic does not have."""
    kinds = {request.kind for request in requests}
    for kind in modes:
        if kind is not None and kind not in kinds:
            raise OptionError(
                f"answers is given for the class {kind!r}, which the traffic does not have; it has "
                f"{', '.join(sorted(kinds))}",
                "answers",
            )


def answer_params(params: SamplingParams, mode: str, max_answer: int) -> SamplingParams:
    """What a request is answered with: in its own way but for the mode's temperature and the length."""
    temperature = {"own": params.temperature, "greedy": 0.0, "sampled": SAMPLED_TEMPERATURE}[mode]
    return msgspec.structs.replace(
        params,
        temperature=temperature,
        # Without noise the seed says nothing, and equal requests have equal answers.
        seed=params.seed if temperature else 0,
        max_tokens=min(params.max_tokens or max_answer, max_answer),
        logprobs=None,
    )


def answer_traffic(
    engine: EngineLike,
    capture: Capture,
    text: Text,
    store: AnswerStore,
    requests: Sequence[TrafficRequest],
    modes: dict[str | None, tuple[str, ...]],
    *,
    max_answer: int = MAX_ANSWER,
    streams: int = STREAMS,
    progress: Callable[[int, int], None] = lambda answers, tokens: None,
) -> list[Answered]:
    """All answers, those that the store has not yet made now; ``capture`` is the engine's speculator.

    In the order of the requests, the modes of each in turn. ``progress`` hears how many answers there are
    and how many tokens were generated now. Raises EngineFault, OSError.
    """
    wanted = _wanted(requests, modes, max_answer)
    missing = {job.id: job for _, _, job in wanted if job.id not in store.answers}
    # Requests that are the same in all, and those of earlier sittings, are there already.
    there, generated = len(wanted) - len(missing), 0
    progress(there, generated)
    for done in run_jobs(engine, text, missing.values(), streams):
        features = capture.take(done.job.id, len(done.tokens))
        if not len(features) and len(done.tokens) > 1:
            raise EngineFault("the engine hands back no hidden states, so there is nothing to learn from")
        store.add(done.job.id, done.tokens, done.finish, features)
        there, generated = there + 1, generated + len(done.tokens)
        progress(there, generated)
    return [Answered(request, mode, store.answers[job.id]) for request, mode, job in wanted]


def count_answers(requests: Sequence[TrafficRequest], modes: dict[str | None, tuple[str, ...]]) -> int:
    """How many answers `answer_traffic` gives."""
    return sum(len(modes.get(request.kind, modes[None])) for request in requests)


def agreement(answered: Iterable[Answered], text: Text) -> tuple[int, int]:
    """How many recorded answers the target gave again, word for word as far as it went, and how many were
    recorded: if near none, another model answered then."""
    same = recorded = 0
    for request, _, answer in answered:
        if request.answer is None:
            continue
        recorded += 1
        ends = {*text.tokenizer.eos_token_ids, *request.params.stop_token_ids}
        stream = text.stream(request.params.stop)
        said = stream.push(token for token in answer.tokens if token not in ends) + stream.finish()
        whole = answer.finish == "stop"
        same += request.answer.strip() == said.strip() if whole else request.answer.startswith(said)
    return same, recorded


def _wanted(
    requests: Sequence[TrafficRequest], modes: dict[str | None, tuple[str, ...]], max_answer: int
) -> list[tuple[TrafficRequest, str, Job]]:
    wanted = []
    for request in requests:
        for mode in modes.get(request.kind, modes[None]):
            params = answer_params(request.params, mode, max_answer)
            wanted.append((request, mode, job_of(request, _key(request, params), params)))
    return wanted


def _key(request: TrafficRequest, params: SamplingParams) -> str:
    known_by = contents(request.prompt, params, request.sections)
    return hashlib.blake2b(known_by, digest_size=16).hexdigest()
