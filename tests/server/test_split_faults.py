"""Prefill and decode workers as processes behind a real server: what befalls them and their pages costs time
and changes no text."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tenfold.protocol import Request, SamplingParams
from tests.helpers.server_process import ServerProcess, running_server, wait_for
from tests.helpers.split_engine import BUILDER, SplitFake, ids_of, letters, text_alone

Start = Callable[..., ServerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a server of prefill and decode workers for a test."""
    with ExitStack() as stack:

        def run(prefill: int = 1, decode: int = 1, **faults: Any) -> ServerProcess:
            fake = SplitFake(marker=str(tmp_path / "marker"), **faults)
            return stack.enter_context(
                running_server(
                    tmp_path / "log",
                    builder=BUILDER,
                    model=msgspec.json.encode(fake).decode(),
                    prefill=prefill,
                    decode=decode,
                    drain_s=5,
                )
            )

        yield run


def ask(server: ServerProcess, prompt: str, count: int, seed: int, **fields: Any) -> str:
    """The text of an answer."""
    body = {"prompt": prompt, "seed": seed, "max_tokens": count, "ignore_eos": True, **fields}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def law(prompt: str, count: int, seed: int, **params: Any) -> str:
    """What that must be."""
    fields: dict[str, Any] = {"seed": seed, "max_tokens": count, "ignore_eos": True, **params}
    return text_alone(Request(id="law", prompt=ids_of(prompt), params=SamplingParams(**fields)))


def mixed(server: ServerProcess, longs: int = 2, **fields: Any) -> None:
    """Four streams, and long prompts one after the other beside them; every text must be right."""
    with ThreadPoolExecutor(5) as pool:
        streams = [pool.submit(ask, server, letters(n, 20), 250, n) for n in range(4)]
        wait_for(lambda: server.metric("tenfold_generated_tokens_total") > 20, 30)
        for n in range(longs):
            prompt = letters(100 + n, 300)
            assert ask(server, prompt, 20, n, **fields) == law(prompt, 20, n, **fields)
        for n, stream in enumerate(streams):
            assert stream.result() == law(letters(n, 20), 250, n)


def split(server: ServerProcess) -> float:
    """Requests that were split: the long ones, and a short one where the machine was slow just then."""
    count = server.metric("tenfold_router_split_total")
    assert count >= 2
    return count


def fallbacks(server: ServerProcess, reason: str) -> float:
    return server.metric(f'tenfold_transfer_fallbacks_total{{reason="{reason}"}}')


def nothing_left(server: ServerProcess) -> None:
    """No request, no page and no region is held, and nothing has a name that could be left behind."""
    assert server.metric("tenfold_requests_in_flight") == 0
    for name in ("p0", "d0"):
        free = f'tenfold_worker_kv_pages_free{{worker="{name}"}}'
        wait_for(lambda free=free: server.metric(free) == 512, 20)
    assert not [name for name in os.listdir("/dev/shm") if "tenfold" in name]


def test_long_prompts_are_split_and_texts_stay(start: Start) -> None:
    """Promise: beside streams a long prompt is prefilled apart and all its pages are taken over; short ones
    stay; all of it is counted, and every text is that of one engine."""
    server = start()
    mixed(server)
    assert server.metric('tenfold_router_not_split_total{reason="no streams to disturb"}') >= 1
    wait_for(lambda: server.metric("tenfold_transfer_imported_pages_total") >= 36)
    assert server.metric('tenfold_transfer_imports_total{result="imported"}') == split(server)
    assert server.metric("tenfold_transfer_starts_total") == split(server)
    assert "fallbacks_total{" not in httpx.get(f"{server.url}/metrics").text
    nothing_left(server)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 1.3, "top_p": 0.9, "top_k": 30, "min_p": 0.01},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    ],
)
def test_sampling_crosses_the_split(start: Start, params: dict[str, Any]) -> None:
    """Promise: greedy, filtered and penalized answers are those of one engine."""
    server = start()
    mixed(server, **params)
    assert split(server) >= 2


def test_answers_of_one_token_stay(start: Start) -> None:
    """Promise: what ends with its first token is not handed over, and ends."""
    server = start()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(ask, server, letters(1, 20), 150, 1)
        wait_for(lambda: server.metric("tenfold_generated_tokens_total") > 5, 30)
        assert ask(server, letters(7, 300), 1, 7) == law(letters(7, 300), 1, 7)
        stream.result()
    assert server.metric('tenfold_router_not_split_total{reason="one token"}') == 1


