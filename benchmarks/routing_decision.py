"""What a routing decision costs: processor time per `Router.route`, and memory per indexed page.

    python benchmarks/routing_decision.py [--workers 64] [--pages 1000000] [--prompt-pages 188]

Every worker holds its share of the pages as conversations that begin with one prefix that all workers have.
The requests are half continued conversations, half new ones; they are prefilled and finished in turn.
"""

from __future__ import annotations

import argparse
import random
import resource
import time

from tenfold.protocol import KVEvents, PagesStored
from tenfold.router.base import RouterConfig, RouteRequest
from tenfold.router.router import Router
from tenfold.router.timing import mocker_timing

PREFIX_PAGES = 8


def main() -> None:
    """Builds the index, routes, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--prompt-pages", type=int, default=188)
    parser.add_argument("--requests", type=int, default=20_000)
    arguments = parser.parse_args()
    draw = random.Random(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    router = Router(RouterConfig(timing=mocker_timing(1 << 20), page_tokens=64))
    prefix = tuple(draw.getrandbits(64) for _ in range(PREFIX_PAGES))
    own = arguments.prompt_pages - PREFIX_PAGES
    talks = []
    per_worker = arguments.pages // arguments.workers
    began = time.process_time()
    for number in range(arguments.workers):
        name = f"w{number}"
        router.add_worker(name, per_worker + own, 0.0)
        router.on_event(name, KVEvents(sequence=1, events=(PagesStored(prefix),)), 0.0)
        for sequence in range(2, 2 + per_worker // own):
            talk = tuple(draw.getrandbits(64) for _ in range(own))
            talks.append(talk)
            router.on_event(name, KVEvents(sequence=sequence, events=(PagesStored(talk, prefix[-1]),)), 0.0)
    built = time.process_time() - began
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    times = []
    now = 0.0
    under_way: list[str] = []
    for number in range(arguments.requests):
        if number % 2:
            names = prefix + draw.choice(talks)
        else:
            names = prefix + tuple(draw.getrandbits(64) for _ in range(own))
        request = RouteRequest(str(number), names, 64 * len(names) + 7)
        began = time.process_time_ns()
        router.route(request, now)
        times.append((time.process_time_ns() - began) / 1000)
        under_way.append(request.id)
        now += 0.01
        router.on_prefill_done(request.id, now)
        if len(under_way) > 4 * arguments.workers:
            router.on_finish(under_way.pop(0), now)
    times.sort()
    pages = len(router.index)
    print(f"workers {arguments.workers}, indexed pages {pages}, prompt pages {arguments.prompt_pages}")
    print(f"decision us: mean {sum(times) / len(times):.1f}, median {times[len(times) // 2]:.1f}, ", end="")
    print(f"p99 {times[int(0.99 * len(times))]:.1f}")
    print(f"memory {memory / pages:.0f} bytes a page (the names of the benchmark's own prompts included)")
    print(f"taking up events: {1e6 * built / pages:.2f} us a page (drawing the names included)")


if __name__ == "__main__":
    main()
