"""With speculation and without: the same answers to the bit, whoever drafts, on the native core."""

from __future__ import annotations

import functools
import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from tenfold.backends.native import NativeProgram
from tenfold.engine.limits import EngineConfig
from tenfold.protocol import Request
from tenfold.speculate.fixed import FixedSpeculator
from tests.helpers.drafters import FailingSpeculator, drafters
from tests.helpers.identity import (
    FAMILIES,
    Scene,
    any_requests,
    at_once,
    differences,
    play,
    texts_of,
)
from tests.helpers.native_programs import tiny_model
from tests.helpers.requests import request
from tests.helpers.tiny_models import CONFIGS

VOCAB = 96
MODEL = tiny_model({**CONFIGS["mistral"], "max_position_embeddings": 128})
DRAFTERS = sorted(drafters({}, VOCAB))
BATCHES = range(1, 9)


@functools.cache
def program(pages: int = 80, threads: int = 1) -> NativeProgram:
    return MODEL.native("q8", kv_pages=pages, threads=threads, max_rows=96, max_logit_rows=80)


@functools.cache
def many(batch: int, variant: int) -> tuple[list[Request], Any]:
    """A batch of requests with any parameters, and what they answer without speculation."""
    requests = any_requests(random.Random(10 * batch + variant), batch, VOCAB)
    law, _ = play(program(), at_once(requests))
    return requests, law


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_answer_differs(name: str) -> None:
    """Every drafter, K from 0 to 8, 1 to 8 requests at once with any parameters: tokens, log-probabilities
    and ends are those without speculation; what is drafted is verified and what is right stands."""
    drafted = accepted = 0
    for batch in BATCHES:
        for k in range(9):
            requests, law = many(batch, k % 3)
            speculator = FixedSpeculator(drafters(texts_of(law), VOCAB)[name], k)
            found, load = play(program(), at_once(requests), speculator)
            assert differences(law, found) == []
            assert load.speculation is not None
            assert load.speculation.faults == 0
            drafted += load.speculation.drafted_tokens
            accepted += load.speculation.accepted_tokens
    share = accepted / drafted
    assert drafted > 1000
    if name in ("oracle", "too long", "outside"):
        assert share == 1
    elif name == "wrong":
        assert share == 0
    else:
        assert 0 < share < 1


def test_every_family_of_parameters_is_among_those_that_were_compared() -> None:
    """The test above is about what it says it is about."""
    dice = random.Random(0)
    asked = {name for name, family in FAMILIES.items() for key in family(dice, VOCAB) if _met(key)}
    assert asked == set(FAMILIES)
    ends = {outcome.finish for batch in BATCHES for v in range(3) for outcome in many(batch, v)[1].values()}
    assert ends == {"stop", "length"}


def _met(key: str) -> bool:
    plain = request("", [1]).params
    return any(
        getattr(one.params, key) != getattr(plain, key)
        for batch in BATCHES
        for variant in range(3)
        for one in many(batch, variant)[0]
    )


@pytest.mark.parametrize(
    "fails",
    [
        pytest.param(lambda call, times: call == "propose" and times % 2 == 0, id="every second propose"),
        pytest.param(lambda call, times: call == "few" and times % 2 == 0, id="too few drafts"),
        pytest.param(lambda call, times: call == "floats" and times % 2 == 0, id="no integers"),
        pytest.param(lambda call, times: call == "begin" and times % 3 == 0, id="begin"),
        pytest.param(lambda call, times: call == "end", id="end"),
        pytest.param(lambda call, times: call == "observe", id="observe"),
        pytest.param(lambda call, times: call == "report", id="report"),
        pytest.param(lambda call, times: True, id="everything"),
    ],
)
def test_a_speculators_fault_loses_nothing(fails: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever call fails, and however often: all answers are right, the fault is logged once and counted."""
    requests, law = many(5, 1)
    speculator = FailingSpeculator(drafters(texts_of(law), VOCAB)["oracle"], 3, fails)
    found, load = play(program(), at_once(requests), speculator)
    assert differences(law, found) == []
    assert load.speculation is not None
    assert load.speculation.faults == speculator.failures > 0
    assert sum("the speculator failed" in record.message for record in caplog.records) == 1


class Events:
    """What the examples together have met, so that the test is known to test something."""

    preemptions = cached_tokens = aborts = accepted = resumed = 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    data=st.data(),
    seed=st.integers(0, 2**32),
    pages=st.integers(5, 8),
    threads=st.sampled_from([1, 1, 2]),
    config=st.builds(
        EngineConfig, max_batch_tokens=st.sampled_from([3, 17, 48]), max_running=st.integers(2, 8)
    ),
    name=st.sampled_from(DRAFTERS),
    k=st.integers(1, 8),
)
def check_any_load(
    data: st.DataObject, seed: int, pages: int, threads: int, config: EngineConfig, name: str, k: int
) -> None:
    requests = any_requests(random.Random(seed), data.draw(st.integers(4, 9)), VOCAB)
    law, _ = play(program(), at_once(requests))
    arrivals, had = [], {}
    for one in requests:
        cut = data.draw(st.sampled_from([0, 0, 1, 5, 17]))
        if 0 < cut < len(law[one.id].tokens):
            had[one.id] = cut
            one = request(one.id, one.prompt, output=law[one.id].tokens[:cut], **_asdict(one))
        arrivals.append((data.draw(st.integers(0, 12)), one))
    ids = st.sampled_from([one.id for one in requests])
    scene = Scene(
        arrivals=tuple(arrivals),
        config=config,
        aborts=data.draw(st.dictionaries(st.integers(1, 40), ids, max_size=2)),
    )
    speculator = FixedSpeculator(drafters(texts_of(law), VOCAB)[name], k)
    found, load = play(program(pages, threads), scene, speculator)
    assert differences(law, found, had) == []
    assert load.speculation is not None
    assert load.speculation.faults == 0
    Events.preemptions += load.preemptions
    Events.cached_tokens += load.cached_tokens
    Events.accepted += load.speculation.accepted_tokens
    Events.aborts += sum(outcome.finish == "abort" for outcome in found.values())
    Events.resumed += len(had)


def _asdict(one: Request) -> dict[str, Any]:
    return {name: getattr(one.params, name) for name in one.params.__struct_fields__}


def test_no_answer_differs_under_any_load() -> None:
    """Random arrivals that share prefixes, prompts in pieces, too little memory, aborts and resumed requests:
    each answer is the one that the request gives without speculation, or its beginning if it was aborted."""
    check_any_load()
    assert Events.preemptions > 5
    assert Events.cached_tokens > 100
    assert Events.aborts > 5
    assert Events.accepted > 300
    assert Events.resumed > 20