def test_a_prefill_worker_killed_in_the_transfer(start: Start) -> None:
    """Promise: SIGKILL of the prefill worker with half of the pages read: the request goes on, with what
    came, and so does everything else."""
    server = start(die_at_page=8)
    mixed(server)
    assert server.metric("tenfold_worker_restarts_total") == 1
    # Whichever comes first: the importer finds the exporter gone, or is told not to go on.
    given_up = 'tenfold_transfer_imports_total{result="abandoned"}'
    wait_for(lambda: fallbacks(server, "gone") + server.metric(given_up) == 1)
    wait_for(lambda: server.metric('tenfold_worker_state{state="up",worker="p0"}') == 1, 30)
    nothing_left(server)


def test_a_decode_worker_killed_right_after_the_handover(start: Start) -> None:
    """Promise: SIGKILL of the decode worker as it is told to go on: its streams and the request go on, on the
    prefill worker while there is nobody else."""
    server = start(die_after_handover=True)
    mixed(server)
    assert server.metric("tenfold_worker_restarts_total") == 1
    assert server.metric('tenfold_router_not_split_total{reason="no decode worker"}') > 0
    wait_for(lambda: server.metric('tenfold_worker_state{state="up",worker="d0"}') == 1, 30)
    nothing_left(server)


@pytest.mark.parametrize("page", [0, 5])
def test_a_corrupt_page_is_computed(start: Start, page: int) -> None:
    """Promise: no page with a wrong checksum is used, nor any behind it; the rest is computed."""
    server = start(corrupt_page=page)
    mixed(server)
    assert fallbacks(server, "checksum") == (2 if page else split(server))
    assert server.metric("tenfold_transfer_imported_pages_total") >= 2 * page
    nothing_left(server)


@pytest.mark.parametrize("fault", [{"lose_handoffs": True}, {"no_room": True}])
def test_a_lost_handoff_is_computed(start: Start, fault: dict[str, bool]) -> None:
    """Promise: without a handoff, lost or never made, the decode worker computes the prompt."""
    server = start(**fault)
    mixed(server)
    assert fallbacks(server, "not exported") == split(server)
    nothing_left(server)


def test_several_of_each(start: Start) -> None:
    """Promise: with two of each and many prompts at once, one of which is given up, every text is right."""
    server = start(2, 2)
    with ThreadPoolExecutor(12) as pool:
        streams = [pool.submit(ask, server, letters(n, 20), 150, n) for n in range(6)]
        wait_for(lambda: server.metric("tenfold_generated_tokens_total") > 20, 30)
        longs = [pool.submit(ask, server, letters(50 + n, 300 + 16 * n), 10, n) for n in range(5)]
        with pytest.raises(httpx.TimeoutException):
            body = {"prompt": letters(99, 400), "max_tokens": 10}
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.1)
        for n, long in enumerate(longs):
            assert long.result() == law(letters(50 + n, 300 + 16 * n), 10, n)
        for n, stream in enumerate(streams):
            assert stream.result() == law(letters(n, 20), 150, n)
    assert server.metric("tenfold_router_split_total") >= 2
    wait_for(lambda: server.metric("tenfold_requests_in_flight") == 0)


def test_replacing_all_workers_loses_nothing(start: Start) -> None:
    """Promise: SIGHUP beside split requests: no text changes, nobody counts a death."""
    server = start()
    before = set(server.worker_pids())
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(mixed, server, 4)
        wait_for(lambda: server.metric("tenfold_router_split_total") >= 1, 60)
        server.process.send_signal(signal.SIGHUP)
        run.result()
    wait_for(lambda: "all workers have been replaced" in server.log.read_text(), 60)
    assert before.isdisjoint(server.worker_pids())
    assert server.metric("tenfold_worker_restarts_total") == 0


def test_a_front_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """Promise: after SIGKILL of the front its workers are gone, and with them all memory of transfers."""
    with running_server(
        tmp_path / "log",
        builder=BUILDER,
        model=msgspec.json.encode(SplitFake()).decode(),
        prefill=1,
        decode=1,
    ) as server:
        pids = server.worker_pids()
        assert len(pids) == 2
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not any(_lives(pid) for pid in pids), 20)
        assert not [name for name in os.listdir("/dev/shm") if "tenfold" in name]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
