"""Tenfold's worker as an engine of NVIDIA Dynamo: its unified Python backend (ai-dynamo 1.6.1).

With `tenfold.cluster.prefill` all that imports Dynamo. The engine is in a process of its own, as under
`tenfold serve`; this one has Dynamo's runtime and passes on what the two say.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.common.backend.publisher import ComponentSnapshot, PushSource
from dynamo.common.backend.run import run
from dynamo.common.constants import DisaggregationMode
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument
from msgspec.structs import replace

from tenfold.cluster.asked import HANDOFF, prompt_link, read_request
from tenfold.cluster.engine_process import EngineProcess
from tenfold.cluster.options import WorkerOptions
from tenfold.cluster.prefill import COMPONENT, PATIENCE_S, PrefillWorkers, prefill_namespace
from tenfold.config import PAGE_ROWS
from tenfold.limits import RequestError
from tenfold.protocol import (
    Chunk,
    Chunks,
    EnginePlan,
    KVEvents,
    LoadSnapshot,
    PagesStored,
    Refused,
    Request,
)
from tenfold.router.names import namespace_parent

log = logging.getLogger(__name__)

BEAT_S = 1.0
"""A stream without tokens says so often that its engine gets on: the front takes a silent one for hung, and
cannot know how long a prompt takes."""
_BEAT = {"token_ids": [], "index": 0}

FOLDER = "./model"
"""The last part of every folder of a model, as seen from its parent."""

QUIET_S = 2.0
"""A prefill worker that is told to end waits so long for those who take its pages."""

REGISTRY_S = 1.0
"""How often a worker looks whether it is registered still."""


class TenfoldEngine(LLMEngine):  # type: ignore[misc]  # Dynamo comes without types
    """One worker. Dynamo calls its methods in one event loop, `generate` for many requests at once."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._engine = EngineProcess(options.settings, self._told, self._lost, options.builder)
        self._events: Any = None
        """Dynamo's publisher of KV events; None before it is there and after the end."""
        self._snapshots: Any = None
        self._plan: EnginePlan | None = None
        self._prefill_workers: PrefillWorkers | None = None
        """Of a decode worker."""
        self._look: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._handed_over_at = -QUIET_S
        self._early: list[KVEvents] = []
        """News of pages before there was a publisher."""

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        """Not used: `run_worker` makes the engine."""
        raise NotImplementedError

    def config(self) -> Any:
        """What Dynamo is to know before the start."""
        options = self._options
        prefill = options.role == "prefill"
        return WorkerConfig(
            namespace=prefill_namespace(options.namespace) if prefill else options.namespace,
            component=COMPONENT if prefill else "backend",
            model_name=FOLDER,
            served_model_name=options.served_name,
            endpoint_types="chat,completions",
            discovery_backend=options.discovery,
            request_plane="tcp",
            event_plane="zmq",
            # A decode worker can do all of a request, and may have to: see `tenfold.cluster.prefill`.
            disaggregation_mode=DisaggregationMode.PREFILL if prefill else DisaggregationMode.AGGREGATED,
        )

    async def start(self, worker_id: int) -> Any:
        plan = self._plan = await self._engine.start()
        if self._options.role == "decode":
            self._prefill_workers = PrefillWorkers(self._options.namespace, self._options.discovery)
        if self._options.registry:
            self._look = asyncio.create_task(self._stay_registered(f"*/*%2Fgenerate%2F{worker_id:x}"))
        log.info("worker %x: engine ready in process %d", worker_id, self._engine.pid)
        return EngineConfig(
            model=FOLDER,
            served_model_name=self._options.served_name,
            llm=LlmRegistration(
                context_length=plan.max_context,
                kv_cache_block_size=PAGE_ROWS,
                total_kv_blocks=plan.kv_pages,
                max_num_seqs=plan.max_running,
                max_num_batched_tokens=plan.max_batch_tokens,
            ),
        )

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        id = context.id()
        try:
            asked = read_request(request, id, f"{id}~{next(self._numbers)}", self._options.hole)
            self._check_length(asked)
        except RequestError as error:
            raise InvalidArgument(str(error)) from None
        if self._options.role == "prefill" and not is_probe(request):
            yield await self._prefill(asked)
            return
        if self._prefill_workers is not None:
            tokens = (*asked.prompt, *asked.output)
            asking = asyncio.ensure_future(self._prefill_workers.pages_of(tokens, asked.namespace))
            try:
                while not asking.done():
                    if not (await asyncio.wait([asking], timeout=BEAT_S))[0]:
                        yield _BEAT
            finally:
                asking.cancel()
            asked = replace(asked, handoff=asking.result())
        answer = _Answer(asked)
        queue = self._engine.submit(asked)
        try:
            while not answer.ended:
                try:
                    news = await asyncio.wait_for(queue.get(), BEAT_S)
                except asyncio.TimeoutError:
                    if self._engine.getting_on:
                        yield _BEAT
                    continue
                if news is None:
                    raise EngineShutdown("the engine's process has ended")
                if isinstance(news, Refused):
                    raise InvalidArgument(news.error)
                chunk = answer.chunk(news)
                if chunk is not None:
                    yield chunk
        finally:
            # Also when Dynamo closes this generator: the client is gone.
            self._engine.forget(asked.id)

    async def _prefill(self, asked: Request) -> dict[str, Any]:
        """The one chunk that a decode worker wants: where the pages are.

        A prompt that takes long is handed over while it is computed, or where that has not begun, left to the
        decode worker."""
        # A request for one token would keep its pages.
        asked = replace(asked, prefill_only=True, params=replace(asked.params, max_tokens=None))
        queue = self._engine.submit(asked)
        handoff: dict[str, Any] | None = None
        goes_on = False
        patience = time.monotonic() + PATIENCE_S
        try:
            while True:
                try:
                    news = await asyncio.wait_for(queue.get(), max(0.0, patience - time.monotonic()))
                except asyncio.TimeoutError:
                    goes_on = handoff is not None
                    break
                if news is None:
                    raise EngineShutdown("the engine's process has ended")
                if isinstance(news, Refused):
                    break  # The decode worker says what is wrong, or can do it.
                if news.handoff is not None or news.finish is not None:
                    handoff = news.handoff
                if news.finish is not None:
                    break
        finally:
            if not goes_on:
                self._engine.forget(asked.id)
        self._handed_over_at = time.monotonic()
        return {
            "token_ids": [],
            "index": 0,
            "finish_reason": "length",
            "disaggregated_params": {HANDOFF: handoff},
        }

    def _check_length(self, asked: Request) -> None:
        """As the front of `tenfold serve` does. Raises RequestError."""
        assert self._plan is not None
        wanted, context = asked.params.max_tokens or 0, self._plan.max_context
        if len(asked.prompt) + wanted > context:
            raise RequestError(
                "max_tokens",
                f"is {wanted} with a prompt of {len(asked.prompt)} tokens; the model's context is {context}. "
                "Shorten the prompt, or ask for less",
            )

    async def abort(self, context: Any) -> None:
        """Nothing to do: Dynamo then closes the generator, which ends the request."""

    async def is_quiescent(self) -> bool:
        """Whether nobody is likely to want pages of this worker any more: they are taken at once, or computed
        elsewhere."""
        return time.monotonic() > self._handed_over_at + QUIET_S

    async def cleanup(self) -> None:
        self._events = self._snapshots = None
        if self._prefill_workers is not None:
            self._prefill_workers.close()
        if self._look is not None:
            self._look.cancel()
        await self._engine.stop()

    async def health_check_payload(self) -> dict[str, Any]:
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=0)
        return payload

    async def kv_event_sources(self) -> list[Any]:
        return [PushSource(on_ready=self._events_ready, dp_rank=0)]

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._snapshots = publisher

    def _events_ready(self, publisher: Any) -> None:
        self._events = publisher
        early, self._early = self._early, []
        for events in early:
            self._publish(events)

    def _told(self, message: Chunks) -> None:
        if message.events is not None:
            if self._events is None:
                self._early.append(message.events)
            else:
                self._publish(message.events)
        if message.load is not None and self._snapshots is not None:
            self._snapshots.publish(0, _snapshot(message.load))

    def _publish(self, events: KVEvents) -> None:
        for event in events.events:
            if isinstance(event, PagesStored):
                # For Dynamo a prompt's first page follows nothing, whosever it is.
                first = event.parent == namespace_parent(event.namespace)
                self._events.publish_stored(
                    token_ids=list(event.tokens),
                    num_block_tokens=[PAGE_ROWS] * len(event.names),
                    block_hashes=_signed(event.names),
                    parent_hash=None if first or event.parent is None else _signed((event.parent,))[0],
                    cache_salt=event.namespace or None,
                )
            else:
                names = getattr(event, "names", ())
                self._events.publish_removed(block_hashes=_signed(names))

    async def _stay_registered(self, names: str) -> None:
        """With file discovery a worker that stood still for ten seconds is taken for dead by the others, who
        delete its entries, that of the process or that of its model or both; it would never write another."""
        folder = Path(self._options.registry) / "v1"
        seen: set[Path] = set()
        while True:
            await asyncio.sleep(REGISTRY_S)
            there = set(folder.glob(names))
            if seen - there:
                self._leave("others took it for dead, and deleted its entry in the registry")
                return
            seen |= there

    def _lost(self, reason: str) -> None:
        self._leave(f"the engine's process has ended: {reason}")

    def _leave(self, why: str) -> None:
        """Leaves the cluster in order; whoever started the worker starts it again."""
        log.error("the worker leaves: %s", why)
        os.kill(os.getpid(), signal.SIGTERM)


