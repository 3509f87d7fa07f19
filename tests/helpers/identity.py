"""Running the same requests with a speculator and without, and telling where the answers differ."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tenfold.backends.base import Program
from tenfold.engine.engine import Engine
from tenfold.engine.limits import EngineConfig
from tenfold.protocol import LoadSnapshot, Request
from tenfold.speculate.base import Speculator
from tests.helpers.requests import Outcome, request

Outcomes = dict[str, Outcome]


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """Requests and when they arrive."""

    arrivals: tuple[tuple[int, Request], ...]
    """The step before which each is added."""
    config: EngineConfig = EngineConfig()
    aborts: Mapping[int, str] = {}
    """The step before which a request is aborted, if it is under way."""

    @property
    def requests(self) -> list[Request]:
        """All of them."""
        return [one for _, one in self.arrivals]


def at_once(requests: list[Request], **config: int) -> Scene:
    """All requests arrive before the first step."""
    return Scene(arrivals=tuple((0, one) for one in requests), config=EngineConfig(**config))


def play(
    program: Program, scene: Scene, speculator: Speculator | None = None
) -> tuple[Outcomes, LoadSnapshot]:
    """What became of the requests of a scene, and the engine's last word. The books are checked at every
    step, and at the end all pages must be back."""
    engine = Engine(program, scene.config, speculator)
    outcomes: Outcomes = {}
    step = 0
    while engine.has_work or len(outcomes) < len(scene.arrivals):
        for at, one in scene.arrivals:
            if at <= step and one.id not in outcomes:
                engine.add(one)
                outcomes[one.id] = Outcome()
        if step in scene.aborts:
            engine.abort(scene.aborts[step])
        for chunk in engine.step():
            outcomes[chunk.id].hear(chunk)
            assert chunk.logprobs is None or len(chunk.logprobs) == len(chunk.tokens)
        engine.check_integrity()
        step += 1
        assert step < 3000, "the engine does not come to an end"
    load = engine.load()
    assert load.pages_free == load.pages_total
    return outcomes, load


def texts_of(law: Outcomes) -> dict[str, list[int]]:
    """What each request generates, for the drafters that know it."""
    return {id: outcome.tokens for id, outcome in law.items()}


def differences(law: Outcomes, found: Outcomes, output: Mapping[str, int] | None = None) -> list[str]:
    """Where answers differ from the law, one line each. An aborted request may be short. ``output``: of
    requests that were resumed, how many tokens they had already."""
    lines = []
    for id, outcome in found.items():
        had = 0 if output is None else output.get(id, 0)
        tokens, logprobs = law[id].tokens[had:], law[id].logprobs[had:]
        if outcome.finish == "abort":
            tokens, logprobs = tokens[: len(outcome.tokens)], logprobs[: len(outcome.tokens)]
        elif (outcome.finish, outcome.stop_token, outcome.error) != (
            law[id].finish,
            law[id].stop_token,
            law[id].error,
        ):
            lines.append(f"{id} ends with {outcome.finish}, {outcome.error}; it should with {law[id].finish}")
        if outcome.tokens != tokens:
            lines.append(f"{id} has the tokens {outcome.tokens}; it should have {tokens}")
        elif outcome.logprobs != logprobs:
            lines.append(f"{id} has the right tokens with wrong log-probabilities")
    return lines


FAMILIES: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "temperature": lambda dice, vocab: {"temperature": dice.choice([0.3, 0.8, 1.0, 2.0])},
    "top_k": lambda dice, vocab: {"top_k": dice.choice([1, 3, 10])},
    "top_p": lambda dice, vocab: {"top_p": dice.choice([0.5, 0.9])},
    "min_p": lambda dice, vocab: {"min_p": dice.choice([0.05, 0.3])},
    "repetition": lambda dice, vocab: {"repetition_penalty": dice.choice([0.8, 1.3])},
    "presence": lambda dice, vocab: {"presence_penalty": dice.choice([-1.0, 1.5])},
    "frequency": lambda dice, vocab: {"frequency_penalty": dice.choice([-0.5, 0.7])},
    "bias": lambda dice, vocab: {
        "logit_bias": {
            dice.randrange(vocab): dice.choice([-float("inf"), -3.0, 2.0]) for _ in range(dice.randint(1, 30))
        }
    },
    "logprobs": lambda dice, vocab: {"logprobs": dice.randint(0, 5)},
    "seed": lambda dice, vocab: {"seed": dice.choice([0, -1, 2**63 + 5, dice.randrange(2**64)])},
    "stop": lambda dice, vocab: {"stop_token_ids": tuple(dice.randrange(vocab) for _ in range(3))},
    "length": lambda dice, vocab: {"max_tokens": dice.randint(1, 30)},
    "ignore_eos": lambda dice, vocab: {"ignore_eos": True},
}
"""What a request may ask for, by family: values for one request with a vocabulary of so many tokens."""


def any_params(dice: random.Random, vocab: int) -> dict[str, Any]:
    """Greedy or not, with some of `FAMILIES`."""
    params: dict[str, Any] = {"max_tokens": 24, "temperature": dice.choice([0.0, 1.0])}
    for family in FAMILIES.values():
        if dice.random() < 0.35:
            params.update(family(dice, vocab))
    return params


def any_requests(dice: random.Random, count: int, vocab: int, longest: int = 40) -> list[Request]:
    """Requests named 0, 1, ... of which some share first tokens, with `any_params`."""
    shared = [dice.randrange(1, vocab) for _ in range(longest)]
    return [
        request(
            str(number),
            [
                *shared[: dice.choice([0, 5, 16, longest // 2])],
                *(dice.randrange(1, vocab) for _ in range(dice.randint(1, longest // 2))),
            ],
            **any_params(dice, vocab),
        )
        for number in range(count)
    ]
