"""Many workers and a router in simulated time: the router is the very code that serves; workers, front and
wires are simulated (`simulate_worker`, and here).

The front holds every request until its one terminal event. When a worker dies it sends the requests that were
there, with the tokens that they have, to another; when a request shows no progress it takes it away; when
there is no worker it keeps the request until its deadline. All that is random comes from the seed.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from typing import Any

from tenfold.bench.mooncake import TraceRequest
from tenfold.bench.simulate_base import Outcome, Process, Run, SimulationConfig, SimulationError
from tenfold.bench.simulate_faults import Fault
from tenfold.bench.simulate_worker import Sequence as WorkerSequence
from tenfold.bench.simulate_worker import SimulatedWorker, StepNews
from tenfold.protocol import KVEvents, KVSnapshot, LoadSnapshot
from tenfold.router.base import Decision, Overdue, Resync, RouterConfig, RouteRequest
from tenfold.router.router import Router
from tenfold.router.split import SplitRouter

_ARRIVE, _ROUTE, _START, _STEP, _LATER = range(5)
"""What comes first at one moment."""
_SETTLE_S = 30.0
"""After a request or a fault: time for lost events to be noticed and healed."""


class Simulation:
    """One run: `run` once."""

    def __init__(self, config: SimulationConfig, trace: Sequence[TraceRequest]) -> None:
        self.config = config
        self.trace = trace
        self.now = 0.0
        self._queue: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0
        self._processes: dict[str, Process] = {}
        self._unended = len(trace)
        self._under_way = 0
        """Requests that have arrived and not ended."""
        self._pending: list[int] = []
        """Requests that no worker takes."""
        self._to_route: list[int] = []
        self._taking: dict[int, str | None] = {}
        """Who reads along with a prefill."""
        self._settle_until = 0.0
        self.run_ = Run(
            [Outcome(request.arrival) for request in trace], [], {}, {}, [], self._new_router(), 0.0
        )

    def run(self) -> Run:
        """Runs until every request has ended and the router's index has had time to settle. Raises
        SimulationError where a promise is broken."""
        for number in range(self.config.workers):
            self._birth(number)
        for number, request in enumerate(self.trace):
            self._at(request.arrival, _ARRIVE, self._arrive, number)
        for fault in self.config.faults:
            self._at(fault.at, _LATER, self._fault, fault)
        self._at(0.0, _LATER, self._heartbeat)
        while self._queue:
            self.now, _, _, call, arguments = heapq.heappop(self._queue)
            call(*arguments)
        self._verify()
        return self.run_

    # The front

    def _arrive(self, number: int) -> None:
        self._under_way += 1
        self._at(self.now + self.config.deadline_s, _LATER, self._expire, number)
        self._dispatch(number)

    def _dispatch(self, number: int) -> None:
        """To be routed, together with all else of this moment."""
        if not self._to_route:
            self._at(self.now, _ROUTE, self._route)
        self._to_route.append(number)

    def _route(self) -> None:
        numbers, self._to_route = self._to_route, []
        asked = [self._asked(number) for number in numbers]
        began = time.thread_time()
        decisions = self.run_.router.route_all(asked, self.now)
        taken = (time.thread_time() - began) / len(asked)
        for request, decision in decisions:
            self.run_.decision_s.append(taken)
            self._send(int(request.id), decision)

    def _asked(self, number: int) -> RouteRequest:
        request = self.trace[number]
        tokens = request.prompt_tokens + self.run_.outcomes[number].tokens
        left = request.output_tokens - self.run_.outcomes[number].tokens
        return RouteRequest(str(number), request.names, tokens, divisible=left > 1)

    def _send(self, number: int, decision: Decision | None) -> None:
        outcome = self.run_.outcomes[number]
        if decision is None:
            self._pending.append(number)
            return
        outcome.worker = decision.worker
        outcome.split = False
        if (choice := decision.choice) is not None:
            outcome.split = choice.split
            self.run_.choices[f"{'split' if choice.split else 'not split'}: {choice.why}"] += 1
        self.run_.routed[decision.worker] = self.run_.routed.get(decision.worker, 0) + 1
        process = self._processes.get(decision.worker)
        if process is None:
            return  # It died a moment ago; the request comes back when the front learns of that.
        self._submit(process, number)

    def _submit(self, process: Process, number: int) -> None:
        request, outcome = self.trace[number], self.run_.outcomes[number]
        rest = 1 if outcome.split else request.output_tokens - outcome.tokens
        process.worker.submit(
            WorkerSequence(number, request.names, request.prompt_tokens + outcome.tokens, rest, self.now),
            self.now,
        )
        self._wake(process)

    def _hand_over(self, number: int) -> None:
        """Its prompt is computed: it goes on where the router says, when its last pages are there."""
        outcome = self.run_.outcomes[number]
        outcome.split = False
        ahead, router = self._taking.pop(number, None), self.run_.router
        assert isinstance(router, SplitRouter)
        worker = outcome.worker = router.hand_over(str(number), self.now)
        if worker is None:
            self._dispatch(number)
            return
        self.run_.routed[worker] = self.run_.routed.get(worker, 0) + 1
        config, pages = self.config, self.trace[number].prompt_tokens // self.config.page_tokens
        late = pages
        if ahead == worker:  # All but the last step's pages came along with the prefill.
            self.run_.transfers.ahead += 1
            late = min(pages, -(-config.timing.chunk_tokens // config.page_tokens))
        seconds = config.transfer.start_s + late * config.transfer.page_s
        self._at(self.now + seconds, _LATER, self._took_over, number, (worker, outcome.resumed), seconds)

    def _took_over(self, number: int, sent: tuple[str, int], seconds: float) -> None:
        request, outcome = self.trace[number], self.run_.outcomes[number]
        process = self._processes.get(sent[0])
        if process is None or outcome.ended is not None or (outcome.worker, outcome.resumed) != sent:
            return  # Somebody died, or gave up: it went on elsewhere, or will.
        transfers = self.run_.transfers
        transfers.requests += 1
        transfers.seconds += seconds
        transfers.pages += process.worker.receive(
            request.names[: request.prompt_tokens // self.config.page_tokens]
        )
        self._submit(process, number)

    def _retry_pending(self) -> None:
        waiting, self._pending = self._pending, []
        for number in waiting:
            if self.run_.outcomes[number].ended is None:
                self._dispatch(number)

    def _expire(self, number: int) -> None:
        outcome = self.run_.outcomes[number]
        if outcome.ended is None:
            self._take_away(number)
            self.run_.router.on_finish(str(number), self.now)
            self._end(number, "deadline")

    def _take_away(self, number: int) -> None:
        outcome = self.run_.outcomes[number]
        process = self._processes.get(outcome.worker or "")
        if process is not None:
            process.worker.abort(number)
        outcome.worker = None

    def _end(self, number: int, how: str) -> None:
        outcome = self.run_.outcomes[number]
        if outcome.ended is not None:
            raise SimulationError(f"request {number} ended twice: {outcome.ended}, then {how}")
        outcome.ended = how
        outcome.worker = None
        self._unended -= 1
        self._under_way -= 1
        self.run_.seconds = self.now
        self._settle(0.0)

    def _settle(self, seconds: float) -> None:
        self._settle_until = max(self._settle_until, self.now + seconds + _SETTLE_S)

    # Workers

    def _birth(self, number: int) -> None:
        config = self.config
        name = config.name(number)
        worker = SimulatedWorker(
            config.timing, config.pages, config.page_tokens, config.eviction, config.max_running
        )
        self._processes[name] = Process(name, number, worker, lag=config.event_lag_s)
        self.run_.router.add_worker(name, config.pages, self.now)
        self._retry_pending()

    def _wake(self, process: Process) -> None:
        if process.worker.ends is not None:
            self._schedule_step(process)
        elif not process.steps_wanted:
            process.steps_wanted = True
            at = max(self.now, process.stalled_until)
            self._at(at, _START, self._start, process)

    def _start(self, process: Process) -> None:
        process.steps_wanted = False
        process.worker.start(self.now)
        self._schedule_step(process)

    def _schedule_step(self, process: Process) -> None:
        if process.worker.ends is not None:
            self._at(process.worker.ends, _STEP, self._step, process, process.worker.ends)

    def _step(self, process: Process, ends: float) -> None:
        worker = process.worker
        if worker.ends != ends or self._processes.get(process.name) is not process:
            return  # Cut short, delayed, or of a process that is dead.
        if self.now < process.stalled_until:
            worker.ends = process.stalled_until
            self._schedule_step(process)
            return
        news = worker.finish_steps()
        self.run_.gaps.append((news.seconds, news.rows))
        self._tell(process, news)
        self._schedule_step(process)

    def _tell(self, process: Process, news: StepNews) -> None:
        """The front hears of a step's tokens, the router of its pages."""
        router = self.run_.router
        for sequence in news.began:
            if self.run_.outcomes[sequence.id].split and isinstance(router, SplitRouter):
                self._taking[sequence.id] = router.take(str(sequence.id), self.now)
        for sequence in news.first:
            outcome = self.run_.outcomes[sequence.id]
            if outcome.first is None:
                outcome.first = self.now
                outcome.cached = sequence.cached
            outcome.tokens += 1
            outcome.last = self.now
            router.on_prefill_done(str(sequence.id), self.now)
        for sequence, tokens in news.drew:
            outcome = self.run_.outcomes[sequence.id]
            outcome.tokens += tokens
            outcome.last = self.now
            router.on_token(str(sequence.id), tokens, self.now)
        for sequence in news.finished:
            if self.run_.outcomes[sequence.id].split:
                self._hand_over(sequence.id)
                continue
            router.on_finish(str(sequence.id), self.now)
            self._end(sequence.id, "finished")
        if news.events:
            process.sequence += 1
            if self.now >= process.losing_until:
                batch = KVEvents(sequence=process.sequence, events=news.events)
                if process.lag:
                    self._at(self.now + process.lag, _LATER, self._deliver, process, batch)
                else:
                    self._deliver(process, batch)

    def _deliver(self, process: Process, message: KVEvents | KVSnapshot | LoadSnapshot) -> None:
        """A message reaches the router, unless its sender is known to be dead or lives anew."""
        if self._processes.get(process.name) is not process:
            return
        router = self.run_.router
        if isinstance(message, KVEvents):
            router.on_event(process.name, message, self.now)
        elif isinstance(message, KVSnapshot):
            router.on_snapshot(process.name, message, self.now)
        else:
            router.on_load(process.name, message, self.now)

    def _heartbeat(self) -> None:
        """Every worker that can tells its load; then the router looks at its deadlines."""
        for process in self._processes.values():
            if self.now >= process.stalled_until:
                self._deliver(process, process.load())
        router = self.run_.router
        for action in router.tick(self.now):
            kind = type(action).__name__.lower()
            self.run_.said[kind] = self.run_.said.get(kind, 0) + 1
            if isinstance(action, Resync):
                self._resync(action.worker)
            elif isinstance(action, Overdue):
                number = int(action.request)
                self._take_away(number)
                self.run_.outcomes[number].resumed += 1
                self._dispatch(number)
        if router.next_tick() <= self.now:
            raise SimulationError(f"at {self.now:.3f} s something is waited for beyond its deadline")
        self._retry_pending()
        due = self.now + self.config.heartbeat_s
        if self._under_way or self.now < self._settle_until:
            self._at(due, _LATER, self._heartbeat)
        elif self._unended:
            # Nobody waits, and nothing is to be healed: on to when something happens again.
            self._at(max(due, self._queue[0][0]), _LATER, self._heartbeat)

    def _resync(self, name: str) -> None:
        process = self._processes.get(name)
        if process is not None and self.now >= max(process.stalled_until, process.losing_until):
            snapshot = KVSnapshot(sequence=process.sequence, names=tuple(process.worker.cache.names()))
            self._at(self.now + process.lag, _LATER, self._deliver, process, snapshot)

    # Faults

    def _fault(self, fault: Fault) -> None:
        if self._unended:
            self._settle(fault.seconds)
        if fault.kind == "restart-router":
            self._restart_router()
            return
        process = self._processes.get(self.config.name(fault.worker))
        if process is None or not self._unended:
            return
        if fault.kind == "kill":
            del self._processes[process.name]
            self._at(self.now + self.config.detect_s, _LATER, self._bury, process.name)
            self._at(self.now + self.config.detect_s + fault.seconds, _LATER, self._birth, fault.worker)
        elif fault.kind == "stall":
            process.stalled_until = self.now + fault.seconds
        elif fault.kind == "slow":
            process.worker.slowdown = fault.amount
            self._at(self.now + fault.seconds, _LATER, self._recover, process)
        elif fault.kind == "lose-events":
            process.losing_until = self.now + fault.seconds
        elif fault.kind == "lag-events":
            process.lag = fault.amount
            self._at(self.now + fault.seconds, _LATER, self._recover, process)

    def _recover(self, process: Process) -> None:
        process.worker.slowdown = 1.0
        process.lag = self.config.event_lag_s

    def _bury(self, name: str) -> None:
        """The front learns that a worker is dead: its requests go elsewhere, with the tokens they have."""
        self.run_.router.remove_worker(name)
        for number, outcome in enumerate(self.run_.outcomes):
            if outcome.worker == name and outcome.ended is None:
                outcome.worker = None
                outcome.resumed += 1
                self._dispatch(number)

    def _restart_router(self) -> None:
        """The router forgets everything; the front tells it of the workers and of the requests on them."""
        router = self._new_router()
        known = self.run_.router.workers()
        self.run_.router = router
        for name in known:
            router.add_worker(name, self.config.pages, self.now, empty=False)
        for number, outcome in enumerate(self.run_.outcomes):
            if outcome.worker is None or outcome.ended is not None:
                continue
            router.assign(self._asked(number), outcome.worker, self.now)

    # Odds and ends

    def _router_config(self) -> RouterConfig:
        config = self.config
        return RouterConfig(
            timing=config.timing, page_tokens=config.page_tokens, policy=config.policy, seed=config.seed
        )

    def _new_router(self) -> Router:
        config = self.config
        if config.prefill:
            return SplitRouter(self._router_config(), config.roles(), config.transfer)
        return Router(self._router_config())

    def _at(self, when: float, rank: int, call: Callable[..., None], *arguments: object) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (when, rank, self._pushed, call, arguments))

    def _verify(self) -> None:
        for number, outcome in enumerate(self.run_.outcomes):
            if outcome.ended is None:
                raise SimulationError(f"request {number} is lost")
            if outcome.ended == "finished" and outcome.tokens != self.trace[number].output_tokens:
                raise SimulationError(f"request {number} has {outcome.tokens} tokens")
        router = self.run_.router
        router.check()
        for process in self._processes.values():
            if not router.in_step(process.name):
                raise SimulationError(f"the pages of {process.name} are still not known")
            if router.pages(process.name) != process.worker.cache.names():
                raise SimulationError(f"the index is wrong about {process.name}")
            self.run_.busy[process.name] = process.worker.busy
            self.run_.preemptions += process.worker.preemptions
        self.run_.resumed = sum(outcome.resumed for outcome in self.run_.outcomes)
