"""How fast KV pages move from one engine to another, and how soon the other goes on.

    python benchmarks/kv_transfer.py smollm2 --pages 250 --rounds 7
    python benchmarks/kv_transfer.py smollm2 --transports [--hosts]
    python benchmarks/kv_transfer.py smollm2 --handover 4000

The first table has gigabytes a second of both ends of a transfer through memory, checksums included, beside a
plain copy from one page memory to the other in the same round: out (the exporter's copy and sums), in (the
importer's), and both, one after the other, as one process with one thread does it; two processes overlap
them. Times are CPU times, as the machine may be shared.

``--transports`` has another process export pages that are all ready, and reads them by each transport in
turns, checksums included: gigabytes a second of the wall, and how long the first contact took. With
``--hosts`` the two are in network namespaces (as root), and UCX, which would find that they share a machine,
has TCP alone.

``--handover`` serves one prompt in two engines and measures from the last page's being ready to the second
engine's first step, and to the first token that it draws (a step of the last 16 rows).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import msgspec
from msgspec.structs import replace

from tenfold.backends.base import PAGE_ROWS, PageViews
from tenfold.checkpoint.locate import locate
from tenfold.kv.arena import Arena
from tenfold.kv.nixl import NixlAgent, NixlMissing
from tenfold.kv.segment import token_bytes
from tenfold.kv.tcp import PageServer, TcpSource
from tenfold.kv.transfer import (
    READ_PAGES,
    Exports,
    Handoff,
    MemorySource,
    Offer,
    Opener,
    Source,
    offer_memory,
)
from tenfold.protocol import EngineSettings, Request, SamplingParams
from tenfold.worker.build import build_engine, build_target

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.helpers.namespaces import two_hosts

SECRET = b"of this benchmark"
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
    size = count * page_bytes / 1e9
    found: dict[str, list[float]] = {name: [] for name in ("copy", "out", "in", "both")}

    def copy() -> None:
        for one, two in zip(*views, strict=True):
            two[:] = one

    copy()
    exports = Exports("id", page_bytes, Arena(count * page_bytes + (1 << 20)))
    for number in range(rounds + 1):
        handoff = exports.begin("a", "", tokens, count)
        assert handoff is not None

        def out() -> None:
            for at in range(0, count, ADD_PAGES):
                exports.add("a", views[0][at : at + ADD_PAGES])

        seconds = {"copy": timed(time.process_time, copy), "out": timed(time.process_time, out)}
        exports.end("a")
        source = MemorySource(msgspec.convert(handoff, Handoff))
        seconds["in"] = timed(time.process_time, lambda source=source: read(source, views[1]))  # type: ignore[misc]
        seconds["both"] = seconds["out"] + seconds["in"]
        source.take()
        source.close()
        if number:  # the first round has the memory faulted in
            for name, value in seconds.items():
                found[name].append(size / value)
    exports.close()
    print(f"{model}: {count} pages of {page_bytes} bytes, {rounds} rounds; GB/s, median (p10 to p90)")
    show(found)


def read(source: Source, views: Sequence[memoryview]) -> None:
    """As an engine reads."""
    for at in range(0, len(views), READ_PAGES):
        group = views[at : at + READ_PAGES]
        if source.read(at, group) != len(group):
            raise SystemExit("pages came wrong")


def show(found: dict[str, list[float]]) -> None:
    """Prints what was measured."""
    for name, values in found.items():
        low, *_, high = statistics.quantiles(values, n=10)
        print(f"  {name:6} {statistics.median(values):6.2f}  ({low:.2f} to {high:.2f})")


def export(count: int, page_bytes: int, host: str) -> None:
    """The other process: prints a handoff for each transport that there is, and waits until it is ended."""
    arena = Arena(count * page_bytes + (1 << 20))
    offers: list[Offer] = [offer_memory, PageServer(SECRET, host).offer]
    with contextlib.suppress(NixlMissing):
        offers.append(NixlAgent(arena, page_bytes, SECRET).offer)
    exports = Exports("id", page_bytes, arena, offers)
    handoff = exports.begin("a", "", bytes(4 * PAGE_ROWS * count), count)
    for _ in range(count):
        exports.add("a", [memoryview(random.randbytes(page_bytes))])
    exports.end("a")
    print(json.dumps(handoff), flush=True)
    sys.stdin.read()


def transports(count: int, page_bytes: int, rounds: int, exporter: Sequence[str], far: bool) -> None:
    """Prints the speed of each transport."""
    process = subprocess.Popen(exporter, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    handoff = msgspec.convert(json.loads(process.stdout.readline()), Handoff)
    openers: dict[str, Opener] = {} if far else {"memory": MemorySource}
    openers["tcp"] = lambda handoff: TcpSource(handoff, SECRET)
    if handoff.nixl is not None:
        openers["nixl"] = NixlAgent(Arena(0), page_bytes, SECRET).open
    views = [memoryview(bytearray(page_bytes)) for _ in range(count)]
    found: dict[str, list[float]] = {name: [] for name in openers}
    first_ms: dict[str, float] = {}
    for number in range(rounds + 1):
        for name, opener in openers.items():
            began = time.perf_counter()
            source = opener(handoff)
            first_ms.setdefault(name, (time.perf_counter() - began) * 1e3)
            seconds = timed(time.perf_counter, lambda source=source: read(source, views))  # type: ignore[misc]
            source.close()
            if number:
                found[name].append(count * page_bytes / 1e9 / seconds)
    process.kill()
    process.communicate()
    where = "two hosts" if far else "two processes"
    print(f"{where}: {count} pages of {page_bytes} bytes, {rounds} rounds; GB/s, median (p10 to p90)")
    show(found)
    print("  first contact: " + ", ".join(f"{name} {value:.0f} ms" for name, value in first_ms.items()))


def between_hosts(count: int, page_bytes: int, rounds: int) -> None:
    """`transports` in two network namespaces."""
    sizes = ["--pages", str(count), "--rounds", str(rounds), "--page-bytes", str(page_bytes)]
    command = [sys.executable, os.path.abspath(__file__), "-", *sizes]
    with two_hosts() as (one, two):
        tcp = {**os.environ, "UCX_TLS": "tcp,self"}
        there = one.command("env", f"UCX_NET_DEVICES={one.link}", *command, "--export", one.address)
        here = two.command("env", f"UCX_NET_DEVICES={two.link}", *command, "--from", json.dumps(there))
        # The exporter is started from within the importer's namespace: `ip netns exec` leaves it for its own.
        subprocess.run(here, env=tcp, check=True)


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
    parser.add_argument("--transports", action="store_true", help="Compare the transports instead.")
    parser.add_argument("--hosts", action="store_true", help="With --transports: between two namespaces.")
    parser.add_argument("--page-bytes", type=int, help="With --transports; default: the model's.")
    parser.add_argument("--export", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--from", dest="exporter", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    count, rounds, page_bytes = options.pages, options.rounds, options.page_bytes
    if options.export is not None:
        export(count, page_bytes, options.export)
    elif options.exporter is not None:
        transports(count, page_bytes, rounds, options.exporter, far=True)
    elif options.transports:
        if page_bytes is None:
            page_bytes = build_target(settings(options.model, 1)).program.info.page_bytes
        if options.hosts:
            between_hosts(count, page_bytes, rounds)
        else:
            command = [sys.executable, __file__, "-", "--export", "127.0.0.1", "--pages", str(count)]
            transports(count, page_bytes, rounds, [*command, "--page-bytes", str(page_bytes)], far=False)
    elif options.handover is None:
        speeds(options.model, count, rounds)
    else:
        handover(options.model, options.handover, rounds, options.threads)


if __name__ == "__main__":
    main()
