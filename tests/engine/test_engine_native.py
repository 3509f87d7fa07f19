"""Engine and native core together: any load, on a memory that is too small for it, gives each request the
text that it has alone."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, given, settings

from tenfold.backends.native import NativeProgram
from tenfold.engine.engine import Engine
from tenfold.engine.limits import EngineConfig
from tests.helpers.native_programs import FormatName, spoil, tiny_model
from tests.helpers.requests import Outcome, request, run
from tests.helpers.tiny_models import CONFIGS

MODELS = {
    name: tiny_model({**CONFIGS[name], "max_position_embeddings": 160})
    for name in ("mistral", "gemma3-one-kv-head")
}
PREFIXES = [np.random.default_rng(p).integers(1, 96, 64).tolist() for p in range(2)]

params = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 3),
        "max_tokens": st.sampled_from([1, 9, 20, 40]),
        "temperature": st.sampled_from([0.0, 0.5, 1.0]),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([None, 0, 2]),
        "top_k": st.sampled_from([0, 5]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "repetition_penalty": st.sampled_from([1.0, 1.4]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "logit_bias": st.sampled_from([{}, {0: 3.0}, {5: -float("inf")}]),
    }
)
prompts = st.builds(
    lambda prefix, shared, tail: [*prefix[:shared], *tail] or [1],
    st.sampled_from(PREFIXES),
    st.integers(0, 64),
    st.lists(st.integers(1, 95), max_size=20),
)
"""Prompts that share their first tokens: cache hits, of full pages and parts of one."""


@functools.cache
def program(name: str, weights: FormatName, pages: int, threads: int) -> NativeProgram:
    return MODELS[name].native(weights, kv_pages=pages, threads=threads, max_rows=48, max_logit_rows=6)


class Events:
    """What the examples together have met, so that the test is known to test something."""

    preemptions = cached_tokens = aborts = examples = 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    data=st.data(),
    name=st.sampled_from(sorted(MODELS)),
    weights=st.sampled_from(["f32", "bf16", "q8", "q4"]),
    pages=st.integers(8, 10),
    threads=st.integers(1, 2),
    config=st.builds(
        EngineConfig, max_batch_tokens=st.sampled_from([3, 17, 48]), max_running=st.integers(2, 6)
    ),
    arrivals=st.lists(st.tuples(st.integers(0, 12), prompts, params), min_size=4, max_size=10),
)
def check_any_load(
    data: st.DataObject,
    name: str,
    weights: FormatName,
    pages: int,
    threads: int,
    config: EngineConfig,
    arrivals: list[tuple[int, list[int], dict[str, Any]]],
) -> None:
    shared = program(name, weights, pages, threads)
    spoil(shared)
    engine = Engine(shared, config)
    waiting = [(at, request(f"r{n}", prompt, **one)) for n, (at, prompt, one) in enumerate(arrivals)]
    names = st.sampled_from([one.id for _, one in waiting])
    aborts = data.draw(st.dictionaries(st.integers(1, 60), names, max_size=2))
    outcomes: dict[str, Outcome] = {}
    step = 0
    while engine.has_work or len(outcomes) < len(waiting):
        for at, one in waiting:
            if at <= step and one.id not in outcomes:
                engine.add(one)
                outcomes[one.id] = Outcome()
        if step in aborts:
            engine.abort(aborts[step])
        for chunk in engine.step():
            outcomes[chunk.id].hear(chunk)
        engine.check_integrity()
        step += 1
        assert step < 3000
    load = engine.load()
    assert load.pages_free == load.pages_total
    Events.preemptions += load.preemptions
    Events.cached_tokens += load.cached_tokens
    Events.examples += 1
    single = program(name, weights, pages, 1)
    for _, one in waiting:
        outcome = outcomes[one.id]
        spoil(single)
        law = run(Engine(single), [one])[one.id]
        if outcome.finish == "abort":
            Events.aborts += 1
            assert outcome.tokens == law.tokens[: len(outcome.tokens)]
            assert outcome.logprobs == law.logprobs[: len(outcome.logprobs)]
        else:
            assert (outcome.tokens, outcome.logprobs) == (law.tokens, law.logprobs)
            assert (outcome.finish, outcome.stop_token, outcome.error) == (
                law.finish,
                law.stop_token,
                law.error,
            )


def test_any_load_gives_each_request_the_text_it_has_alone() -> None:
    """Random arrivals with shared prefixes and aborts, in any batches, with preemptions and cache hits, over
    pages that were full of NaN: tokens, log-probabilities and ends are those of each request alone."""
    check_any_load()
    assert Events.preemptions > 5
    assert Events.cached_tokens > 100
    assert Events.aborts > 3
