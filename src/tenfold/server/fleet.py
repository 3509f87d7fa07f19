"""Many workers behind one front: where each request goes, what is heard of it, and what is done when a worker
stops to get on.

Who owns what: the fleet owns the posts (a worker's place each), their hosts and the router; `Flights` owns
the requests. The fleet says which requests are no longer on a worker, `Flights` sends them anew, with the
tokens they have. A request on a worker goes by an id of its own for each time that it is sent, so news of an
earlier time are told from those of a later one.

With one worker there is nothing to choose, so the router is not asked, and nobody to move to: nothing is
taken from it and it is never killed for being slow.

Workers of other machines may join (`Fleet.join`): each has a post from its first word to its last.

Workers may have KV memory of different sizes; what a request returns must not tell. So one goes only where
there is room for all that it may come to have, and waits while who has it is away for a moment. Where nobody
has, it goes where there is most, and from a worker that it outgrows all the same to a larger one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container, Sequence
from itertools import chain, count
from typing import Protocol

from tenfold.config import PAGE_ROWS
from tenfold.protocol import (
    Abort,
    Chunk,
    Chunks,
    EnginePlan,
    EngineSettings,
    Generate,
    LoadSnapshot,
    Pages,
    Refused,
    Request,
    Resync,
)
from tenfold.router import base as routing
from tenfold.router.base import RouterConfig, RouteRequest
from tenfold.router.measured import MeasuredTiming, guess_timing
from tenfold.router.names import page_names
from tenfold.router.policies import Policy
from tenfold.router.router import Router
from tenfold.router.split import SplitRouter, TransferTiming
from tenfold.router.timing import WorkerTiming
from tenfold.server.clock import WatchedClock
from tenfold.server.host import StartError, WorkerEvents, WorkerHost
from tenfold.server.post import Post
from tenfold.server.split import Splits, divisible, places

log = logging.getLogger(__name__)
decisions = logging.getLogger("tenfold.routing")

TICK_S = 0.2
FIT_EVERY_S = 2.0
QUIET_S = 1.5
"""From a worker that has said nothing for so long, its CPU time is watched."""
COMPUTES_S = 0.02
"""CPU time by which one in a long step is told from one that stands still."""
KILL_AFTER_S = 7.0
"""A worker that is silent for so long, and does not compute, is killed."""
START_STILL_S = 30.0
"""So is one that is starting and has not computed for so long."""

ALIKE = 0.9
"""A worker with this part of the KV memory of the largest counts as large as that: workers that start one
after another find a little more free memory or a little less."""

HostFactory = Callable[[str, WorkerEvents], WorkerHost]
"""Makes the host of a post with this name."""

_NO_TIMING = WorkerTiming(prefill_step=0.01, prefill_token=0.001, decode_step=0.01)
"""Until the first worker has said what model it has."""


class FleetEvents(Protocol):
    """Who is told of requests and workers. Called in the event loop."""

    def news(self, chunks: Sequence[Chunk]) -> None:
        """Of requests, by the ids they were sent with; none after one's end. One without anything in it is an
        acknowledgement."""

    def progress(self) -> None:
        """Some worker made a step."""

    def load(self, worker: str, load: LoadSnapshot) -> None: ...

    def lost(self, worker: str, planned: bool) -> None:
        """A worker has ended; what was on it comes by `returned`."""

    def refused(self, message: Refused) -> None: ...

    def returned(self, ids: Sequence[str], died: bool) -> None:
        """These are on no worker any more and are to be sent again. ``died``: theirs did, unasked."""

    def suspected(self, ids: Sequence[str]) -> None:
        """The worker that these were taken from has died of what it computed without end. (Of one that just
        stood still nobody is suspected: somebody stopped it.)"""

    def ready(self) -> None:
        """One more worker takes requests: those that wait may be sent."""

    def room(self) -> None:
        """So they may now and then: a worker may have room again."""

    def down(self, reason: str) -> None:
        """No worker can be started."""


class Fleet:
    """All workers of a server."""

    def __init__(
        self,
        settings: EngineSettings,
        events: FleetEvents,
        hosts: HostFactory,
        *,
        policy: Policy = "cache-aware",
        hang_after_s: float = 30.0,
        clock: Callable[[], float] | None = None,
        prefix: str = "",
        accepts: bool = False,
    ) -> None:
        """``prefix``: before the names of its workers, where there are others on the same log. ``accepts``:
        workers of other machines may join, so there need be none at first."""
        self._events = events
        self._hang_after_s = hang_after_s
        named = [(prefix + name, role) for name, role in places(settings)]
        self.posts = tuple(Post(name, self, role) for name, role in named)
        for post in self.posts:
            post.host = hosts(post.name, post)
        self._many = settings.workers > 1 or accepts
        self._first: asyncio.Future[EnginePlan] | None = None
        """Waited for where no worker is this front's own."""
        config = RouterConfig(timing=_NO_TIMING, page_tokens=PAGE_ROWS, policy=policy)
        self.router, self.splits = Router(config), None
        if settings.prefill_workers:
            router = SplitRouter(config, dict(named), TransferTiming.guess(0))
            self.router = router
            self.splits = Splits(router, lambda name, message: self._post(name).host.send(message))
        self.moved = 0
        """Requests taken from a worker that did not get on, or was to be restarted."""
        self.decision_s = 0.0
        """Spent on naming pages and routing."""
        self.sent: dict[str, int] = {}
        """Requests sent so far by worker."""
        self._measured: MeasuredTiming | None = None
        self._plan: EnginePlan | None = None
        """Of the worker that was ready first."""
        self._fit_due = 0.0
        self._now = WatchedClock().now if clock is None else clock
        self._at: dict[str, Post] = {}
        self._ticking: asyncio.TimerHandle | None = None

    # Life

    async def start(self) -> EnginePlan:
        """Starts all workers and waits until they are ready; where there are none, until one has joined. The
        plan is that of the one with the least KV memory: what is told of each is true of all. (What a request
        may need is another question: `kv_tokens`.) Raises StartError when one cannot be started."""
        starting: list[asyncio.Future[EnginePlan]] = [
            asyncio.ensure_future(post.host.start()) for post in self._own
        ]
        if not starting:
            self._first = asyncio.get_running_loop().create_future()
            starting.append(self._first)
        try:
            plans = await asyncio.gather(*starting)
        finally:
            for one in starting:
                one.cancel()
        if self._many:
            self._tick()
        return min(plans, key=lambda plan: plan.kv_pages)

    async def ended(self) -> None:
        """Waits until the first host of its own has ended; see `WorkerHost.ended`. Without any, for ever."""
        if not self._own:
            await asyncio.get_running_loop().create_future()
        tasks = [asyncio.create_task(post.host.ended()) for post in self._own]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def stop(self) -> None:
        """Ends all workers. Raises StartError as `WorkerHost.stop` does."""
        if self._ticking is not None:
            self._ticking.cancel()
        ends = await asyncio.gather(*(post.host.stop() for post in self.posts), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    async def roll(self, drain_s: float) -> None:
        """Replaces the workers one after another. Each gets nothing new, its requests may take ``drain_s``
        to end, and what is left then goes on elsewhere. Where there is no other worker, requests wait for the
        new one. A worker that is just being started is not replaced, but waited for. Ends early, with the
        others untouched, when a worker cannot be started again. Workers that joined are left alone: who
        started them can replace them."""
        try:
            for post in self._own:
                await self._replace(post, drain_s)
        except StartError as error:
            log.error("replacing workers ended early: %s", error)
        else:
            joined = len(self.posts) - len(self._own)
            log.info(
                "all workers have been replaced%s",
                f", but for {joined} that joined from elsewhere" if joined else "",
            )

    async def _replace(self, post: Post, drain_s: float) -> None:
        if post.plan is not None:
            log.info("replacing worker %s, with %d requests", post.name, len(post.requests))
            post.draining = True
            self.router.drain(post.name)
            deadline = time.monotonic() + drain_s
            while post.requests and self._elsewhere(post) and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            if post.plan is not None:
                self._move_all(post, died=False)
        await post.host.restart()

    # Workers of other machines

    def join(self, name: str, address: str) -> Post:
        """A post for a worker at ``address``, by this name or, if that is taken, one like it. Its host is to
        be set before anything else happens; the post goes when its worker is lost."""
        taken = {post.name for post in self.posts}
        free = next(one for one in chain([name], (f"{name}-{n}" for n in count(2))) if one not in taken)
        post = Post(free, self, address=address)
        self.posts = (*self.posts, post)
        return post

    async def retire(self, post: Post, drain_s: float) -> None:
        """A worker that joined wants to go: it gets nothing new, its requests may take ``drain_s`` to end,
        and what is left then goes on elsewhere, or waits for somebody."""
        if post.plan is None:
            return
        post.draining = True
        self.router.drain(post.name)
        deadline = time.monotonic() + drain_s
        while post.requests and post.plan is not None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if post.plan is not None:
            self._move_all(post, died=False)

    @property
    def _own(self) -> list[Post]:
        return [post for post in self.posts if post.address is None]

    @property
    def many(self) -> bool:
        """Whether requests are routed."""
        return self._many

    # Requests

    def send(self, requests: Sequence[Request], doubted: Container[str] = ()) -> list[str]:
        """Routes requests and sends them; workers are to acknowledge those ``doubted``. Returns the ids of
        those that went somewhere; the others wait for `FleetEvents.ready`. Ids must be new."""
        known = {request.id: request for request in requests}
        sent = []
        for id, post, split in self._route(requests) if self._many else self._to_the_one(requests):
            self._at[id] = post
            post.requests[id] = None
            self.sent[post.name] = self.sent.get(post.name, 0) + 1
            request = self.splits.begin(known[id]) if split and self.splits is not None else known[id]
            post.host.send(Generate(request=request, acknowledge=id in doubted))
            sent.append(id)
        return sent

    def _hand_over(self, chunk: Chunk, now: float) -> None:
        """A prefill worker is done with a request."""
        assert self.splits is not None
        if self._leave(chunk.id) is None:
            return
        if (found := self.splits.next(chunk, now)) is None:
            self._events.returned([chunk.id], False)
            return
        name, message, early = found
        post = self._at[chunk.id] = self._post(name)
        post.requests[chunk.id] = None
        self.sent[name] = self.sent.get(name, 0) + 1
        post.host.send(message)
        self._news(early, now)

    def _to_the_one(self, requests: Sequence[Request]) -> list[tuple[str, Post, bool]]:
        """With one worker there is nothing to choose, and nothing is to be spent on it."""
        (post,) = self.posts
        if post.plan is None or post.draining:
            return []
        return [(request.id, post, False) for request in requests]

    def _route(self, requests: Sequence[Request]) -> list[tuple[str, Post, bool]]:
        """Where each goes, in the order in which to send them, and whether for its prompt alone."""
        if not self.router.workers():
            return []
        began = time.perf_counter()
        now = self._now()
        asked = [self._asked(request) for request in requests]
        if len(asked) == 1:
            routed = [(asked[0], self.router.route(asked[0], now))]
        else:
            routed = self.router.route_all(asked, now)
        self.decision_s += time.perf_counter() - began
        found = []
        for one, decision in routed:
            if decision is not None:
                decisions.debug("%s", _Reason(decision))
                split = decision.choice is not None and decision.choice.split
                found.append((one.id, self._post(decision.worker), split))
        return found

    def _post(self, name: str) -> Post:
        return next(post for post in self.posts if post.name == name)

    def abort(self, id: str, keep: int | None = None) -> None:
        """Forgets a request that was sent; ``keep``: see `Abort`."""
        if (post := self._leave(id)) is not None:
            if self.splits is not None:
                self.splits.forget(id)
            if self._many:
                self.router.on_finish(id, self._now())
            post.host.send(Abort(id=id, keep=keep))

    @property
    def up(self) -> bool:
        """Whether any worker takes requests."""
        return any(post.host.up for post in self.posts)

    @property
    def answering(self) -> bool:
        """Whether any worker takes requests and gets on."""
        return any(post.state in ("up", "draining") for post in self.posts)

    @property
    def kv_tokens(self) -> int | None:
        """What the KV memory of the largest worker holds, also while it is being started again. None: nobody
        has told so far."""
        pages = max((post.kv_pages for post in self.posts if post.down is None), default=0)
        return pages * PAGE_ROWS or None

    @property
    def timing(self) -> WorkerTiming:
        """What the router reckons with at the moment."""
        return self.router.config.timing

    def _asked(self, request: Request) -> RouteRequest:
        tokens = request.prompt + request.output
        apart = self._plan is None or divisible(request, self._plan)
        if request.pooling is not None and request.pooling.kind == "mean":
            names: tuple[int, ...] = ()  # it is computed whole wherever it goes
        else:
            names = page_names(tokens, PAGE_ROWS, request.namespace)
        room = self._room_of(request)
        return RouteRequest(request.id, names, len(tokens), divisible=apart, room_tokens=room)

    def _room_of(self, request: Request) -> int:
        """Tokens for which a worker must have KV memory so that it may get this request."""
        had = len(request.prompt) + len(request.output)
        most, wanted = self.kv_tokens or 0, had
        if request.pooling is None and self._plan is not None:
            context, asked = self._plan.max_context, request.params.max_tokens
            wanted = context if asked is None else max(had, min(context, len(request.prompt) + asked))
        return wanted if wanted <= most else min(most, max(had, int(ALIKE * most)))

    def _outgrew(self, post: Post) -> bool:
        """Whether a request for which this worker is too small may go on at another."""
        return any(other.kv_pages > post.kv_pages and other.down is None for other in self.posts)

    def _leave(self, id: str) -> Post | None:
        post = self._at.pop(id, None)
        if post is not None:
            del post.requests[id]
        return post

    # What posts say

    def post_ready(self, post: Post, plan: EnginePlan, warm: bool) -> None:
        """It holds no pages unless it is ``warm``, and knows no requests."""
        now = self._now()
        post.heard, post.cpu = now, None
        if self._measured is None:
            self._measured = MeasuredTiming(guess_timing(plan))
            self.router.set_timing(self._measured.timing)
            self._plan = plan
            if self.splits is not None:
                self.splits.ready(plan)
        self.router.add_worker(post.name, plan.kv_pages, now, empty=not warm)
        if self._first is not None and not self._first.done():
            self._first.set_result(plan)
        self._rescue()
        self._events.ready()

    def post_message(self, post: Post, message: Chunks | Pages | Refused) -> None:
        """News go to the router and to whoever has the requests."""
        now = self._now()
        post.heard, post.cpu = now, None
        if post.silent_since is not None:
            log.warning("worker %s speaks again, after %.1f s", post.name, now - post.silent_since)
            post.silent_since = None
        if post.taken_away and post.stuck_since is None:
            post.taken_away.clear()
        if isinstance(message, Chunks):
            self._chunks(post, message, now)
        elif isinstance(message, Pages):
            self.router.on_snapshot(post.name, message.snapshot, now)
        elif self._at.get(message.id) is post:
            self._leave(message.id)
            if self.splits is not None:
                self.splits.forget(message.id)
            if self._many:
                self.router.on_finish(message.id, now)
            if message.beyond_memory and self._outgrew(post):
                self._goes_on([message.id], post)
            else:
                self._events.refused(message)

    def _chunks(self, post: Post, message: Chunks, now: float) -> None:
        if message.events is not None:
            self.router.on_event(post.name, message.events, now)
        moved = False
        if message.chunks:
            # Others are of requests that were aborted, or taken away, a moment ago.
            chunks = [chunk for chunk in message.chunks if self._at.get(chunk.id) is post]
            done: list[Chunk] = []
            if self.splits is not None:
                self.splits.early(post.name, message.chunks)
                chunks, done = self.splits.read(chunks, now)
            outgrown: list[Chunk] = []
            if any(chunk.beyond_memory for chunk in chunks) and self._outgrew(post):
                outgrown = [chunk for chunk in chunks if chunk.beyond_memory]
                chunks = [chunk for chunk in chunks if not chunk.beyond_memory]
            for chunk in outgrown:
                self._progress(chunk, now)
            self._news(chunks, now)
            moved = True
            for chunk in done:
                self._hand_over(chunk, now)
            if outgrown:
                self._goes_on([chunk.id for chunk in outgrown], post)
        if (load := message.load) is not None:
            moved |= post.steps != load.steps
            post.steps, post.waiting = load.steps, load.waiting
            self._events.load(post.name, load)
            if self.splits is not None:
                self.splits.load(post.name, load)
            self.router.on_load(post.name, load, now)
        if message.steps and self._measured is not None:
            self._measured.add(message.steps)
            if now >= self._fit_due and self._measured.fit():
                self._fit_due = now + FIT_EVERY_S
                self.router.set_timing(self._measured.timing)
        if moved:
            self._events.progress()
            if post.stuck_since is not None:
                log.warning("worker %s gets on again, after %.1f s", post.name, now - post.stuck_since)
                post.stuck_since = None
                if not post.draining:
                    self.router.undrain(post.name)

    def _news(self, chunks: Sequence[Chunk], now: float) -> None:
        for chunk in chunks:
            self._progress(chunk, now)
        if chunks:
            self._events.news(chunks)

    def _goes_on(self, ids: Sequence[str], post: Post) -> None:
        """Of requests that this worker has given up, as it is too small for them."""
        log.info(
            "the KV memory of worker %s, %d tokens, is too small for %s: it goes on at a larger one",
            post.name,
            post.kv_pages * PAGE_ROWS,
            ", ".join(ids),
        )
        self.moved += len(ids)
        self._events.returned(ids, False)

    def _progress(self, chunk: Chunk, now: float) -> None:
        if chunk.finish is not None:
            self._leave(chunk.id)
        if not self._many:
            return
        router = self.router
        if chunk.cached_tokens is not None:  # the first
            router.on_prefill_done(chunk.id, now)
        elif chunk.tokens:
            router.on_token(chunk.id, len(chunk.tokens), now)
        if chunk.finish is not None:
            router.on_finish(chunk.id, now)

    def post_lost(self, post: Post, planned: bool) -> None:
        """What was there goes elsewhere at once."""
        self.router.remove_worker(post.name)
        if post.address is not None:
            self.posts = tuple(other for other in self.posts if other is not post)
        lost, suspects = list(post.requests), list(post.taken_away)
        if self.splits is not None:
            self.splits.lost(post.name, lost)
        for id in lost:
            del self._at[id]
        # A queue is served in order: those sent last were waiting in it, and have done nothing yet.
        computed = lost[: max(len(lost) - post.waiting, 0)]
        hung = post.silent_since is None
        took_requests = post.plan is not None
        post.plan = None
        post.requests.clear()
        if took_requests:
            self._events.lost(post.name, planned)
        if suspects and hung and not planned:
            self._events.suspected(suspects)
        self._events.returned(computed, died=not planned)
        self._events.returned(lost[len(computed) :], died=False)

    def post_down(self, post: Post) -> None:
        """As long as another is there, or may come, nobody suffers from it."""
        if all(other.down is not None for other in self.posts):
            self._events.down(post.down or "")

    # Deadlines

    def _tick(self) -> None:
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        now = self._now()
        for post in self.posts:
            self._watch(post, now)
        for action in self.router.tick(now):
            post = self._post(action.worker)
            if isinstance(action, routing.Resync):
                log.warning("asking worker %s for all its pages: %s", post.name, action.why)
                post.host.send(Resync())
            elif isinstance(action, routing.Silent):
                self._silent(post, action.why, now)
            else:
                self._overdue(post, action.request, action.why, now)
        self._events.room()

    def _watch(self, post: Post, now: float) -> None:
        """Whether a worker is still worth waiting for."""
        if post.plan is None:
            self._watch_start(post, now)
            return
        if now >= post.heard + QUIET_S:
            cpu = post.host.cpu_seconds()
            if post.cpu is None:
                post.cpu = cpu
            elif cpu is not None and cpu >= post.cpu + COMPUTES_S and now >= post.heard + 2 * QUIET_S:
                # In a long step. How long that may be is for the deadlines of its requests to say.
                post.cpu = cpu
                post.heard = now
                post.silent_since = None
                self.router.on_life(post.name, now)
        hang_s = max(self._hang_after_s, 10 * self.timing.chunk(self.timing.chunk_tokens))
        if post.silent_since is not None and now >= post.silent_since + KILL_AFTER_S:
            self._kill(post, f"said nothing and computed nothing for {now - post.heard:.1f} s")
        elif post.stuck_since is not None and now >= post.stuck_since + hang_s:
            self._kill(post, f"got on with nothing for more than {now - post.stuck_since:.1f} s")

    def _watch_start(self, post: Post, now: float) -> None:
        cpu = post.host.cpu_seconds()
        if cpu is None or post.cpu is None or cpu != post.cpu:
            post.cpu, post.heard = cpu, now
        elif now >= post.heard + START_STILL_S:
            post.heard = now
            self._kill(post, f"is starting, and has computed nothing for {START_STILL_S:g} s")

    def _kill(self, post: Post, why: str) -> None:
        log.error("killing worker %s: it %s", post.name, why)
        post.host.kill()

    def _silent(self, post: Post, why: str, now: float) -> None:
        log.warning("worker %s is silent (%s); %d requests there", post.name, why, len(post.requests))
        post.silent_since = now
        self._rescue()

    def _overdue(self, post: Post, id: str, why: str, now: float) -> None:
        """The router has forgotten this request. It goes elsewhere, if there is an elsewhere."""
        if self._at.get(id) is not post:
            return
        if post.stuck_since is None and post.silent_since is None:
            log.warning("worker %s is stuck: %s, %s; it gets nothing new", post.name, id, why)
            post.stuck_since = now
            self.router.drain(post.name)
        request = RouteRequest(id, (), 1)
        self.router.assign(request, post.name, now)
        self._rescue()

    def _rescue(self) -> None:
        """Takes all requests from workers that do not get on, if others do."""
        for post in self.posts:
            if (post.stuck_since is not None or post.silent_since is not None) and self._elsewhere(post):
                self._move_all(post, died=False)

    def _elsewhere(self, post: Post) -> bool:
        return any(name != post.name for name in self.router.usable())

    def _move_all(self, post: Post, died: bool) -> None:
        ids = list(post.requests)
        if not post.draining:
            post.taken_away.update(post.requests)
        for id in ids:
            self.abort(id)
        if ids:
            log.warning("%d requests leave worker %s, and go on elsewhere", len(ids), post.name)
            self.moved += len(ids)
            self._events.returned(ids, died)


class _Reason:
    """A decision's reason, made when a log line is."""

    def __init__(self, decision: routing.Decision) -> None:
        self._decision = decision

    def __str__(self) -> str:
        return self._decision.reason
