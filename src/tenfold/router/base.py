"""What goes into the router and what comes out of it."""

from __future__ import annotations

import msgspec

from tenfold.router.policies import Policy
from tenfold.router.timing import WorkerTiming


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the router decides and how long it waits."""

    timing: WorkerTiming
    """Cost curves of a worker, until `Router.add_worker` says otherwise."""
    page_tokens: int
    policy: Policy = "cache-aware"
    seed: int = 0
    """Of policy ``random``."""
    expected_output: float = 256.0
    """Tokens that a request is taken to generate until answers have been seen."""
    resync_timeout_s: float = 2.0
    """A snapshot that has not come after this long is asked for again."""
    event_lag_s: float = 1.0
    """A worker's load may be this far ahead of its events before those count as lost."""
    silence_s: float = 3.0
    """A worker that says nothing for this long is reported as silent."""
    late_factor: float = 10.0
    late_floor_s: float = 5.0
    """A request is overdue when neither it nor its worker has made any progress for ``late_floor_s`` plus
    ``late_factor`` times the seconds that its first token was expected to take."""
    lost_s: float = 120.0
    """A request is overdue after this long without a token, whatever its worker does otherwise."""


class RouteRequest(msgspec.Struct, frozen=True):
    """A request as the router knows it."""

    id: str
    names: tuple[int, ...]
    """Of the prompt's full pages (`tenfold.router.names`)."""
    prompt_tokens: int
    expected_output: int | None = None
    """Tokens that it will generate, if anyone knows."""
    session: str | None = None
    """Whose conversation it belongs to: where that was last counts while a worker's pages are not known."""
    divisible: bool = True
    """Whether one worker may compute its prompt and another its answer; not so if that ends with its first
    token."""
    room_tokens: int = 0
    """Only workers that have pages for so many tokens get it: those that it may come to have. 0: any
    worker."""


class Cost(msgspec.Struct, frozen=True):
    """What sending a request to a worker is expected to cost; seconds."""

    wait: float
    """Until its prompt's turn comes."""
    prefill: float
    """For the part of its prompt that is not there."""
    shared: float
    """For the prompt before it, whose step it fills up."""
    streams: float
    """For the tokens of the streams there and its own, weighed."""
    displaced: float
    """To compute again what is likely to be wanted of the pages that it drives out."""

    @property
    def total(self) -> float:
        """All together."""
        return self.wait + self.prefill + self.shared + self.streams + self.displaced


class SplitChoice(msgspec.Struct, frozen=True):
    """Whether a request's prompt is computed by a worker for prefill and its answer by one for decode."""

    split: bool
    why: str
    """One of `tenfold.router.split.REASONS`."""
    apart: float | None = None
    """What that was expected to cost, in seconds,"""
    together: float | None = None
    """and what a decode worker alone; None: there was no choice."""


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes, and why."""

    request: str
    worker: str
    policy: Policy
    overlap_tokens: int
    """Of the prompt, that the worker is known to have."""
    best_overlap_tokens: int
    """That any worker has."""
    cost: Cost
    deadline: float
    """When a first token is overdue."""
    workers: int
    """How many there were to choose from."""
    choice: SplitChoice | None = None
    """None: all workers do both."""

    @property
    def reason(self) -> str:
        """One line for the log."""
        cost = self.cost
        choice = self.choice
        parts = ""
        if choice is not None:
            parts = f"; {'split' if choice.split else 'not split'}: {choice.why}"
            if choice.apart is not None and choice.together is not None:
                parts += f" (apart {choice.apart:.3f} s, together {choice.together:.3f} s)"
        spilled = (
            f", {self.best_overlap_tokens} elsewhere"
            if self.best_overlap_tokens > self.overlap_tokens
            else ""
        )
        return (
            f"{self.request} to {self.worker} of {self.workers} ({self.policy}): {self.overlap_tokens} "
            f"tokens there{spilled}; wait {cost.wait:.3f} s, prefill {cost.prefill:.3f} s, "
            f"shared {cost.shared:.3f} s, streams {cost.streams:.3f} s, displaced {cost.displaced:.3f} s"
            f"{parts}"
        )


class Resync(msgspec.Struct, frozen=True):
    """Ask this worker for a `KVSnapshot`, and hand it to `Router.on_snapshot`."""

    worker: str
    why: str


class Overdue(msgspec.Struct, frozen=True):
    """This request shows no progress: abort it there and send it elsewhere. The router has forgotten it."""

    request: str
    worker: str
    why: str


class Silent(msgspec.Struct, frozen=True):
    """Nothing has come from this worker for too long; no new request is sent there until something does."""

    worker: str
    why: str


Action = Resync | Overdue | Silent


class RouterCounts(msgspec.Struct, kw_only=True):
    """What happened so far; for metrics."""

    routed: int = 0
    prompt_tokens: int = 0
    overlap_tokens: int = 0
    spilled: int = 0
    """Sent to a worker although another had more of the prompt."""
    event_batches: int = 0
    gaps: int = 0
    """Streams of events found broken, by a gap, by load ahead of them, or by pages that cannot be."""
    resyncs: int = 0
    """Snapshots taken up."""
    overdue: int = 0
    silent: int = 0
    strays: int = 0
    """Messages of workers or about requests that are not known (any more)."""
