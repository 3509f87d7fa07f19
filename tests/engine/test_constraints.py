"""Constraints in the engine: every text keeps to its own, and nothing else changes it."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from tenfold.backends import sampling
from tenfold.backends.base import SamplingBatch
from tenfold.backends.native import NativeProgram
from tenfold.constraints.base import ConstraintError, UInt32s
from tenfold.constraints.matcher import GrammarMatcher
from tenfold.engine.batch import BatchBuilder
from tenfold.engine.engine import Engine
from tenfold.engine.limits import EngineConfig
from tenfold.limits import RequestError
from tenfold.protocol import Constraint, Request
from tenfold.speculate.base import Speculator
from tenfold.speculate.fixed import FixedSpeculator
from tests.helpers.constraints import SMALL, constraint, small_compiler
from tests.helpers.drafters import drafters
from tests.helpers.fake_program import FakeProgram
from tests.helpers.identity import Outcomes, any_params, differences, texts_of
from tests.helpers.native_programs import tiny_model
from tests.helpers.requests import request, run
from tests.helpers.schemas import SCHEMAS
from tests.helpers.tiny_models import CONFIGS

VOCAB = 96
MODEL = tiny_model({**CONFIGS["mistral"], "max_position_embeddings": 256})
COMPILER = small_compiler()
OTHERS = [
    constraint("json_object"),
    constraint("regex", "(ab|a)*(12)?[a-e]{2,9}"),
    constraint("choice", ["name", "na", "named", "true"]),
    constraint("grammar", 'start: "in" (A | B){1,9}\nA: /[a-c]+/\nB: "12" | "re"'),
]
LONG = constraint("regex", "(ab|[a-e]){50}")
CONSTRAINTS = OTHERS + [constraint("json_schema", schema) for schema in SCHEMAS]


@functools.cache
def program(pages: int = 120) -> NativeProgram:
    return MODEL.native("q8", kv_pages=pages, threads=1, max_rows=96, max_logit_rows=80)


def play(
    requests: Sequence[Request],
    speculator: Speculator | None = None,
    pages: int = 120,
    **config: int,
) -> tuple[Outcomes, Engine]:
    """The answers to requests that arrive at once."""
    engine = Engine(program(pages), EngineConfig(**config), speculator, COMPILER)
    return run(engine, requests), engine


def many(seed: int, count: int, longest: int = 60) -> list[Request]:
    """Requests with any parameters; two of three have a constraint."""
    dice = random.Random(seed)
    requests = []
    for number in range(count):
        params = any_params(dice, VOCAB) | {"max_tokens": dice.randint(5, longest)}
        if dice.random() < 0.67:
            params |= {"constraint": dice.choice(CONSTRAINTS), "ignore_eos": False}
            params.pop("logit_bias", None)  # it may forbid all that the constraint leaves
        prompt = [dice.randrange(1, VOCAB) for _ in range(dice.randint(1, 20))]
        requests.append(request(str(number), prompt, **params))
    return requests


@pytest.mark.parametrize("with_speculation", [False, True])
def test_every_text_keeps_to_its_schema(with_speculation: bool) -> None:
    """50 schemas, greedy and not: valid JSON of the schema, or cut by its length, which is told."""
    ended = 0
    for temperature in (0.0, 1.0):
        requests = [
            request(
                f"{n}",
                [3, n + 1],
                max_tokens=120,
                temperature=temperature,
                constraint=constraint("json_schema", schema),
            )
            for n, schema in enumerate(SCHEMAS)
        ]
        speculator = FixedSpeculator(drafters({}, VOCAB)["random"], 2) if with_speculation else None
        outcomes, _ = play(requests, speculator, pages=400)
        for n, schema in enumerate(SCHEMAS):
            outcome = outcomes[f"{n}"]
            if outcome.finish == "stop":
                assert outcome.tokens.pop() == 0
                jsonschema.validate(json.loads(SMALL.decode(outcome.tokens)), schema)
                ended += 1
            else:
                assert outcome.finish == "length" and len(outcome.tokens) == 120
    assert ended > 80


@pytest.mark.parametrize("name", sorted(drafters({}, VOCAB)))
def test_no_answer_differs_with_speculation(name: str) -> None:
    """Whoever drafts, with any other parameters beside, and with neighbours that have no constraint: tokens,
    log-probabilities and ends are those without. No draft is a fault."""
    for seed in range(3):
        requests = many(seed, 8)
        law, _ = play(requests)
        found, engine = play(requests, FixedSpeculator(drafters(texts_of(law), VOCAB)[name], 4))
        assert differences(law, found) == []
        speculation = engine.load().speculation
        assert speculation is not None and speculation.faults == 0


def test_what_is_forced_is_drafted_and_stands() -> None:
    """Where a text is all but given, a drafter that has nothing to say costs no steps."""
    one = request(
        "a", [5], max_tokens=60, constraint=constraint("choice", ['{"name": [12, 12, 12], "re": true}'])
    )
    law, plain = play([one])
    found, engine = play([one], FixedSpeculator(drafters({}, VOCAB)["oracle"], 0))
    assert differences(law, found) == []
    assert law["a"].finish == "stop"
    assert engine.load().steps * 3 < plain.load().steps


def test_neighbours_and_memory_change_nothing() -> None:
    """Alone, with seven others, and in memory so small that requests are put back and taken up again."""
    requests = many(20, 4)
    requests += [
        request(f"long {n}", [7, n + 1], max_tokens=80, constraint=constraint("regex", "(ab|[a-e]){70}"))
        for n in range(4)
    ]
    law: Outcomes = {}
    for one in requests:
        law |= play([one])[0]
    assert differences(law, play(requests)[0]) == []
    small, engine = play(requests, pages=8)
    assert engine.load().preemptions > 0
    assert differences(law, small) == []
    speculator = FixedSpeculator(drafters(texts_of(law), VOCAB)["often right"], 4)
    assert differences(law, play(requests, speculator, pages=8)[0]) == []


def test_a_resumed_request_goes_on_where_it_was() -> None:
    """From any of its tokens, the last included."""
    requests = [one for one in many(30, 8) if one.params.constraint is not None]
    law, _ = play(requests)
    dice = random.Random(1)
    had = {one.id: dice.randint(1, len(law[one.id].tokens)) for one in requests}
    resumed = [
        msgspec.structs.replace(one, output=tuple(law[one.id].tokens[: had[one.id]])) for one in requests
    ]
    assert differences(law, play(resumed)[0], had) == []


def refused(one: Request, engine: Engine) -> RequestError:
    with pytest.raises(RequestError) as caught:
        engine.add(one)
    assert not engine.has_work
    return caught.value


def test_what_cannot_be_is_refused() -> None:
    """A constraint that cannot be enforced, one beside ignore_eos, an output that does not fit it, an
    engine that knows no text."""
    engine = Engine(program(), matchers=COMPILER)
    bad = Constraint(kind="regex", text="[", field="guided_regex")
    assert refused(request("a", [1], constraint=bad), engine).field == "guided_regex"
    assert refused(request("a", [1], constraint=OTHERS[0], ignore_eos=True), engine).field == "ignore_eos"
    assert refused(request("a", [1], constraint=OTHERS[0], output=[5, 5]), engine).field == "output"
    error = refused(request("a", [1], constraint=OTHERS[0]), Engine(program()))
    assert "no tokenizer" in str(error)


class Breaking(GrammarMatcher):
    """Breaks at a call, as one does that exceeds a limit."""

    at = 5

    def fill(self, mask: UInt32s) -> None:
        super().fill(mask)
        Breaking.at -= 1
        if Breaking.at == 0:
            raise ConstraintError("planted")


@pytest.mark.parametrize("call", [1, 5, 9])
def test_a_matcher_that_breaks_ends_its_own_request(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its reason; the others' answers are what they were, and no page is lost."""
    requests = [request("free", [1, 2]), request("bound", [3], constraint=LONG, max_tokens=12)]
    law, _ = play(requests)
    monkeypatch.setattr("tenfold.constraints.compiler.GrammarMatcher", Breaking)
    Breaking.at = call
    found, engine = play(requests)
    assert found["bound"].finish == "error" and found["bound"].error == "planted"
    assert found["bound"].error_field == "constraint"
    assert found["bound"].tokens == law["bound"].tokens[: call - 1]
    assert differences({"free": law["free"]}, {"free": found["free"]}) == []
    constraints = engine.load().constraints
    assert constraints is not None and constraints.failures == 1


