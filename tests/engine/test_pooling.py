"""Embeddings out of the engine: one law, whatever surrounds the request."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.backends.base import CompileOptions, Program
from tenfold.backends.torch.reference import TorchBackend
from tenfold.engine.engine import Engine
from tenfold.engine.limits import EngineConfig
from tenfold.engine.pooling import NOT_NUMBERS, Pool
from tenfold.kv.cache import pages_for
from tenfold.limits import PromptTooLong, RequestError, Unsupported
from tenfold.protocol import Constraint, Pooling, PoolingKind, Request, SamplingParams
from tenfold.speculate.fixed import FixedSpeculator
from tests.helpers.batches import Part, step_batch
from tests.helpers.drafters import drafters
from tests.helpers.fake_program import FakeProgram
from tests.helpers.identity import any_requests, texts_of
from tests.helpers.native_programs import TinyModel, tiny_model
from tests.helpers.requests import Outcome, request, run
from tests.helpers.tiny_models import CONFIGS, random_weights

Floats = npt.NDArray[np.float32]
KINDS: tuple[PoolingKind, ...] = ("mean", "last")


def embed(id: str, prompt: list[int], kind: PoolingKind = "mean", normalize: bool = True) -> Request:
    pooling = Pooling(kind=kind, normalize=normalize)
    return Request(id=id, prompt=tuple(prompt), params=SamplingParams(), pooling=pooling, eos_token_ids=(0,))


def law(program: Program, one: Request) -> bytes:
    """The definition, number by number: all states of the prompt in one step of a fresh program."""
    rows = len(one.prompt)
    batch = step_batch(Part(tokens=one.prompt, pages=list(range(pages_for(rows))), wanted=[]))
    states = program.step(msgspec.structs.replace(batch, state_rows=np.arange(rows, dtype=np.int32))).states
    assert states is not None and one.pooling is not None
    if one.pooling.kind == "last":
        states = states[-1:]
    pooled = [0.0] * states.shape[1]
    for row in states.tolist():
        pooled = [total + value for total, value in zip(pooled, row, strict=True)]
    pooled = [total / len(states) for total in pooled]
    if one.pooling.normalize:
        norm = math.sqrt(math.fsum(value * value for value in pooled))
        pooled = [value / norm for value in pooled]
    return np.array(pooled, "<f4").tobytes()


def vector(embedding: bytes | None) -> Floats:
    assert embedding is not None
    return np.frombuffer(embedding, "<f4")


def prompt_of(dice: random.Random, longest: int, vocab: int = 40) -> list[int]:
    """Some begin alike."""
    shared = random.Random(5).choices(range(1, vocab), k=longest)
    return shared[: dice.choice([0, 3, 16, 20, longest])] + dice.choices(
        range(1, vocab), k=dice.randint(1, longest)
    )


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.sampled_from([2, 7, 64]), pages=st.integers(9, 40))
def test_nothing_changes_an_embedding_and_an_embedding_changes_nothing(
    seed: int, rows: int, pages: int
) -> None:
    """In any crowd of embeddings and generations, with any cut into steps, with hits in the cache, put back
    for want of pages or not, aborted neighbours: each embedding is the law's, comes in one chunk and draws no
    token; each generation is what it is alone; the books are right at every step."""
    dice = random.Random(seed)
    program = FakeProgram(kv_pages=pages, max_context=140)
    engine = Engine(program, EngineConfig(max_batch_tokens=rows, max_running=dice.choice([1, 4, 16])))
    embeds = [embed(f"e{n}", prompt_of(dice, 60), dice.choice(KINDS), dice.random() < 0.5) for n in range(6)]
    others = [
        request(f"g{n}", prompt_of(dice, 30), max_tokens=dice.randint(1, 40), logprobs=1) for n in range(5)
    ]
    left: list[Request] = [*embeds, *others]
    dice.shuffle(left)
    outcomes: dict[str, Outcome] = {}
    aborted: set[str] = set()
    steps = 0
    while left or engine.has_work:
        while left and dice.random() < 0.4:
            one = left.pop()
            engine.add(one)
            outcomes[one.id] = Outcome()
        if dice.random() < 0.02 and outcomes:
            id = dice.choice(sorted(outcomes))
            if engine.abort(id):
                aborted.add(id)
        for chunk in engine.step():
            outcomes[chunk.id].hear(chunk)
        engine.check_integrity()
        steps += 1
        assert steps < 20_000
    assert engine.load().pages_free == pages
    for one in embeds:
        found = outcomes[one.id]
        assert not found.tokens
        if one.id in aborted:
            assert found.finish == "abort" and found.embedding is None
            continue
        assert found.finish == "stop" and found.embedding == law(FakeProgram(max_context=140), one)
        assert one.pooling is not None
        assert 0 <= found.cached[0] <= (0 if one.pooling.kind == "mean" else len(one.prompt) - 1)
    for one in others:
        alone = run(Engine(FakeProgram(max_context=140)), [one])[one.id]
        found = outcomes[one.id]
        if one.id not in aborted:
            assert (found.tokens, found.logprobs, found.finish) == (
                alone.tokens,
                alone.logprobs,
                alone.finish,
            )


@pytest.mark.parametrize("name", ["often right", "oracle", "wrong"])
def test_drafts_beside_embeddings(name: str) -> None:
    """With speculation on, drafts are verified in the steps that embed, and neither minds the other; a
    speculator hears of no embedding, also of one whose last row comes alone."""
    generations = any_requests(random.Random(4), 5, 40)
    law_of = run(Engine(FakeProgram()), generations)
    drafter = drafters(texts_of(law_of), 40)[name]
    embeds = [embed(f"e{n}", list(range(1, 30 + n)), KINDS[n % 2]) for n in range(8)]
    for rows in (7, 64):
        speculator = FixedSpeculator(drafter, 4)
        engine = Engine(FakeProgram(), EngineConfig(max_batch_tokens=rows), speculator)
        both = [one for pair in zip(embeds, generations, strict=False) for one in pair]
        found = run(engine, [*both, *embeds[len(generations) :]])
        for one in generations:
            assert (found[one.id].tokens, found[one.id].logprobs) == (
                law_of[one.id].tokens,
                law_of[one.id].logprobs,
            )
        for one in embeds:
            assert found[one.id].embedding == law(FakeProgram(), one)
        counts = engine.load().speculation
        assert counts is not None and counts.faults == 0 and counts.drafted_tokens > 0
        assert not {id for id, _, _ in drafter.ended} & {one.id for one in embeds}


def test_what_the_cache_may_give() -> None:
    """The last token's embedding takes the prompt from the cache, in whole pages; a mean takes
    nothing, for it needs every row's state; both leave their pages there for others."""
    program = FakeProgram()
    engine = Engine(program)
    prompt = list(range(1, 38))
    first = run(engine, [embed("a", prompt, "mean")])["a"]
    assert first.cached == [0]
    hit = run(engine, [embed("b", prompt, "last")])["b"]
    assert hit.cached == [32]
    before = program.rows_computed
    again = run(engine, [embed("c", prompt, "mean")])["c"]
    assert again.cached == [0] and program.rows_computed == before + 37
    assert again.embedding == first.embedding == law(FakeProgram(), embed("c", prompt, "mean"))
    assert hit.embedding == law(FakeProgram(), embed("b", prompt, "last"))
    assert run(engine, [request("d", [*prompt[:32], 1, 2])])["d"].cached == [32]


