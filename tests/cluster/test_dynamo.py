"""Tenfold's workers under NVIDIA Dynamo: a front, two workers, no other server, and what befalls them."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from tenfold.bench.server import Server
from tests.helpers.cluster import NAME, ClusterProcess, running_cluster
from tests.helpers.cluster_requests import (
    LONGEST_GAP_S,
    Streamed,
    answer,
    body,
    handed_over,
    needs_dynamo,
    over_a_fault,
)
from tests.helpers.server_process import wait_for

pytestmark = needs_dynamo


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), model) as cluster:
        yield cluster


def test_answers_are_those_of_one_machine(cluster: ClusterProcess, server: Server) -> None:
    """Promise: the same request with the same seed gives the same text and the same usage as `tenfold serve`,
    with all that is sampled by and with constraints."""
    for fields in (
        {},
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
        {"stop": ["e", "qu"]},
        {"ignore_eos": True},
        {"response_format": {"type": "json_object"}},
    ):
        for number in (3, 2**40):
            asked = {**body(3, **fields), "seed": number}
            assert answer(cluster.url, asked) == answer(server.url, asked), fields


def test_log_probabilities(cluster: ClusterProcess, server: Server) -> None:
    """Promise: log-probabilities, and the most likely tokens, are those of one machine. (Dynamo's front adds
    the drawn token to the list where it is not among them.)"""
    asked = body(5, logprobs=True, top_logprobs=3)
    found = []
    for url in (cluster.url, server.url):
        response = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60).json()
        content = response["choices"][0]["logprobs"]["content"]
        found.append(
            [
                [(each["token"], np.float32(each["logprob"])) for each in (one, *one["top_logprobs"][:3])]
                for one in content
            ]
        )
    assert found[0] == found[1] and len(found[0]) == 24


@pytest.mark.parametrize("field", ["n", "best_of", "min_tokens"])
def test_what_cannot_be_done_is_refused_by_name(cluster: ClusterProcess, field: str) -> None:
    """Promise: a field that the engine does not have is an error that names it, and no answer without it."""
    asked = {"model": NAME, "prompt": "Once", "max_tokens": 3, field: 2}
    response = httpx.post(f"{cluster.url}/v1/completions", json=asked, timeout=60)
    assert response.status_code == 400 and field in response.text


def test_prompts_find_their_pages(cluster: ClusterProcess) -> None:
    """Promise: pages are told to Dynamo's router: a prompt goes where its beginning is, and the usage says
    how much of it was cached."""
    rounds = itertools.count()
    seen: list[list[int]] = []

    def found() -> bool:
        """Five new prompts, and the same again. (By chance all are found once in 32 rounds; a worker's first
        news may be lost on a busy machine, until the router asks for them.)"""
        number = next(rounds)
        texts = [f"tenant {number}.{tenant} " + "of the long road " * 20 for tenant in range(5)]
        cached: list[int] = []
        for pause_s in (1.0, 0.0):
            cached = []
            for text in texts:
                asked = {"model": NAME, "prompt": text, "max_tokens": 2, "seed": 1}
                usage = httpx.post(f"{cluster.url}/v1/completions", json=asked, timeout=60).json()["usage"]
                cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            time.sleep(pause_s)  # news of pages take their way
        seen.append(cached)
        return min(cached) > 200

    assert any(found() for _ in range(4)), (seen, cluster.logs())


def test_a_client_that_is_gone(cluster: ClusterProcess) -> None:
    """Promise: its request is given up: the engines fall idle long before they would have been done."""
    asked = {**body(1, max_tokens=800, ignore_eos=True), "stream": True}
    with httpx.stream("POST", f"{cluster.url}/v1/chat/completions", json=asked, timeout=60) as response:
        next(response.iter_lines())
    engines = [cluster.engine_of(worker) for worker in cluster.pids("worker")]

    def busy() -> float:
        return sum(
            float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11]) for pid in engines
        )

    def idle() -> bool:
        before = busy()
        time.sleep(1)
        return busy() - before <= 2

    wait_for(idle, 10)


def test_a_worker_is_killed(cluster: ClusterProcess, server: Server) -> None:
    """Promise: its streams go on at the other with the texts that they would have had, penalties and usage
    included; a new one comes."""
    victim = cluster.pids("worker")[0]
    fields = {"presence_penalty": 0.7, "frequency_penalty": 0.3}
    over_a_fault(cluster, server, lambda: os.kill(victim, signal.SIGKILL), **fields)
    wait_for(lambda: len(cluster.pids("worker")) == 2 and victim not in cluster.pids("worker"), 30)


def test_an_engine_is_killed(cluster: ClusterProcess, server: Server) -> None:
    """Promise: without its engine a worker leaves, and its streams go on elsewhere."""
    victim = cluster.pids("worker")[0]
    over_a_fault(cluster, server, lambda: os.kill(cluster.engine_of(victim), signal.SIGKILL))
    wait_for(lambda: victim not in cluster.pids("worker"), 30)


def test_a_worker_is_told_to_end(cluster: ClusterProcess, server: Server) -> None:
    """Promise: it takes its leave, and nothing is lost."""
    victim = cluster.pids("worker")[0]
    over_a_fault(cluster, server, lambda: os.kill(victim, signal.SIGTERM))
    wait_for(lambda: victim not in cluster.pids("worker"), 30)


def test_a_worker_hangs(cluster: ClusterProcess, server: Server) -> None:
    """Promise: streams of a worker that stands still go on at the other after a few seconds."""
    victim = cluster.pids("worker")[0]
    try:
        over_a_fault(cluster, server, lambda: os.kill(victim, signal.SIGSTOP))
    finally:
        os.kill(victim, signal.SIGKILL)
    wait_for(lambda: victim not in cluster.pids("worker"), 30)


def test_the_front_is_killed(cluster: ClusterProcess, server: Server) -> None:
    """Promise: a new one comes, and answers as the old one did. (Streams end with their front: their clients
    must ask again.)"""
    (victim,) = cluster.pids("front")
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: victim not in cluster.pids("front"), 30)
    cluster.wait_for_workers(2)
    assert answer(cluster.url, body(4)) == answer(server.url, body(4))


@pytest.fixture(scope="module")
def split(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    with running_cluster(tmp_path_factory.mktemp("split"), model, ("prefill", "decode")) as cluster:
        yield cluster


def test_prefill_and_decode(split: ClusterProcess, server: Server) -> None:
    """Promise: with prompts computed by one worker and answers by another the texts are those of one machine,
    under constraints, for prompts of less than a page and for one that takes longer than a silent stream may;
    and pages do go from one to the other."""
    asked = [body(0), body(5), body(7, temperature=0), body(3, response_format={"type": "json_object"})]
    long = {**body(9), "messages": [{"role": "user", "content": "the long road " * 1200}]}
    for each in (*asked, long):
        assert answer(split.url, each) == answer(server.url, each), split.logs()
    assert handed_over(split)


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
def test_the_last_prefill_worker_is_lost(split: ClusterProcess, server: Server, what: signal.Signals) -> None:
    """Promise: a decode worker without prefill workers prefills for itself: no request fails, whether its
    prompt was being computed or it came later; texts are those of one machine; and prompts are computed by a
    prefill worker again once there is one."""
    wait_for(lambda: handed_over(split), 60)
    (victim,) = split.pids("worker", "prefill")
    roads = [{"role": "user", "content": "a road " * 300}]
    before = [body(number, messages=roads) for number in range(4)]
    after = [body(number) for number in range(12, 16)]
    expected = [answer(server.url, each) for each in (*before, *after)]
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(Streamed, split.url, each) for each in before]
        time.sleep(0.3)
        os.kill(victim, what)
        streams += [pool.submit(Streamed, split.url, each) for each in after]
        assert not handed_over(split)
        got = [stream.result() for stream in streams]
    assert [each.all for each in got] == expected, split.logs()
    assert max(each.gap_s for each in got) < LONGEST_GAP_S
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    wait_for(lambda: handed_over(split), 60)
