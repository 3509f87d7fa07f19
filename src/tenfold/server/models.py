"""The models of a server: which there are, and how they come and go while it runs.

Who owns what: `Models` owns every `ServedModel` and its flights, from the first attempt to load it until its
workers have ended. A model has a name; a name is in exactly one state: loading, served, or unloading. Only
what is served is found by requests. Loading that fails leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

from tenfold.config import ResolvedPlan, ServeConfig, available_memory, total_memory
from tenfold.protocol import EnginePlan
from tenfold.server.chat_setup import choose_chat
from tenfold.server.door import Door
from tenfold.server.embeddings import plan_line
from tenfold.server.errors import ApiError, invalid, unavailable
from tenfold.server.fields import show
from tenfold.server.flights import Flights
from tenfold.server.host import StartError
from tenfold.server.memory import Wanted, check_room, check_together, give_back, settle, wanted
from tenfold.server.metrics import Metrics
from tenfold.server.responses_api.store import ResponseStore
from tenfold.server.served import ServedModel
from tenfold.server.text import Text
from tenfold.worker.process import ENGINE_BUILDER

log = logging.getLogger(__name__)

POLL_S = 0.02
"""How often a model that is unloaded is asked whether its last request has ended."""

LAST_WORDS_S = 1.0
"""For the requests that were ended, to say so to their clients."""

T = TypeVar("T")


@dataclass(frozen=True)
class Sources:
    """Where models come from."""

    locate: Callable[[str], str]
    """From what a user calls a model to its path; may take long. Raises ValueError or OSError."""
    load_text: Callable[[str], Text]
    """The text side of the model at a path; the same."""
    builder: str = ENGINE_BUILDER
    """Of the engines, in the workers."""


class Models:
    """All models of one server. Methods are for the event loop."""

    def __init__(self, sources: Sources, *, alone: bool = True, door: Door | None = None) -> None:
        """``alone``: there is one model and will be no other; its workers need no more than their numbers.
        ``door``: workers of other machines may join, for the one model that the server begins with."""
        self._sources = sources
        self._alone = alone
        self._door = door
        self._first: Flights | None = None
        """Of the model that the server begins with, or one of them, as soon as its workers start."""
        self._served: dict[str, ServedModel] = {}
        self._loading: dict[str, asyncio.Task[ServedModel]] = {}
        self._leaving: dict[str, ServedModel] = {}
        self._wanted: dict[str, Wanted] = {}
        """By those that are being loaded: it is not taken yet, and not free any more."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._rolling: asyncio.Task[None] | None = None
        self._failed = asyncio.Event()
        """Some model's workers are looked after by nobody any more."""
        self._closing: str | None = None
        self.responses = ResponseStore()
        """Each lies beside others of its model alone."""

    # Which there are

    @property
    def all(self) -> tuple[ServedModel, ...]:
        """Those served, in the order in which they were loaded."""
        return tuple(self._served.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Of those."""
        return tuple(self._served)

    @property
    def loading(self) -> tuple[str, ...]:
        """Names of those on their way in."""
        return tuple(self._loading)

    @property
    def leaving(self) -> tuple[str, ...]:
        """Names of those on their way out."""
        return tuple(self._leaving)

    def find(self, name: str | None) -> ServedModel:
        """The model of that name; None: the only one. Raises ApiError that names the choices."""
        there = f"there {'is' if len(self._served) == 1 else 'are'}: {', '.join(self._served)}"
        if not self._served:
            raise ApiError(404, "no model is loaded here now", param="model", code="model_not_found")
        if name is None:
            if len(self._served) > 1:
                raise invalid("model", f"model is missing; {there}", code="missing_parameter")
            (only,) = self._served.values()
            return only
        found = self._served.get(name)
        if found is None:
            raise ApiError(
                404, f"there is no model {show(name)} here; {there}", param="model", code="model_not_found"
            )
        return found

    def not_ready(self) -> dict[str, str | None]:
        """Of each model why its requests make no progress; None: they do, or could."""
        return {name: model.flights.not_ready() for name, model in self._served.items()}

    def before_first(self) -> tuple[str | None, dict[str, str]]:
        """Until the first model is served: why it is not, and the state of each of its workers by name."""
        return (None, {}) if self._first is None else (self._first.not_ready(), self._first.workers())

    # How they come

    def serve(self, model: ServedModel) -> None:
        """Requests find the model from now on."""
        self._served[model.name] = model

    def _add(self, model: ServedModel) -> None:
        self.serve(model)
        task = asyncio.get_running_loop().create_task(self._watch(model))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def start(self, wants: Sequence[tuple[ServeConfig, str]]) -> None:
        """Loads the models that a server begins with, all at once: configurations and paths. Raises
        StartError, ValueError, or what loading text raises; then none is there."""
        # One worker cannot do with less, and its front can spare what reading the model's head takes.
        if len(wants) > 1 or wants[0][0].processes > 1:
            each = [await _apart(wanted, config, path) for config, path in wants]
            check_together(each, total_memory())
        door = self._door if len(wants) == 1 else None
        opening = [
            asyncio.ensure_future(self._open(config, path, len(wants), door)) for config, path in wants
        ]
        try:
            models = await asyncio.gather(*opening)
        except BaseException:
            for one in opening:
                one.cancel()
            for end in await asyncio.gather(*opening, return_exceptions=True):
                if isinstance(end, ServedModel):
                    await end.flights.stop()
            raise
        for model in models:
            self._add(model)

    async def load(self, config: ServeConfig) -> ServedModel:
        """Loads one more model, and returns when it is served. Whoever waits may go: it goes on. Raises
        ApiError: the name is taken (409), or it cannot be loaded (400); then nothing has changed."""
        name = config.model_name
        for names, state in (
            (self._served, "is loaded already; unload it first, or give the new one another name"),
            (self._loading, "is being loaded already"),
            (self._leaving, "is being unloaded; ask again when it is gone"),
        ):
            if name in names:
                raise ApiError(409, f"{name} {state}", param="name", code="model_exists")
        if self._closing is not None:
            raise unavailable(self._closing, 1)
        task = asyncio.get_running_loop().create_task(self._load(config))
        self._loading[name] = task
        task.add_done_callback(partial(self._loaded, name))
        return await asyncio.shield(task)

    def _loaded(self, name: str, task: asyncio.Task[ServedModel]) -> None:
        del self._loading[name]
        if not task.cancelled():
            task.exception()  # whoever waited for it may have gone

    async def _load(self, config: ServeConfig) -> ServedModel:
        name = config.model_name
        log.info("loading %s from %s", name, config.model)
        began = time.monotonic()
        try:
            path = await _apart(self._sources.locate, config.model)
            want = await _apart(wanted, config, path)
            others = sum(each.bytes for each in self._wanted.values())
            check_room(want, available_memory() - others, [str(model) for model in self.all])
            self._wanted[name] = want
            model = await self._open(config, path, 1)
        except (ValueError, OSError, StartError) as error:
            log.error("%s was not loaded: %s", name, error)
            raise ApiError(
                400, f"{name} was not loaded: {error}", param="model", code="model_not_loaded"
            ) from None
        except asyncio.CancelledError:
            raise unavailable(self._closing or f"loading {name} was ended", 1) from None
        finally:
            self._wanted.pop(name, None)
        self._add(model)
        settle()
        log.info("%s is served, after %.1f s", name, time.monotonic() - began)
        return model

    async def _open(
        self, config: ServeConfig, path: str, count: int, door: Door | None = None
    ) -> ServedModel:
        """A model, one of so many that are loaded at once: weights (in its workers) and text (here) at the
        same time."""
        metrics = Metrics()
        flights = Flights(
            config.engine_settings(path, count),
            metrics,
            max_queue=config.max_queue,
            stall_after_s=config.stall_after_s,
            builder=self._sources.builder,
            routing=config.routing,
            drain_s=config.drain_s,
            prefix="" if self._alone else f"{config.model_name}/",
            accepts=door is not None,
        )
        self._first = self._first or flights
        starting: asyncio.Task[EnginePlan] = asyncio.ensure_future(flights.start())
        try:
            opened = () if door is None else (door.open(config, path, flights, metrics),)
            plan, text, *_ = await asyncio.gather(starting, _apart(self._sources.load_text, path), *opened)
            chat = choose_chat(text, config.tool_format, config.reasoning_format)
        except BaseException as error:
            starting.cancel()
            await flights.stop()
            if isinstance(error, StartError) and count > 1:
                raise StartError(f"{config.model_name}: {error}") from None
            raise
        lines = (*chat.lines(), plan_line(text.pooling))
        resolved = ResolvedPlan(config=config, path=path, engine=plan, chat=lines, models=count)
        return ServedModel(resolved, text, chat, flights, metrics)

    async def _watch(self, model: ServedModel) -> None:
        await model.flights.ended()
        if self._served.get(model.name) is model:
            self._failed.set()

    # How they go

    async def unload(self, name: str, drain_s: float) -> None:
        """Requests no longer find the model; those under way may take ``drain_s`` to end, and are then ended.
        Returns when its memory is given back; whoever waits may go. Raises ApiError: no such model (404), or
        it is on its way in or out (409)."""
        for names, state in ((self._loading, "loaded"), (self._leaving, "unloaded")):
            if name in names:
                raise ApiError(409, f"{name} is being {state}", param="name", code="model_busy")
        model = self.find(name)
        self._leaving[name] = self._served.pop(name)
        task = asyncio.get_running_loop().create_task(self._unload(model, drain_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        del model
        await asyncio.shield(task)

    async def _unload(self, model: ServedModel, drain_s: float) -> None:
        name = model.name
        log.info("unloading %s, with %d requests", name, model.users)
        try:
            await _until_idle(model, drain_s)
            model.flights.abort_all(f"the model {name} was unloaded")
            model.end_checks()
            await model.flights.stop()
            await _until_idle(model, LAST_WORDS_S)
        except StartError as error:
            log.error("%s: %s", name, error)
        finally:
            del self._leaving[name]
            self.responses.forget(name)
        del model
        give_back()
        log.info("%s is unloaded", name)

    # All of them

    def roll(self) -> None:
        """Begins to replace all workers, model by model; see `Flights.roll`."""
        if self._rolling is None or self._rolling.done():
            self._rolling = asyncio.get_running_loop().create_task(self._roll())

    async def _roll(self) -> None:
        for model in self.all:
            if self._served.get(model.name) is model:  # it may have gone meanwhile
                model.flights.roll()
                await model.flights.rolled()

    async def failed(self) -> None:
        """Waits until nobody looks after some model's workers any more; then `stop` raises."""
        await self._failed.wait()

    def refuse_new(self, reason: str) -> None:
        """From now on requests get 503, and no model is loaded; what is in flight goes on."""
        self._closing = reason
        for model in (*self.all, *self._leaving.values()):
            model.flights.refuse_new(reason)
        for task in self._loading.values():
            task.cancel()

    def abort_all(self, reason: str) -> None:
        """Ends all that is in flight with 503 ``reason``."""
        self.refuse_new(reason)
        for model in (*self.all, *self._leaving.values()):
            model.flights.abort_all(reason)
            model.end_checks()

    async def stop(self) -> None:
        """Ends everything. Raises StartError as `Flights.stop` does."""
        self.abort_all("the server is shutting down")
        if self._rolling is not None:
            self._rolling.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
        stopping = [model.flights.stop() for model in (*self.all, *self._leaving.values())]
        ends = await asyncio.gather(*stopping, return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end


async def _until_idle(model: ServedModel, seconds: float) -> None:
    """Waits for the end of its last request, but no longer than so many seconds."""
    deadline = time.monotonic() + seconds
    while model.users and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    await asyncio.sleep(POLL_S)  # what looks after it comes to its end too


async def _apart(work: Callable[..., T], *given: object) -> T:
    """In a thread of its own, which a server that stops does not wait for: a model may be on its way from the
    hub for an hour."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: Exception | None) -> None:
        if done.done():
            return  # nobody waits any more
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast(T, result))

    def run() -> None:
        result, error = None, None
        try:
            result = work(*given)
        except Exception as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, daemon=True, name="loading").start()
    return await done
