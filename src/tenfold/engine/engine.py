"""The step loop: requests in, chunks of tokens out."""

from __future__ import annotations

import logging
import secrets
from typing import TypedDict

from tenfold.backends.base import Program, StepOutput
from tenfold.engine.batch import BatchBuilder
from tenfold.engine.limits import EngineConfig, check_request
from tenfold.engine.scheduler import Scheduler
from tenfold.engine.sequence import Sequence
from tenfold.kv.cache import KVCache, pages_for
from tenfold.kv.pages import IntegrityError
from tenfold.limits import RequestError
from tenfold.protocol import Chunk, FinishReason, LoadSnapshot, Request, TokenLogprob

log = logging.getLogger(__name__)

NOTHING_TO_DRAW = (
    "no token can be drawn: the model's logits are not numbers, or logit_bias forbids every token"
)


class AdmissionNews(TypedDict, total=False):
    """Fields of a Chunk."""

    cached_tokens: int
    queue_ms: float


class Engine:
    """Serves requests with one program. It starts no thread, and one thread calls all its methods.

    Every request that `add` accepts ends in exactly one chunk with a finish reason, out of a later `step`.
    What its tokens are depends on the program, the request and its seed alone.
    """

    def __init__(self, program: Program, config: EngineConfig | None = None) -> None:
        config = EngineConfig() if config is None else config
        info = program.info
        max_rows = min(config.max_batch_tokens, info.max_rows)
        max_running = min(config.max_running, info.max_logit_rows, max_rows)
        self._program = program
        self._cache = KVCache(program)
        self._scheduler = Scheduler(self._cache, max_rows, max_running)
        self._batch = BatchBuilder(max_rows, max_running)
        self._sequences: dict[str, Sequence] = {}
        # Chunks of requests that ended between two steps.
        self._ended: list[Chunk] = []
        self._steps = self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError, and takes nothing on, for one that cannot be served."""
        if request.id in self._sequences:
            raise RequestError("id", f"{request.id!r} is that of a request under way; use another")
        check_request(request, self._program.info)
        seed = secrets.randbits(64) if request.params.seed is None else request.params.seed % 2**64
        sequence = Sequence(request, seed, self._program.info.max_context)
        self._prompt_tokens += sequence.prompt_length
        if request.output and (finish := sequence.finish()) is not None:
            # A resumed request that had all its tokens, and only its end was not heard.
            stop_token = request.output[-1] if finish == "stop" else None
            self._ended.append(Chunk(id=request.id, finish=finish, stop_token=stop_token))
            return
        self._sequences[request.id] = sequence
        self._scheduler.waiting.append(sequence)

    def abort(self, id: str) -> bool:
        """Ends a request in any phase; its last chunk comes with the next step. False if it is unknown."""
        sequence = self._sequences.get(id)
        if sequence is None:
            return False
        self._ended.append(self._end(sequence, "abort"))
        return True

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return bool(self._sequences or self._ended)

    def step(self) -> list[Chunk]:
        """Makes one step, and returns what is new. If the program fails, the requests of that step end with
        its error, and the others go on."""
        plan = self._scheduler.plan()
        chunks, self._ended = self._ended, []
        for sequence, why in plan.failed:
            chunks.append(self._end(sequence, "error", why))
        if not plan.work:
            return chunks
        try:
            output = self._program.step(self._batch.build(plan.work))
        except Exception as error:
            log.exception("a step of %d sequences failed", len(plan.work))
            why = f"the step failed: {type(error).__name__}: {error}"
            return chunks + [self._end(sequence, "error", why) for sequence, _ in plan.work]
        self._steps += 1
        tokens = output.tokens.tolist()
        n = 0
        for sequence, rows in plan.work:
            sequence.computed += rows
            if sequence.table is not None:
                self._cache.commit(sequence.table, sequence.tokens, sequence.computed)
            if sequence.pending == 0:
                chunks.append(
                    self._take_token(sequence, tokens[n], output, n)
                    if tokens[n] >= 0
                    else self._end(sequence, "error", NOTHING_TO_DRAW)
                )
                n += 1
        return chunks

    def load(self) -> LoadSnapshot:
        """How loaded the engine is."""
        return LoadSnapshot(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            pages_total=self._cache.pool.total,
            pages_free=self._cache.pool.available,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._scheduler.preemptions,
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError unless pages, index, tables and queues agree. For tests and idle moments."""
        running, waiting = self._scheduler.running, self._scheduler.waiting
        self._cache.check([sequence.table for sequence in running if sequence.table is not None])
        if [*running, *waiting] != list(self._sequences.values()):
            raise IntegrityError(
                "the sequences that run, then wait, are not those under way in order of arrival"
            )
        for sequence in running:
            if sequence.table is None or sequence.table.size < pages_for(sequence.computed):
                raise IntegrityError(f"request {sequence.id!r} has no pages for its {sequence.computed} rows")
            if sequence.pending < 1:
                raise IntegrityError(f"request {sequence.id!r} runs with nothing to compute")
        for sequence in waiting:
            if sequence.table is not None or sequence.computed:
                raise IntegrityError(f"request {sequence.id!r} waits with pages")

    def _take_token(self, sequence: Sequence, token: int, output: StepOutput, n: int) -> Chunk:
        """The chunk for the token drawn as the step's ``n``-th; if it is the last, the sequence leaves."""
        sequence.append(token)
        self._generated_tokens += 1
        finish = sequence.finish()
        if finish is not None:
            self._leave(sequence)
        return Chunk(
            id=sequence.id,
            tokens=(token,),
            logprobs=None
            if sequence.params.logprobs is None
            else (_logprob(output, n, sequence.params.logprobs),),
            finish=finish,
            stop_token=token if finish == "stop" else None,
            **self._admission_news(sequence),
        )

    def _end(self, sequence: Sequence, finish: FinishReason, error: str | None = None) -> Chunk:
        """The last chunk of a sequence that ends without a token; it leaves."""
        self._leave(sequence)
        return Chunk(id=sequence.id, finish=finish, error=error, **self._admission_news(sequence))

    def _leave(self, sequence: Sequence) -> None:
        del self._sequences[sequence.id]
        self._scheduler.drop(sequence)

    def _admission_news(self, sequence: Sequence) -> AdmissionNews:
        """What the first chunk after the sequence's admission tells of it."""
        cached, sequence.cached_tokens_news = sequence.cached_tokens_news, None
        if cached is None:
            return {}
        self._cached_tokens += cached
        return {"cached_tokens": cached, "queue_ms": sequence.queue_ms}


def _logprob(output: StepOutput, n: int, top: int) -> TokenLogprob:
    best = zip(output.top_tokens[n, :top].tolist(), output.top_logprobs[n, :top].tolist(), strict=True)
    return TokenLogprob(float(output.logprobs[n]), tuple(best))