def test_a_mean_that_was_put_back_goes_on() -> None:
    """Rows that were counted before a preemption may come from the cache after it, and count once."""
    program = FakeProgram(kv_pages=8)
    engine = Engine(program, EngineConfig(max_batch_tokens=2))
    outcomes = {"g": Outcome(), "e": Outcome()}
    engine.add(request("g", range(1, 16), max_tokens=90, ignore_eos=True))
    for _ in range(8):
        engine.step()
    one = embed("e", list(range(1, 39)) * 2, "mean")
    engine.add(one)
    run(engine, outcomes=outcomes)
    assert engine.load().preemptions > 0
    assert outcomes["e"].cached == [0]
    assert outcomes["e"].embedding == law(FakeProgram(), one)


def test_a_full_context_and_one_token() -> None:
    """A prompt may fill the context, as nothing is generated; one token more is refused with the limit; one
    token is enough."""
    engine = Engine(FakeProgram(max_context=48))
    for kind in KINDS:
        for length in (1, 48):
            one = embed("a", list(range(1, 39)) * 2, kind)
            one = msgspec.structs.replace(one, prompt=one.prompt[:length])
            assert run(engine, [one])["a"].embedding == law(FakeProgram(max_context=48), one)
        with pytest.raises(
            PromptTooLong, match=r"^prompt is too long: it has 49 tokens; the model's context is 48\. Shorten"
        ):
            engine.add(embed("a", [1] * 49, kind))
    with pytest.raises(RequestError, match="at least one token"):
        engine.add(embed("a", []))
    with pytest.raises(PromptTooLong, match="do not fit the KV memory, which holds 16"):
        Engine(FakeProgram(kv_pages=1)).add(embed("a", [1] * 17))


