"""How fast KV pages move from one engine to another, and how soon the other goes on.

    python benchmarks/kv_transfer.py smollm2 --pages 250 --rounds 7
    python benchmarks/kv_transfer.py smollm2 --handover 4000

The first table has gigabytes a second of both ends of a transfer, checksums included, beside a plain copy
from one page memory to the other in the same round: out (the exporter's copy and sums), in (the importer's),
and both, one after the other, as one process with one thread does it; two processes overlap them. Times are
CPU times, as the machine may be shared, but for TCP, whose two ends are threads of this process: there it is
the wall.

``--handover`` serves one prompt in two engines and measures from the last page's being ready to the second
engine's first step, and to the first token that it draws (a step of the last 16 rows).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import cast

import msgspec
from msgspec.structs import replace

from tenfold.backends.base import PAGE_ROWS, PageViews
from tenfold.checkpoint.locate import locate
from tenfold.kv.segment import token_bytes
from tenfold.kv.tcp import PageServer, TcpSource
from tenfold.kv.transfer import Exports, Handoff, MemorySource, Source
from tenfold.protocol import EngineSettings, Request, SamplingParams
from tenfold.worker.build import build_engine, build_target

SECRET = b"of this benchmark"
READ_PAGES = 4
"""As an engine reads; see `tenfold.kv.imports`."""
ADD_PAGES = 32
"""As an engine adds after a step of 512 rows."""


def settings(model: str, threads: int, kv_memory_bytes: int = 1 << 30) -> EngineSettings:
    """An engine that can export and import."""
    return EngineSettings(
        model=str(locate(model)),
        threads=threads,
        kv_memory_bytes=kv_memory_bytes,
        max_running=4,
        transfer=True,
    )


def timed(clock: Callable[[], float], work: Callable[[], None]) -> float:
    """How long it takes."""
    began = clock()
    work()
    return clock() - began


def speeds(model: str, count: int, rounds: int) -> None:
    """Prints the table of speeds."""
    programs = [build_target(settings(model, 1)).program for _ in range(2)]
    page_bytes = programs[0].info.page_bytes
    views = [[cast(PageViews, program).view_page(page) for page in range(count)] for program in programs]
    for page in range(count):
        views[0][page][:] = random.Random(page).randbytes(page_bytes)
    tokens = token_bytes(range(count * PAGE_ROWS))
    server = PageServer(SECRET, "127.0.0.1")
    size = count * page_bytes / 1e9
    found: dict[str, list[float]] = {name: [] for name in ("copy", "out", "in", "both", "tcp")}

    def read(source: Source) -> None:
        for at in range(0, count, READ_PAGES):
            group = views[1][at : at + READ_PAGES]
            if source.read(at, group) != len(group):
                raise SystemExit("pages came wrong")

    def copy() -> None:
        for one, two in zip(*views, strict=True):
            two[:] = one

    copy()
    exports = Exports("id", page_bytes, 1 << 34)
    for number in range(rounds + 1):
        handoff = exports.begin("a", "", tokens, count)
        assert handoff is not None

        def out() -> None:
            for at in range(0, count, ADD_PAGES):
                exports.add("a", views[0][at : at + ADD_PAGES])

        seconds = {"copy": timed(time.process_time, copy), "out": timed(time.process_time, out)}
        source = MemorySource(msgspec.convert(handoff, Handoff))
        seconds["in"] = timed(time.process_time, lambda source=source: read(source))  # type: ignore[misc]
        seconds["both"] = seconds["out"] + seconds["in"]
        region = exports._exports["a"].region
        fields, retract = server.offer(region)
        remote = TcpSource(msgspec.convert({**handoff, **fields, "path": ""}, Handoff), SECRET)
        seconds["tcp"] = timed(time.perf_counter, lambda remote=remote: read(remote))  # type: ignore[misc]
        remote.close(taken=True)
        source.close(taken=True)
        retract()
        exports.end("a")
        if number:  # the first round has the memory faulted in
            for name, value in seconds.items():
                found[name].append(size / value)
    exports.close()
    server.close()
    print(f"{model}: {count} pages of {page_bytes} bytes, {rounds} rounds; GB/s, median (p10 to p90)")
    for name, values in found.items():
        low, *_, high = statistics.quantiles(values, n=10)
        print(f"  {name:5} {statistics.median(values):6.2f}  ({low:.2f} to {high:.2f})")


def handover(model: str, length: int, rounds: int, threads: int) -> None:
    """Prints how soon the second engine goes on."""
    starts, waits, cpu = [], [], []
    engine, info = build_engine(settings(model, threads))
    engine.close()
    # Room for one prompt, whose pages the next takes over: memory that the system has given already.
    memory = (length // PAGE_ROWS + 32) * info.page_bytes
    one, two = (build_engine(settings(model, threads, memory))[0] for _ in range(2))
    for number in range(rounds + 1):
        drawn = random.Random(number)
        asked = Request(
            id="a",
            prompt=tuple(drawn.randrange(100, 40000) for _ in range(length)),
            params=SamplingParams(temperature=0.0, seed=1, max_tokens=8, ignore_eos=True),
        )
        one.add(replace(asked, prefill_only=True))
        asked_at = 0.0
        while one.has_work:
            for chunk in one.step():
                if chunk.handoff is not None and not chunk.tokens:
                    asked_at = time.monotonic()
                    two.add(replace(asked, handoff=chunk.handoff))
            if one.has_work:
                two.step()
        if not asked_at:
            raise SystemExit("the prompt was not exported")
        last_ready, cpu_began = time.monotonic(), time.process_time()
        tokens: list[int] = []
        while not tokens:
            for got in two.step():
                tokens += got.tokens
                if got.queue_ms is not None:
                    starts.append((asked_at - last_ready) * 1e3 + got.queue_ms)
        waits.append((time.monotonic() - last_ready) * 1e3)
        cpu.append((time.process_time() - cpu_began) * 1e3)
        if chunk.tokens[:1] != tuple(tokens[:1]):
            raise SystemExit("the texts differ")
        while two.has_work:
            two.step()
    one.close()
    two.close()
    starts, waits, cpu = starts[1:], waits[1:], cpu[1:]
    print(
        f"{model}: {length} tokens; from the last page ready to the second engine's first "
        f"step {statistics.median(starts):.1f} ms, to its first token {statistics.median(waits):.1f} ms "
        f"of the wall, {statistics.median(cpu):.1f} ms of CPU time; medians of {rounds}"
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--pages", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--handover", type=int, metavar="TOKENS", help="Measure this instead.")
    options = parser.parse_args()
    if options.handover is None:
        speeds(options.model, options.pages, options.rounds)
    else:
        handover(options.model, options.handover, options.rounds, options.threads)


if __name__ == "__main__":
    main()
