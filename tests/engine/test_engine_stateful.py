"""The engine against anything: random arrivals, shared prefixes, aborts, resumed requests, failing steps,
tiny memories, drafters that are right, wrong, in between or broken.

The law: every request's text is the one it has alone, and uninterrupted, on a fresh engine, each request ends
in exactly one chunk, the books balance after every step, and in the end all pages are free or evictable.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tenfold.engine.engine import Engine
from tenfold.engine.limits import EngineConfig
from tenfold.limits import RequestError
from tenfold.protocol import Request
from tests.helpers.drafters import FailingSpeculator, drafters
from tests.helpers.fake_program import FakeProgram
from tests.helpers.requests import Outcome, request, run

PREFIXES = [[1 + (i * 7 + p) % 39 for i in range(64)] for p in range(3)]

params = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 3),
        "max_tokens": st.sampled_from([1, 5, 17, 33, 60, None]),
        "temperature": st.sampled_from([0.0, 0.3, 1.0]),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([None, 0, 2]),
        "top_k": st.sampled_from([0, 3]),
        "repetition_penalty": st.sampled_from([1.0, 1.4]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "logit_bias": st.sampled_from([{}, {0: 3.0}, {5: -5.0}]),
    }
)

prompts = st.builds(
    lambda prefix, shared, tail: [*prefix[:shared], *tail] or [1],
    st.sampled_from(PREFIXES),
    st.integers(0, 64),
    st.lists(st.integers(1, 39), max_size=20),
)
"""Prompts that share their first tokens."""
arrivals = st.lists(st.tuples(prompts, params), min_size=1, max_size=6)


class AnyLoad(RuleBasedStateMachine):
    """See the head of this file. A text is compared with one made alone when the machine is torn down."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Request] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.laws: dict[str, Outcome] = {}
        self.texts: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.failed_steps = 0

    @initialize(
        kv_pages=st.integers(3, 14),
        max_batch_tokens=st.sampled_from([1, 3, 16, 20, 64]),
        max_running=st.integers(1, 6),
        max_context=st.sampled_from([64, 200]),
        fails=st.sampled_from([False, False, True]),
        drafter=st.sampled_from([None, *sorted(drafters({}, 40))]),
        k=st.sampled_from([1, 4, 20]),
        breaks=st.sampled_from([0, 0, 3]),
        arrivals=arrivals,
    )
    def start(
        self,
        kv_pages: int,
        max_batch_tokens: int,
        max_running: int,
        max_context: int,
        fails: bool,
        drafter: str | None,
        k: int,
        breaks: int,
        arrivals: list[tuple[list[int], dict[str, Any]]],
    ) -> None:
        """An engine whose memory is too small for much, and some work for it."""
        self.fails = fails
        self.shape = {"kv_pages": kv_pages, "max_context": max_context}
        self.config = EngineConfig(max_batch_tokens=max_batch_tokens, max_running=max_running)
        self.program = FakeProgram(**self.shape)
        speculator = None
        if drafter is not None:
            chosen = drafters(self.texts, 40)[drafter]
            speculator = FailingSpeculator(chosen, k, lambda call, times: breaks > 0 and times % breaks == 1)
        self.engine = Engine(self.program, self.config, speculator)
        self.arrive(arrivals)

    def alone(self, one: Request) -> Outcome:
        """The request on a fresh engine whose memory is of the same size."""
        return run(Engine(FakeProgram(**self.shape)), [one])[one.id]

    def add(self, one: Request) -> None:
        """Adds a request, if it can be served at all."""
        try:
            self.engine.add(one)
        except RequestError as error:
            assert "context" in str(error) or "KV memory" in str(error)
            return
        self.requests[one.id] = one
        self.outcomes[one.id] = Outcome()
        self.laws[one.id] = law = self.alone(msgspec.structs.replace(one, output=()))
        self.texts[one.id] = [*law.tokens]

    @rule(arrivals=arrivals)
    def arrive(self, arrivals: list[tuple[list[int], dict[str, Any]]]) -> None:
        """Requests, several at once."""
        for prompt, params in arrivals:
            self.add(request(f"r{len(self.requests)}", prompt, **params))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), tail=st.lists(st.integers(1, 39), min_size=1, max_size=5), params=params)
    def next_turn(self, data: st.DataObject, tail: list[int], params: dict[str, Any]) -> None:
        """A request that goes on from another's prompt and output."""
        id = data.draw(st.sampled_from(sorted(self.requests)))
        prompt = [*self.requests[id].prompt, *self.outcomes[id].tokens, *tail]
        self.add(request(f"r{len(self.requests)}", prompt, **params))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """A request again, with the output so far, as after a worker's death."""
        one = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        output = (*one.output, *self.outcomes[one.id].tokens)
        self.add(
            Request(
                id=f"r{len(self.requests)}",
                prompt=one.prompt,
                output=output,
                params=one.params,
                eos_token_ids=one.eos_token_ids,
            )
        )

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """An abort of anything; it says truly whether there was something to end."""
        id = data.draw(st.sampled_from(sorted(self.requests)))
        under_way = self.outcomes[id].finish is None and id not in self.aborted
        ended = self.engine.abort(id)
        if ended:
            assert under_way
            self.aborted.add(id)
        elif under_way:
            # A resumed request that was complete has its end waiting already.
            assert self.requests[id].output
        self.engine.check_integrity()

    @precondition(lambda self: self.fails)
    @rule(failure=st.sampled_from(["failures", "copy_failures"]))
    def break_something(self, failure: str) -> None:
        """The next step, or the next copy, fails."""
        self.failed_steps += 1
        getattr(self.program, failure).append(RuntimeError("planted"))

    @rule(steps=st.sampled_from([1, 2, 3, 20, 60]))
    def step(self, steps: int) -> None:
        """Some steps."""
        for _ in range(steps):
            for chunk in self.engine.step():
                self.outcomes[chunk.id].hear(chunk)
            self.engine.check_integrity()

    def teardown(self) -> None:
        """Runs to the end and holds every request against the law."""
        if not hasattr(self, "engine"):
            return
        run(self.engine, outcomes=self.outcomes)
        planted = 0
        for id, one in self.requests.items():
            outcome, law = self.outcomes[id], self.laws[id]
            del law.tokens[: len(one.output)], law.logprobs[: len(one.output)]
            assert outcome.finish is not None
            if (outcome.finish == "abort") or "planted" in (outcome.error or ""):
                assert (outcome.finish == "abort") == (id in self.aborted)
                planted += outcome.finish == "error"
                assert outcome.tokens == law.tokens[: len(outcome.tokens)]
                assert outcome.logprobs == law.logprobs[: len(outcome.logprobs)]
            else:
                assert (outcome.tokens, outcome.logprobs) == (law.tokens, law.logprobs)
                assert (outcome.finish, outcome.error) == (law.finish, law.error)
                assert outcome.stop_token == law.stop_token
                assert len(outcome.cached) == 1 or not outcome.tokens
        assert planted == 0 or self.failed_steps


TestAnyLoad = AnyLoad.TestCase
TestAnyLoad.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