def test_a_guess_that_breaks_a_matcher_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would come after a wrong guess exceeds a limit: the answer is what it was."""
    one = request("a", [3], constraint=LONG, max_tokens=30)
    law, _ = play([one])

    class Second(GrammarMatcher):
        """Breaks in every fill that comes after a guess."""

        ahead = 0

        def fill(self, mask: UInt32s) -> None:
            super().fill(mask)
            if len(self._accepted) > len(sequences[0].tokens) - sequences[0].prompt_length:
                Second.ahead += 1
                raise ConstraintError("planted")

    nobody = type("Nobody", (), {"tokens": [0] * 99, "prompt_length": 0})
    sequences: list[Any] = [nobody]
    monkeypatch.setattr("tenfold.constraints.compiler.GrammarMatcher", Second)
    monkeypatch.setattr(GrammarMatcher, "forced", lambda self: [])
    speculator = FixedSpeculator(drafters(texts_of(law), VOCAB)["wrong"], 3)
    found, _ = play([one], _First(speculator, sequences))
    assert differences(law, found) == []
    assert Second.ahead > 0


class _First:
    """A speculator whose first sequence is known to the test from its beginning."""

    def __init__(self, inner: Speculator, sequences: list[Any]) -> None:
        self._inner, self._sequences = inner, sequences

    def begin(self, sequence: Any) -> None:
        self._sequences[0] = sequence
        self._inner.begin(sequence)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def wrong(change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the answers differ, or break their constraint, once something is changed."""
    requests = many(40, 8)
    fake = FakeProgram(vocab_size=VOCAB, kv_pages=120)  # it draws with the reference sampler
    law = run(Engine(fake, matchers=COMPILER), requests)
    oracle = FixedSpeculator(drafters(texts_of(law), VOCAB)["often right"], 4)
    with monkeypatch.context() as patch:
        change(patch)
        fake = FakeProgram(vocab_size=VOCAB, kv_pages=120)
        try:
            found = run(Engine(fake, None, oracle, COMPILER), requests)
        except (ConstraintError, AssertionError):
            return True
    return differences(law, found) != []


