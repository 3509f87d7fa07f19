"""A worker in simulation: continuous batching with chunked prefill over a page cache, timed by cost curves.

Each step first gives every decoding sequence its token, then the prompts in progress, then waiting ones,
first come first served, up to `WorkerTiming.chunk_tokens` rows. Steps without prompt tokens differ only in
their length, so a run of them is one event: its length has a closed form, and who comes in between is taken
up at the end of the step that is running.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tenfold.bench.simulate_cache import Eviction, SimulatedCache
from tenfold.protocol import KVEvent
from tenfold.router.timing import WorkerTiming

_LONGEST_RUN_S = 1.0
"""A run is news of its tokens at its end, so it must not be longer than a front would wait for news."""
OUTPUT_NAMES = 1 << 63
"""Pages of generated tokens have names of their own from here on: traces do not say what was generated."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on a worker."""

    id: int
    names: tuple[int, ...]
    prompt: int
    """Tokens to have in the cache before the next one is drawn: on resumption with those drawn already."""
    output: int
    """Tokens still to draw."""
    arrived: float
    done: int = 0
    """Rows computed or shared."""
    cached: int = 0
    drawn: int = 0
    published: int = 0
    """Names published or shared."""
    pages: int = 0
    own: list[int] = field(default_factory=list)
    """All names that it owns, in order."""


@dataclass(slots=True)
class StepNews:
    """What a run of steps brought."""

    began: list[Sequence] = field(default_factory=list)
    """Whose prompt was begun in these steps."""
    first: list[Sequence] = field(default_factory=list)
    """Got their first token here."""
    finished: list[Sequence] = field(default_factory=list)
    drew: list[tuple[Sequence, int]] = field(default_factory=list)
    """Further tokens that came."""
    events: tuple[KVEvent, ...] = ()
    seconds: float = 0.0
    """Length of a step, on the mean."""
    rows: int = 0
    """Gaps between tokens of that length: decoding sequences times steps."""


