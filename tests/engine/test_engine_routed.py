"""What an engine tells a router: pages and times of steps; and that its answers do not depend on it."""

from __future__ import annotations

from tenfold.engine.engine import Engine
from tenfold.engine.limits import EngineConfig
from tenfold.protocol import PagesRemoved, PagesStored, Request, SamplingParams, StepTime
from tenfold.router.names import page_names
from tests.helpers.fake_program import FakeProgram


def request(number: int, tokens: int = 20) -> Request:
    prompt = tuple((number * 7 + i) % 40 for i in range(40))
    params = SamplingParams(seed=number, max_tokens=tokens, ignore_eos=True)
    return Request(id=str(number), prompt=prompt, params=params, namespace="x" if number % 2 else "")


def run(engine: Engine, known: set[int]) -> tuple[dict[str, list[int]], list[StepTime]]:
    """All tokens by request, and all times; what is told of pages is applied to ``known`` step by step."""
    texts: dict[str, list[int]] = {}
    times: list[StepTime] = []
    while engine.has_work:
        for chunk in engine.step():
            texts.setdefault(chunk.id, []).extend(chunk.tokens)
        times += engine.step_times()
        if (batch := engine.kv_events()) is not None:
            assert engine.load().kv_sequence == batch.sequence
            for event in batch.events:
                if isinstance(event, PagesStored):
                    known.update(event.names)
                elif isinstance(event, PagesRemoved):
                    known.difference_update(event.names)
        assert known == set(engine.kv_snapshot().names)
    engine.check_integrity()
    return texts, times


def test_pages_of_answers_are_told_too() -> None:
    """Promise: in a cache that is too small for all, what was told is at every step what is there, pages of
    generated tokens and of namespaces included; texts are those of an engine that tells nobody."""
    config = EngineConfig(max_batch_tokens=24, max_running=4)
    routed = Engine(FakeProgram(kv_pages=14), config, routed=True)
    silent = Engine(FakeProgram(kv_pages=14), config)
    known: set[int] = set()
    for number in range(8):
        routed.add(request(number))
        silent.add(request(number))
    texts, _ = run(routed, known)
    last = request(7)
    assert known.issuperset(page_names([*last.prompt, *texts["7"][:-1]], 16, "x"))
    plain: dict[str, list[int]] = {}
    while silent.has_work:
        for chunk in silent.step():
            plain.setdefault(chunk.id, []).extend(chunk.tokens)
    assert plain == texts
    assert silent.kv_events() is None and silent.step_times() == ()


def test_steps_are_told_by_what_they_computed() -> None:
    """Promise: rows of prompts and sequences that decode are told apart, with the rows those attend to."""
    engine = Engine(FakeProgram(), EngineConfig(max_batch_tokens=32), routed=True)
    engine.add(request(0, tokens=3))
    _, times = run(engine, set())
    assert [(t.prompt_rows, t.decode_rows, t.context_rows, t.tokens) for t in times] == [
        (32, 0, 0, 0),
        (8, 0, 0, 0),
        (0, 1, 40, 1),
        (0, 1, 41, 1),
    ]
    assert all(time.seconds > 0 for time in times)