class _Answer:
    """The chunks of one answer, as Dynamo has them."""

    def __init__(self, asked: Request) -> None:
        self._prompt_tokens = len(asked.prompt)
        self._cached = 0
        self._tokens = len(asked.output)
        self.ended = False

    def chunk(self, news: Chunk) -> dict[str, Any] | None:
        """None: there is nothing to say."""
        if news.cached_tokens is not None:
            self._cached = news.cached_tokens
        if not news.tokens and news.finish is None:
            return None
        if news.finish == "error":
            raise RuntimeError(news.error or "the engine ended the request")
        self._tokens += len(news.tokens)
        chunk: dict[str, Any] = {
            "token_ids": list(news.tokens),
            "index": 0,
            "worker_trace_link": prompt_link(self._prompt_tokens),
        }
        if news.logprobs is not None:
            chunk["log_probs"] = [each.logprob for each in news.logprobs]
            if any(each.top for each in news.logprobs):
                chunk["top_logprobs"] = [
                    [
                        {"rank": rank, "token_id": token, "token": None, "logprob": logprob}
                        for rank, (token, logprob) in enumerate(each.top, 1)
                    ]
                    for each in news.logprobs
                ]
        if news.finish is not None:
            self.ended = True
            chunk["finish_reason"] = "cancelled" if news.finish == "abort" else news.finish
            chunk["completion_usage"] = self._usage()
        return chunk

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._tokens,
            "total_tokens": self._prompt_tokens + self._tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


def _signed(names: Sequence[int]) -> list[int]:
    """Dynamo's ids of blocks are signed."""
    return [name - (1 << 64) if name >> 63 else name for name in names]


def _snapshot(load: LoadSnapshot) -> Any:
    used = load.pages_total - load.pages_free
    return ComponentSnapshot(
        kv_used_blocks=used,
        kv_total_blocks=load.pages_total,
        gpu_cache_usage=used / load.pages_total if load.pages_total else 0.0,
        dp_rank=0,
        kv_cache_hit_rate=load.cached_tokens / load.prompt_tokens if load.prompt_tokens else None,
    )


def run_worker(options: WorkerOptions) -> None:
    """Serves until the process is told to end, or its engine has ended."""

    # What the front is told of a model has its path in it, and must be the same of all workers.
    os.chdir(Path(options.folder).parent)

    async def made(argv: list[str] | None) -> Any:
        engine = TenfoldEngine(options)
        return engine, engine.config()

    with contextlib.suppress(KeyboardInterrupt):
        run(TenfoldEngine, [], made)