def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of another row, a matcher that is not taken back after a draft, a mask that comes after
    top_k: each shows in the answers. Without a fault nothing does."""
    assert not wrong(lambda patch: None, monkeypatch)

    build = BatchBuilder.build

    def other_row(self: BatchBuilder, *arguments: Any) -> Any:
        batch = build(self, *arguments)
        rows = batch.sampling.mask_rows
        assert rows is not None
        rows[:] = np.where(rows > 0, rows - 1, rows)
        return batch

    def late(logits: Any, batch: SamplingBatch, n: int) -> Any:
        """Top_k of what may not be drawn too."""
        none = msgspec.structs.replace(batch, mask_rows=np.full(len(batch.seed), -1, np.int32))
        ids = kept(sampling.adjusted(raw[0][n], none, n), none, n)
        allowed = sampling.mask_of(batch, n, len(logits))
        left = ids if allowed is None else ids[allowed[ids]]
        return left if len(left) else ids[:1]

    kept, sample, raw = sampling.kept, sampling.sample, [np.zeros(0)]

    def remembered(logits: Any, batch: SamplingBatch) -> Any:
        raw[0] = logits
        return sample(logits, batch)

    def mask_after_filters(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(sampling, "kept", late)
        patch.setattr("tests.helpers.fake_program.sample", remembered)

    assert wrong(lambda patch: patch.setattr(BatchBuilder, "build", other_row), monkeypatch)
    assert wrong(
        lambda patch: patch.setattr(GrammarMatcher, "rollback", lambda self, count: None), monkeypatch
    )
    assert wrong(mask_after_filters, monkeypatch)
