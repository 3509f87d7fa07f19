"""Making requests, and running an engine over them with its books checked at every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tenfold.engine.engine import Engine
from tenfold.protocol import Chunk, FinishReason, Request, SamplingParams, TokenLogprob


class Outcome(msgspec.Struct):
    """All that came of one request."""

    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None
    error_field: str | None = None
    cached: list[int] = []
    embedding: bytes | None = None

    def hear(self, chunk: Chunk) -> None:
        """Takes in a chunk; nothing may follow a finish reason."""
        assert self.finish is None, "a chunk after the last"
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs or ()
        self.finish, self.stop_token, self.error = chunk.finish, chunk.stop_token, chunk.error
        self.error_field = chunk.error_field
        self.embedding = chunk.embedding
        if chunk.cached_tokens is not None:
            self.cached.append(chunk.cached_tokens)
        assert len(self.cached) <= 1, "cached_tokens told twice"


def request(id: str, prompt: Iterable[int], *, output: Iterable[int] = (), **params: Any) -> Request:
    """A request with a fixed seed, 8 tokens long where nothing else is said, with token 0 as end of
    sequence."""
    given: dict[str, Any] = {"seed": 1, "max_tokens": 8, **params}
    return Request(
        id=id,
        prompt=tuple(prompt),
        output=tuple(output),
        params=SamplingParams(**given),
        eos_token_ids=(0,),
    )


def run(
    engine: Engine, requests: Iterable[Request] = (), outcomes: dict[str, Outcome] | None = None
) -> dict[str, Outcome]:
    """Adds the requests and steps to the end; every request must end, and all pages must be back then. Goes
    on from ``outcomes``, if given."""
    outcomes = {} if outcomes is None else outcomes
    for one in requests:
        engine.add(one)
        outcomes[one.id] = Outcome()
    steps = 0
    while engine.has_work:
        for chunk in engine.step():
            outcomes.setdefault(chunk.id, Outcome()).hear(chunk)
        engine.check_integrity()
        steps += 1
        assert steps < 100_000, "the engine does not come to an end"
    assert all(outcome.finish for outcome in outcomes.values())
    load = engine.load()
    assert load.pages_free == load.pages_total
    assert load.running == load.waiting == 0
    return outcomes