def test_what_cannot_be_embedded_is_refused() -> None:
    """Tokens generated already, a constraint, and a program without states: each is refused by name, and
    nothing is taken on."""
    program = FakeProgram()
    engine = Engine(program)
    one = embed("a", [1, 2])
    with pytest.raises(RequestError, match=r"^output has tokens"):
        engine.add(msgspec.structs.replace(one, output=(3,)))
    params = SamplingParams(constraint=Constraint(kind="regex", text="a", field="regex"))
    with pytest.raises(RequestError, match=r"^regex has nothing to constrain"):
        engine.add(msgspec.structs.replace(one, params=params))
    program.info = msgspec.structs.replace(program.info, state_width=0)
    with pytest.raises(Unsupported, match=r"^pooling is not supported: this model"):
        engine.add(one)
    assert not engine.has_work


def test_states_that_are_no_numbers_end_with_an_error() -> None:
    """NaN in any row is an error and no vector; zeros are no division by zero."""
    bad = np.ones((3, 8), np.float32)
    bad[1, 3] = np.nan
    pool = Pool(Pooling(kind="mean"), 3)
    pool.take(bad)
    assert pool.embedding() is None
    pool = Pool(Pooling(kind="mean"), 2)
    pool.take(np.zeros((2, 8), np.float32))
    assert pool.embedding() == bytes(32)

    class Broken(FakeProgram):
        def step(self, batch: Any) -> Any:
            output = super().step(batch)
            states = output.states
            return msgspec.structs.replace(
                output, states=None if states is None else states * np.float32(np.nan)
            )

    found = run(Engine(Broken()), [embed("a", [1, 2, 3]), request("g", [4, 5])])
    assert (found["a"].finish, found["a"].error, found["a"].embedding) == ("error", NOT_NUMBERS, None)
    assert found["g"].finish in ("stop", "length")


def test_a_step_that_fails_ends_it() -> None:
    """The embedding of a failed step is an error; the engine goes on."""
    program = FakeProgram()
    engine = Engine(program, EngineConfig(max_batch_tokens=4))
    engine.add(embed("a", list(range(1, 20))))
    engine.step()
    program.failures.append(RuntimeError("no more"))
    outcomes = {"a": Outcome()}
    run(engine, outcomes=outcomes)
    assert outcomes["a"].finish == "error" and "no more" in (outcomes["a"].error or "")
    assert run(engine, [embed("b", [1, 2])])["b"].finish == "stop"


def last_hidden_state(config: dict[str, Any], model: TinyModel, prompt: list[int]) -> Floats:
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    given = kind.from_dict({key: value for key, value in config.items() if key != "model_type"})
    given._attn_implementation = "eager"
    theirs = transformers.AutoModelForCausalLM.from_config(given).to(torch.float32).eval()
    weights = {name: torch.from_numpy(one) for name, one in random_weights(model.graph).items()}
    theirs.load_state_dict(weights, strict=False)
    with torch.inference_mode():
        states: Floats = theirs.model(torch.tensor([prompt])).last_hidden_state[0].numpy()
    return states


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_those_of_transformers(name: str, kind: PoolingKind) -> None:
    """Native in F32, the torch reference, and transformers' last_hidden_state pooled by torch are the same
    vector but for rounding; native ones are the same bits for every cut into steps and team of threads."""
    model = tiny_model(CONFIGS[name])
    prompt = random.Random(3).choices(range(96), k=50)
    states = torch.from_numpy(last_hidden_state(CONFIGS[name], model, prompt))
    pooled = states.mean(0) if kind == "mean" else states[-1]
    theirs = torch.nn.functional.normalize(pooled, dim=0).numpy()
    raw = pooled.numpy()
    assert 0.05 < np.abs(theirs).max() < 1
    options = CompileOptions(kv_pages=12, max_rows=64, threads=1, format="f32")
    reference = Engine(TorchBackend().compile(model.graph, model.checkpoint, options))
    exact = vector(run(reference, [embed("a", prompt, kind)])["a"].embedding)
    assert np.abs(exact - theirs).max() < 1e-5
    found = set()
    teams = ((1, 64), (1, 5), (2, 64)) if name == "qwen3" else ((1, 64), (1, 5))
    for threads, rows in teams:
        engine = Engine(model.native("f32", threads=threads), EngineConfig(max_batch_tokens=rows))
        asked = request("g", prompt[:20], logprobs=3)
        (alone,) = run(Engine(model.native("f32", threads=threads)), [asked]).values()
        neighbours = [asked, embed("b", prompt[:7], "last")]
        outcomes = run(engine, [*neighbours, embed("a", prompt, kind), embed("r", prompt, kind, False)])
        assert (outcomes["g"].tokens, outcomes["g"].logprobs) == (alone.tokens, alone.logprobs)
        found.add(outcomes["a"].embedding)
        length = np.abs(raw).max()
        assert np.abs(vector(outcomes["r"].embedding) - raw).max() < 1e-4 * length
    (one,) = found
    assert np.abs(vector(one) - exact).max() < 1e-5
    assert abs(np.linalg.norm(vector(one)) - 1) < 1e-6
