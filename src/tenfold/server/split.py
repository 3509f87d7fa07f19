"""Requests whose prompt one worker computes and whose answer another goes on with, between the two.

Such a request goes to its prefill worker as ``prefill_only``. When that begins, it says where its pages will
be (a handoff), and the decode worker that the router chose is told to read along (`Fetch`). When its first
token comes, the request goes to the decode worker, under the same id: to whoever has it (`Flights`) nothing
has happened. The decode worker finds that token beside the pages, and may be ahead of us: what it says before
the prefill worker's word has come is kept until then. Whatever is lost on the way (the handoff, pages, a
worker) is computed by the decode worker, from the tokens that were sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from tenfold.protocol import (
    Abort,
    Chunk,
    EnginePlan,
    EngineSettings,
    Fetch,
    FrontMessage,
    Generate,
    LoadSnapshot,
    Request,
    TransferCounts,
    WorkerRole,
)
from tenfold.router.split import SplitRouter, TransferTiming

Send = Callable[[str, FrontMessage], None]
"""To a worker, by its name."""


def places(settings: EngineSettings) -> list[tuple[str, WorkerRole]]:
    """Names and roles of a server's workers."""
    if not settings.prefill_workers:
        return [(f"w{number}", "mixed") for number in range(settings.workers)]
    prefill: list[tuple[str, WorkerRole]] = [
        (f"p{number}", "prefill") for number in range(settings.prefill_workers)
    ]
    return prefill + [(f"d{number}", "decode") for number in range(settings.workers - len(prefill))]


def settings_of(settings: EngineSettings, name: str) -> EngineSettings:
    """Those of one worker of a server; ``name`` may have its model's before it."""
    role = dict(places(settings)).get(name.rpartition("/")[2], settings.role)
    return settings if role == settings.role else replace(settings, role=role)


def divisible(request: Request, plan: EnginePlan) -> bool:
    """Whether a request has more than one token to come, as far as can be known before."""
    if request.pooling is not None:
        return False
    had = len(request.prompt) + len(request.output)
    most = request.params.max_tokens
    left = plan.max_context - had
    return (left if most is None else min(left, most - len(request.output))) > 1


class Split:
    """A request on its prefill worker."""

    __slots__ = ("early", "fetching", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.fetching: str | None = None
        """The decode worker that reads along."""
        self.early: list[Chunk] = []
        """What it has said of the request."""


class Splits:
    """The split requests of a fleet; the fleet owns it."""

    def __init__(self, router: SplitRouter, send: Send) -> None:
        self._router = router
        self._send = send
        self._here: dict[str, Split] = {}
        self._transfers: dict[str, TransferCounts] = {}
        """The latest of each worker."""
        self._measured = False
        self.not_exported = 0
        """Requests that came from their prefill worker without pages."""

    def ready(self, plan: EnginePlan) -> None:
        """The size of a page is known."""
        if not self._measured:
            self._router.transfer = TransferTiming.guess(plan.page_bytes)

    def begin(self, request: Request) -> Request:
        """What to send to the prefill worker of a request that was split."""
        self._here[request.id] = Split(request)
        return replace(request, prefill_only=True)

    def read(self, chunks: Iterable[Chunk], now: float) -> tuple[list[Chunk], list[Chunk]]:
        """News of workers, as they are to be passed on, and the chunks of those with which prefill workers
        are done: they are to be handed over (`next`)."""
        passed, done = [], []
        for chunk in chunks:
            split = self._here.get(chunk.id)
            if split is None:
                passed.append(chunk)
            elif chunk.finish == "length" and chunk.tokens:
                done.append(chunk)
                passed.append(replace(chunk, finish=None, handoff=None))
            else:
                if chunk.finish is not None:
                    self.forget(chunk.id)
                elif chunk.handoff is not None:
                    self._fetch(split, chunk.handoff, now)
                passed.append(chunk)
        return passed, done

    def early(self, worker: str, chunks: Iterable[Chunk]) -> None:
        """News of requests that are not on this worker, as far as is known here."""
        for chunk in chunks:
            split = self._here.get(chunk.id)
            if split is not None and split.fetching == worker:
                split.early.append(chunk)

    def next(self, chunk: Chunk, now: float) -> tuple[str, Generate, list[Chunk]] | None:
        """Where a request goes on, what to say there, and what was said there already; None: there is nobody.
        The prefill worker has forgotten it."""
        split = self._here.pop(chunk.id)
        worker = self._router.hand_over(chunk.id, now)
        if split.fetching not in (None, worker):
            self._stop(split, chunk.id)
        if worker is None:
            return None
        request = split.request
        if chunk.handoff is None:
            self.not_exported += 1
        elif split.fetching is None and self._router.role(worker) != "prefill":
            self._send(worker, Fetch(request=replace(request, handoff=chunk.handoff)))
        output = request.output + chunk.tokens
        told = Generate(request=replace(request, output=output, handoff=chunk.handoff))
        return worker, told, split.early if split.fetching == worker else []

    def forget(self, id: str) -> None:
        """A request ended, or was taken from its prefill worker."""
        split = self._here.pop(id, None)
        if split is not None:
            self._stop(split, id)

    def lost(self, worker: str, ids: Iterable[str]) -> None:
        """A worker has died, with these on it. Who reads along keeps what has come; it must not go on."""
        self._transfers.pop(worker, None)
        for id in ids:
            self.forget(id)
        for split in self._here.values():
            if split.fetching == worker:
                split.fetching = None
                split.early.clear()

    def load(self, worker: str, load: LoadSnapshot) -> None:
        """What a worker has transferred: the router reckons with it."""
        now = load.transfer
        if now is None:
            return
        before = self._transfers.get(worker)
        self._transfers[worker] = now
        pages = now.imported_pages - (0 if before is None else before.imported_pages)
        starts = now.starts - (0 if before is None else before.starts)
        if pages > 0 or starts > 0:
            self._measured = True
            import_s = now.import_s - (0.0 if before is None else before.import_s)
            start_s = now.start_s - (0.0 if before is None else before.start_s)
            self._router.transfer = self._router.transfer.learn(
                import_s / pages if pages > 0 else None, start_s / starts if starts > 0 else None
            )

    def _fetch(self, split: Split, handoff: dict[str, Any], now: float) -> None:
        id = split.request.id
        split.fetching = self._router.take(id, now)
        if split.fetching is not None:
            self._send(split.fetching, Fetch(request=replace(split.request, handoff=handoff)))

    def _stop(self, split: Split, id: str) -> None:
        if split.fetching is not None:
            self._send(split.fetching, Abort(id=id))


def transferred(loads: Iterable[LoadSnapshot]) -> Counter[str]:
    """What workers have transferred, by the names of the metrics; those by reason have ``:`` in theirs."""
    counts: Counter[str] = Counter()
    for load in loads:
        if (now := load.transfer) is None:
            continue
        counts["exported_pages"] += now.exported_pages
        counts["exported_bytes"] += now.exported_pages * now.page_bytes
        counts["imported_pages"] += now.imported_pages
        counts["imported_bytes"] += now.imported_pages * now.page_bytes
        counts["declined"] += now.declined
        counts["starts"] += now.starts
        # Microseconds: a Counter counts.
        counts["export_us"] += round(1e6 * now.export_s)
        counts["import_us"] += round(1e6 * now.import_s)
        counts["start_us"] += round(1e6 * now.start_s)
        counts.update({f"imports:{outcome}": count for outcome, count in now.imports.items()})
        counts.update({f"fallbacks:{reason}": count for reason, count in now.fallbacks.items()})
    return counts
