"""The step loop: requests in, chunks of tokens out."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable
from typing import Any, TypedDict, cast

import msgspec

from tenfold.backends.base import PageViews, Program, StepOutput
from tenfold.constraints.base import ConstraintError, Matchers
from tenfold.engine.batch import BatchBuilder
from tenfold.engine.handover import Handover
from tenfold.engine.limits import EngineConfig, check_request
from tenfold.engine.masks import Masks
from tenfold.engine.pooling import NOT_NUMBERS
from tenfold.engine.scheduler import FULL, Scheduler, Work
from tenfold.engine.sequence import Sequence
from tenfold.engine.speculation import Speculation
from tenfold.engine.step_times import StepTimes
from tenfold.engine.verify import Gain, commit
from tenfold.kv.cache import KVCache, pages_for
from tenfold.kv.disk import DiskTier
from tenfold.kv.imports import Imports, Transfer
from tenfold.kv.news import PageNews
from tenfold.kv.pages import IntegrityError
from tenfold.kv.tier import Tier
from tenfold.limits import RequestError
from tenfold.protocol import (
    FLUSH_S,
    Chunk,
    ConstraintCounts,
    Fetch,
    FinishReason,
    KVEvents,
    KVSnapshot,
    LoadSnapshot,
    Request,
    StepTime,
    TokenLogprob,
)
from tenfold.speculate.base import Outcome, Speculator

log = logging.getLogger(__name__)

SOURCE_WAIT_S = 0.002
"""A step with nothing to compute waits so long for pages from elsewhere."""
LAST_PAGES_S = 0.004
"""A step waits so long for the last pages of a request, when it has just come or all of them are there to be
read: a whole step more would hold its next token up for longer."""


class AdmissionNews(TypedDict, total=False):
    """Fields of a Chunk."""

    cached_tokens: int
    queue_ms: float


class Engine:
    """Serves requests with one program. It starts no thread, and one thread calls all its methods.

    Every request that `add` accepts ends in exactly one chunk with a finish reason, out of a later `step`.
    What its tokens are depends on the program, the request and its seed alone; the ``speculator`` and the
    ``disk`` only make them come sooner. With a disk the program must be a `tenfold.backends.base.PageViews`,
    and the disk tier has threads that read and write. ``routed``: what a router is to be told is kept, until
    it is taken; by ``news``, if they are given, whose they are from then on.
    """

    def __init__(
        self,
        program: Program,
        config: EngineConfig | None = None,
        speculator: Speculator | None = None,
        matchers: Matchers | None = None,
        *,
        disk: DiskTier | None = None,
        transfer: Transfer | None = None,
        routed: bool = False,
        news: PageNews | None = None,
    ) -> None:
        config = EngineConfig() if config is None else config
        info = program.info
        max_rows = min(config.max_batch_tokens, info.max_rows)
        max_logit_rows = min(info.max_logit_rows, max_rows)
        max_running = min(config.max_running, max_logit_rows)
        self._program = program
        self._news = PageNews() if routed and news is None else news
        self._times = StepTimes() if routed else None
        self._cache = KVCache(program, news=self._news)
        self._scheduler = Scheduler(self._cache, max_rows, max_logit_rows, max_running)
        self._batch = BatchBuilder(max_rows, max_logit_rows, max_running)
        self._matchers = matchers
        self._masks = Masks(max_logit_rows, info.vocab_size)
        self._speculation = None if speculator is None else Speculation(speculator, info.vocab_size)
        self._tier = None if disk is None else Tier(self._cache, cast(PageViews, program), disk)
        self._handover = None if transfer is None else Handover(transfer.exports, cast(PageViews, program))
        self._imports = (
            None
            if transfer is None
            else Imports(self._cache, cast(PageViews, program), transfer, info.page_bytes)
        )
        # A request takes another worker's pages first; the disk may have those that did not come.
        self._scheduler.gates = [gate for gate in (self._imports, self._tier) if gate is not None]
        self._sequences: dict[str, Sequence] = {}
        self._parked: dict[str, Sequence] = {}
        """Requests whose pages are being fetched: not in the queue, where they would hold up others."""
        self._fresh: list[str] = []
        """Of these, the ones that came since the last step."""
        self._ahead: dict[str, Request] = {}
        """Requests that were told of with a `Fetch`, and have not come themselves."""
        self._begun: set[str] = set()
        """Requests that went on before they came; whether they have ended or not."""
        # Chunks of requests that ended between two steps.
        self._ended: list[Chunk] = []
        self._steps = self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError, and takes nothing on, for one that cannot be served."""
        if request.id in self._begun:
            self._begun.discard(request.id)
            return
        self._ahead.pop(request.id, None)
        self._add(request)

    def _add(self, request: Request) -> None:
        if request.id in self._sequences or request.id in self._parked:
            raise RequestError("id", f"{request.id!r} is that of a request under way; use another")
        check_request(request, self._program.info)
        seed = secrets.randbits(64) if request.params.seed is None else request.params.seed % 2**64
        sequence = self._sequence(request, seed)
        self._prompt_tokens += sequence.prompt_length
        if request.output and (finish := sequence.finish()) is not None:
            # A resumed request that had all its tokens, and only its end was not heard.
            stop_token = request.output[-1] if finish == "stop" else None
            self._ended.append(Chunk(id=request.id, finish=finish, stop_token=stop_token))
            return
        if request.prefill_only and sequence.stop_after_one() and self._handover is not None:
            self._handover.expect(sequence)
        if request.handoff is not None and self._imports is not None:
            self._imports.expect(request.id, request.handoff)
        if self._imports is not None and self._imports.coming(request.id):
            self._parked[request.id] = sequence
            self._fresh.append(request.id)
        else:
            self._queue(sequence)

    def fetch(self, fetch: Fetch) -> None:
        """See `tenfold.protocol.Fetch`. Without transfer nothing is done: the prompt is computed."""
        if self._imports is not None:
            self._ahead[fetch.request.id] = fetch.request
            self._imports.fetch(fetch.request, len(self._scheduler.running))

    def abort(self, id: str, keep: int | None = None) -> bool:
        """Ends a request in any phase; its last chunk comes with the next step. False if it is unknown.
        ``keep``: see `tenfold.protocol.Abort`."""
        self._ahead.pop(id, None)
        self._begun.discard(id)
        if self._imports is not None:
            self._imports.abandon(id)
        if (parked := self._parked.pop(id, None)) is not None:
            self._queue(parked)
        sequence = self._sequences.get(id)
        if sequence is None:
            return False
        self._ended.append(self._end(sequence, "abort", keep=keep))
        return True

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to tell."""
        busy = any(source is not None and source.busy for source in (self._imports, self._tier))
        return bool(self._sequences or self._parked or self._ended or busy)

    def step(self) -> list[Chunk]:
        """Makes one step, and returns what is new. If the program fails, the requests of that step end with
        its error, and the others go on."""
        speculation, tier, handover = self._speculation, self._tier, self._handover
        if self._imports is not None:
            self._await_last_pages(self._imports)
            if self._imports.tick(len(self._scheduler.running)):
                self._scheduler.unblock()
            self._go_ahead(self._imports)
        if tier is not None and tier.tick():
            self._scheduler.unblock()
        self._unpark()
        plan = self._scheduler.plan(None if speculation is None else speculation.guess)
        chunks, self._ended = self._ended, []
        for sequence, why in plan.failed:
            chunks.append(
                msgspec.structs.replace(self._end(sequence, "error", why), beyond_memory=why == FULL)
            )
        if unmasked := dict(self._masks.fill(plan.work)):
            for sequence, why in unmasked.items():
                constraint = sequence.params.constraint
                assert constraint is not None
                chunks.append(self._end(sequence, "error", why, error_field=constraint.field))
            asked = [work for work in plan.work[: plan.asked] if work.sequence not in unmasked]
            rest = [work for work in plan.work[plan.asked :] if work.sequence not in unmasked]
            plan = plan._replace(work=asked + rest, asked=len(asked))
        if not plan.work:
            for source in (self._imports, tier):
                if source is not None and source.busy and not chunks:
                    source.wait(SOURCE_WAIT_S)
                    break
            return chunks
        if handover is not None:
            handover.sweep()
            chunks += handover.begin(plan.work)
        try:
            wants_features = speculation is not None and speculation.wants_features
            batch = self._batch.build(plan.work, self._masks, wants_features)
            rows, began = len(batch.tokens), time.perf_counter()
            output = self._program.step(batch)
        except Exception as error:
            log.exception("a step of %d sequences failed", len(plan.work))
            why = f"the step failed: {type(error).__name__}: {error}"
            return chunks + [self._end(work.sequence, "error", why) for work in plan.work]
        step_ms = (time.perf_counter() - began) * 1000
        self._steps += 1
        if tier is not None:
            tier.pace.stepped(rows, step_ms / 1000)
        shape = None if self._times is None else self._times.shape(plan.work)
        self._pool(plan.work, output)
        gains = self._commit(plan.work, output)
        if self._times is not None and shape is not None:
            self._times.add(shape, gains, step_ms / 1000)
        if handover is not None:
            handover.advance(plan.work)
        if speculation is not None and plan.asked:
            outcomes = [
                Outcome(
                    gain.sequence,
                    gain.drafted,
                    gain.accepted,
                    gain.tokens,
                    None
                    if output.features is None
                    else output.features[gain.first : gain.first + len(gain.tokens)],
                )
                for gain in gains[: plan.asked]
            ]
            speculation.observe(outcomes, rows, step_ms)
        for gain in gains:
            handoff = None
            if gain.finish is not None:
                handoff = self._leave(gain.sequence, gain.finish)
            chunks.append(self._chunk(gain, output, handoff))
        chunks += [
            self._embedded(one.sequence)
            for one in plan.work
            if one.sequence.pool is not None and one.sequence.pending == 0
        ]
        return chunks

    def load(self) -> LoadSnapshot:
        """How loaded the engine is."""
        return LoadSnapshot(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting) + len(self._parked),
            pages_total=self._cache.pool.total,
            pages_free=self._cache.pool.available,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._scheduler.preemptions,
            speculation=None if self._speculation is None else self._speculation.counts(),
            constraints=ConstraintCounts(
                compiled=0 if self._matchers is None else self._matchers.compiled,
                compile_ms=0.0 if self._matchers is None else self._matchers.compile_ms,
                masks=self._masks.filled,
                mask_ms=self._masks.fill_ms,
                failures=self._masks.failures,
            ),
            kv_sequence=0 if self._news is None else self._news.sequence,
            tier=None if self._tier is None else self._tier.counts(),
            transfer=None if self._imports is None else self._imports.counts(),
        )

    def kv_events(self) -> KVEvents | None:
        """What became of pages since the last call; None: nothing, or the engine is not ``routed``."""
        return None if self._news is None else self._news.take()

    def kv_snapshot(self) -> KVSnapshot:
        """All pages that are there; none unless the engine is ``routed``. To be called after `kv_events`."""
        return KVSnapshot(sequence=0, names=()) if self._news is None else self._news.snapshot()

    def step_times(self) -> tuple[StepTime, ...]:
        """Of some of the steps since the last call; none unless the engine is ``routed``."""
        return () if self._times is None else self._times.take()

    def close(self) -> None:
        """Frees the program and what the speculator holds; nothing may be called afterwards. Pages that are
        not on disk yet are written before, for up to `tenfold.protocol.FLUSH_S`."""
        if self._handover is not None:
            self._handover.close()
        if self._imports is not None:
            self._imports.close()
        if self._tier is not None:
            self._tier.close(FLUSH_S)
        if self._speculation is not None:
            self._speculation.close()
        if self._news is not None:
            self._news.close()
        self._program.close()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless pages, index, tables and queues agree. For tests and idle moments."""
        running, waiting = self._scheduler.running, self._scheduler.waiting
        tables = [sequence.table for sequence in running if sequence.table is not None]
        for source in (self._imports, self._tier):
            if source is not None:
                tables += source.tables()
        self._cache.check(tables)
        if {one.id for one in (*running, *waiting)} != set(self._sequences) or _in_order(
            [*running, *waiting]
        ) != _in_order(self._sequences.values()):
            raise IntegrityError(
                "the sequences that run, then wait, are not those under way in order of arrival"
            )
        for sequence in running:
            pages = 0 if sequence.table is None else sequence.table.size
            if pages < pages_for(sequence.computed):
                raise IntegrityError(f"request {sequence.id!r} has no pages for its {sequence.computed} rows")
            if pages > pages_for(len(sequence.tokens)):
                raise IntegrityError(f"request {sequence.id!r} keeps pages of drafts that did not stand")
            if sequence.pending < 1:
                raise IntegrityError(f"request {sequence.id!r} runs with nothing to compute")
        for sequence in waiting:
            if sequence.table is not None or sequence.computed:
                raise IntegrityError(f"request {sequence.id!r} waits with pages")

    def _queue(self, sequence: Sequence) -> None:
        self._sequences[sequence.id] = sequence
        sequence.handed_over = self._imports is not None and self._imports.whole(sequence.id)
        self._scheduler.queue(sequence)

    def _await_last_pages(self, imports: Imports) -> None:
        until = time.monotonic() + LAST_PAGES_S
        while any(map(imports.reads, self._fresh)) or any(map(imports.closes, self._ahead)):
            if (left := until - time.monotonic()) <= 0:
                break
            imports.wait(left)
        self._fresh.clear()

    def _go_ahead(self, imports: Imports) -> None:
        """Requests of which everything has come from their prefill worker go on, whether the front has said
        so by now or not: that would be a step later as often as not."""
        for id, token in imports.told().items():
            if (request := self._ahead.pop(id, None)) is None:
                continue
            try:
                self._add(msgspec.structs.replace(request, output=(*request.output, token)))
            except RequestError:
                continue  # it is told when the request comes
            self._begun.add(id)

    def _unpark(self) -> None:
        """Requests whose pages have come, or will not, join the queue."""
        for id in list(self._parked):
            if self._imports is None or not self._imports.waits(id):
                self._queue(self._parked.pop(id))

    def _sequence(self, request: Request, seed: int) -> Sequence:
        """Of a request that was checked. Raises RequestError for a constraint that cannot be enforced."""
        constraint = request.params.constraint
        if constraint is None:
            return Sequence(request, seed, self._program.info.max_context)
        if self._matchers is None:
            raise RequestError(
                constraint.field, "is not supported: this engine has no tokenizer to enforce it"
            )
        try:
            return Sequence(request, seed, self._program.info.max_context, self._matchers.begin(constraint))
        except ConstraintError as error:
            raise RequestError("output", f"does not fit: {error}") from None

    def _pool(self, work: list[Work], output: StepOutput) -> None:
        """Hands the states of a finished step to whom they belong, before anybody's tokens are counted as
        computed."""
        at = 0
        for sequence, rows, _ in work:
            if sequence.pool is not None:
                wanted = len(sequence.pool.wanted(sequence.computed, sequence.computed + rows))
                if wanted:
                    assert output.states is not None, "the batch asked for them"
                    sequence.pool.take(output.states[at : at + wanted])
                at += wanted

    def _embedded(self, sequence: Sequence) -> Chunk:
        """The only chunk of a sequence whose tokens are all computed and that draws none; it leaves."""
        assert sequence.pool is not None, "any other has drawn a token"
        embedding = sequence.pool.embedding()
        if embedding is None:
            return self._end(sequence, "error", NOT_NUMBERS)
        return msgspec.structs.replace(self._end(sequence, "stop"), embedding=embedding)

    def _commit(self, work: list[Work], output: StepOutput) -> list[Gain]:
        """Brings tokens, pages and cache up to date with a finished step: what each sequence gained whose
        pending tokens were all in it, in the order of ``work``."""
        drawn = output.tokens.tolist()
        gains = []
        n = 0
        for sequence, rows, draft in work:
            sequence.computed += rows
            if sequence.pending == 0 and sequence.pool is None:
                after = n + 1 + len(draft)
                gain = commit(sequence, draft, drawn[n:after], n)
                if output.features is not None and gain.error is None:
                    # A copy: what the program hands back may be overwritten, and is all of the step's.
                    sequence.features = output.features[n + gain.accepted].copy()
                self._generated_tokens += len(gain.tokens)
                gains.append(gain)
                n = after
            if sequence.table is not None:
                self._cache.commit(sequence.table, sequence.tokens, sequence.computed)
                if draft:
                    self._cache.trim(sequence.table, sequence.computed)
        return gains

    def _chunk(self, gain: Gain, output: StepOutput, handoff: dict[str, Any] | None) -> Chunk:
        sequence, tokens, top = gain.sequence, tuple(gain.tokens), gain.sequence.params.logprobs
        return Chunk(
            id=sequence.id,
            tokens=tokens,
            logprobs=None
            if top is None or not tokens
            else tuple(_logprob(output, n, top) for n in range(gain.first, gain.first + len(tokens))),
            finish=gain.finish,
            stop_token=tokens[-1] if gain.finish == "stop" else None,
            error=gain.error,
            error_field=gain.error_field,
            handoff=handoff if gain.finish == "length" else None,
            **self._admission_news(sequence),
        )

    def _end(
        self,
        sequence: Sequence,
        finish: FinishReason,
        error: str | None = None,
        keep: int | None = None,
        error_field: str | None = None,
    ) -> Chunk:
        """The last chunk of a sequence that ends outside of a step; it leaves."""
        self._leave(sequence, finish, keep)
        news = self._admission_news(sequence)
        return Chunk(id=sequence.id, finish=finish, error=error, error_field=error_field, **news)

    def _leave(
        self, sequence: Sequence, finish: FinishReason, keep: int | None = None
    ) -> dict[str, Any] | None:
        """The sequence is gone; returns the handoff of its pages, if it has one."""
        handoff = None
        if self._handover is not None:
            drawn = sequence.tokens[-1] if finish == "length" else None
            handoff = self._handover.end(sequence.id, drawn)
        del self._sequences[sequence.id]
        self._scheduler.drop(sequence)
        if keep is not None:
            # What came after the end that its text had is nobody's answer.
            del sequence.tokens[sequence.prompt_length + keep :]
        if self._speculation is not None:
            self._speculation.end(sequence, learn=finish in ("stop", "length") or keep is not None)
        return handoff

    def _admission_news(self, sequence: Sequence) -> AdmissionNews:
        """What the first chunk after the sequence's admission tells of it."""
        cached, sequence.cached_tokens_news = sequence.cached_tokens_news, None
        if cached is None:
            return {}
        self._cached_tokens += cached
        return {"cached_tokens": cached, "queue_ms": sequence.queue_ms}


def _in_order(sequences: Iterable[Sequence]) -> list[Sequence]:
    """Those that run and wait in order of arrival."""
    return [sequence for sequence in sequences if not sequence.handed_over]


def _logprob(output: StepOutput, n: int, top: int) -> TokenLogprob:
    best = zip(output.top_tokens[n, :top].tolist(), output.top_logprobs[n, :top].tolist(), strict=True)
    return TokenLogprob(float(output.logprobs[n]), tuple(best))