class SimulatedWorker:
    """One worker. `submit` and `finish_steps` say when the steps that are running end; whoever drives it
    calls `finish_steps` then."""

    def __init__(
        self, timing: WorkerTiming, pages: int, page_tokens: int, eviction: Eviction, max_running: int
    ) -> None:
        self.timing = timing
        self.page_tokens = page_tokens
        self.max_running = max_running
        self.slowdown = 1.0
        self.cache = SimulatedCache(pages, eviction)
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.context = 0
        """Rows of the decoding sequences together."""
        self.ends: float | None = None
        """When the steps that are running end; None: idle."""
        self.busy = 0.0
        self.steps = 0
        self.preemptions = 0
        self._began = 0.0
        self._runs = 0
        """Steps of the decoding run in progress; 0: a step with prompt tokens, or idle."""
        self._chunks: list[tuple[Sequence, int]] = []
        self._opened: list[Sequence] = []
        self._output_name = OUTPUT_NAMES

    @property
    def requests(self) -> int:
        """Requests here."""
        return len(self.waiting) + len(self.prefilling) + len(self.decoding)

    def submit(self, sequence: Sequence, now: float) -> None:
        """Takes a request up; a run of decoding steps is cut short for it. An idle worker waits for `start`,
        so that requests of one moment share a step."""
        self.waiting.append(sequence)
        if self.ends is not None and self._runs > 1:
            done = self._steps_by(now)
            if done < self._runs:
                self._runs = done
                self.ends = self._began + self._run_seconds(done)

    def start(self, now: float) -> None:
        """Begins a step, if none is running and there is anything to do."""
        if self.ends is None:
            self._begin(now)

    def abort(self, request: int) -> None:
        """Forgets a request, at once."""
        for group in (self.waiting, self.prefilling, self.decoding):
            for sequence in group:
                if sequence.id == request:
                    if group is self.decoding:
                        self.context -= sequence.done
                    group.remove(sequence)
                    self._close(sequence)
                    self._chunks = [chunk for chunk in self._chunks if chunk[0] is not sequence]
                    return

    def receive(self, names: tuple[int, ...]) -> int:
        """Pages come from another worker, as far as there is room; returns how many were not here."""
        here = self.cache.match(names)
        self.cache.share(names[:here])
        more = names[here : here + self.cache.available]
        self.cache.take(len(more))
        self.cache.publish(more)
        self.cache.release(names[: here + len(more)], 0)
        return len(more)

    def prefill_left(self) -> int:
        """Prompt tokens that wait to be computed, as far as is known without a look at the cache."""
        return sum(s.prompt - s.done for s in self.prefilling) + sum(s.prompt for s in self.waiting)

    def finish_steps(self) -> StepNews:
        """Ends the running steps at `ends` and begins the next."""
        assert self.ends is not None
        now = self.ends
        self.busy += now - self._began
        news = StepNews(began=self._opened)
        self._opened = []
        steps = max(1, self._runs)
        self.steps += steps
        news.seconds = (now - self._began) / steps
        news.rows = steps * len(self.decoding)
        for sequence in self.decoding:
            news.drew.append((sequence, steps))
            sequence.drawn += steps
            sequence.done += steps
            sequence.output -= steps
        self.context += steps * len(self.decoding)
        for sequence in [s for s in self.decoding if not s.output]:
            self.decoding.remove(sequence)
            self._finish(sequence, news)
        for sequence, tokens in self._chunks:
            sequence.done += tokens
            self._publish(sequence)
            if sequence.done == sequence.prompt:
                self.prefilling.remove(sequence)
                sequence.drawn += 1
                sequence.output -= 1
                news.first.append(sequence)
                if sequence.output:
                    sequence.done += 1
                    self.decoding.append(sequence)
                    self.context += sequence.done
                else:
                    self._finish(sequence, news)
        self._grow()
        self._begin(now)
        news.events = self.cache.events()
        return news

    def _begin(self, now: float) -> None:
        self._began = now
        self._chunks = []
        self._runs = 0
        budget = self.timing.chunk_tokens - len(self.decoding)
        total = 0
        for sequence in self.prefilling:
            tokens = min(budget - total, sequence.prompt - sequence.done)
            if tokens > 0:
                self._chunks.append((sequence, tokens))
                total += tokens
        while (
            self.waiting and total < budget and len(self.prefilling) + len(self.decoding) < self.max_running
        ):
            sequence = self.waiting[0]
            if not self._open(sequence):
                break
            self.waiting.popleft()
            self.prefilling.append(sequence)
            self._opened.append(sequence)
            tokens = min(budget - total, sequence.prompt - sequence.done)
            self._chunks.append((sequence, tokens))
            total += tokens
        if total:
            seconds = self.timing.chunk(total) + self.timing.decode(len(self.decoding), self.context)
            self.ends = now + seconds * self.slowdown
        elif self.decoding:
            self._runs = min(sequence.output for sequence in self.decoding)
            room = (self.cache.available // len(self.decoding) - 1) * self.page_tokens
            step = self.timing.decode(len(self.decoding), self.context) * self.slowdown
            self._runs = max(1, min(self._runs, room, int(_LONGEST_RUN_S / step)))
            self.ends = now + self._run_seconds(self._runs)
        else:
            self.ends = None

    def _run_seconds(self, steps: int) -> float:
        """Length of ``steps`` decoding steps: a sum of squares."""
        rows, n = len(self.decoding), steps
        timing = self.timing
        one = rows * n * (n - 1) / 2
        context = n * self.context + one
        square = n * self.context**2 + 2 * self.context * one + rows**2 * (n - 1) * n * (2 * n - 1) / 6
        return self.slowdown * (
            n * (timing.decode_step + timing.decode_row * rows)
            + timing.decode_context * context
            + timing.decode_context2 * square
        )

    def _steps_by(self, now: float) -> int:
        """Steps of the run that will have ended when the one that is running at ``now`` ends."""
        low, high = 1, self._runs
        while low < high:
            middle = (low + high) // 2
            if self._began + self._run_seconds(middle) >= now:
                high = middle
            else:
                low = middle + 1
        return low

    def _open(self, sequence: Sequence) -> bool:
        """Finds what is there and takes pages for the rest of the prompt."""
        reusable = min(len(sequence.names), (sequence.prompt - 1) // self.page_tokens)
        names = sequence.names[:reusable]
        shared = self.cache.match(names)
        names = names[:shared]
        self.cache.share(names)
        missing = -(-sequence.prompt // self.page_tokens) - shared
        if self.cache.available < missing:
            self.cache.release(names, 0)
            return False
        self.cache.take(missing)
        sequence.pages = shared + missing
        sequence.own = list(names)
        sequence.published = shared
        sequence.done = sequence.cached = shared * self.page_tokens
        return True

    def _publish(self, sequence: Sequence) -> None:
        full = min(len(sequence.names), sequence.done // self.page_tokens)
        if full > sequence.published:
            names = sequence.names[sequence.published : full]
            self.cache.publish(names)
            sequence.own.extend(names)
            sequence.published = full

    def _grow(self) -> None:
        """Room for the rows that were drawn; who finds none goes back to the queue, the youngest first."""
        for sequence in list(self.decoding):
            missing = -(-sequence.done // self.page_tokens) - sequence.pages
            while missing > 0 and sequence in self.decoding:
                if self.cache.available >= missing:
                    self.cache.take(missing)
                    sequence.pages += missing
                    break
                self._preempt()

    def _preempt(self) -> None:
        victims = self.prefilling or self.decoding
        victim = victims.pop()
        if victims is self.decoding:
            self.context -= victim.done
            victim.prompt = victim.done
        self._close(victim)
        self.waiting.appendleft(victim)
        self.preemptions += 1

    def _finish(self, sequence: Sequence, news: StepNews) -> None:
        self.context -= sequence.done if sequence.done > sequence.prompt else 0
        self._take_missing(sequence)
        full = min((sequence.done - 1) // self.page_tokens, sequence.pages)
        if full > len(sequence.own):
            fresh = range(self._output_name, self._output_name + full - len(sequence.own))
            self._output_name = fresh.stop
            self.cache.publish(fresh)
            sequence.own.extend(fresh)
        self._close(sequence)
        news.finished.append(sequence)

    def _take_missing(self, sequence: Sequence) -> None:
        missing = max(0, -(-sequence.done // self.page_tokens) - sequence.pages)
        missing = min(missing, self.cache.available)
        self.cache.take(missing)
        sequence.pages += missing

    def _close(self, sequence: Sequence) -> None:
        self.cache.release(sequence.own, sequence.pages - len(sequence.own))
        sequence.own = []
        sequence.pages = sequence.done = 0
