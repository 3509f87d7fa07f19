"""What the engine promises for each request, in small scenes."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from tenfold.backends.base import StepBatch, StepOutput
from tenfold.engine.engine import Engine
from tenfold.engine.limits import EngineConfig
from tenfold.kv.pages import IntegrityError
from tenfold.limits import BeyondMemory, RequestError
from tenfold.protocol import Request
from tests.helpers.fake_program import FakeProgram
from tests.helpers.requests import Outcome, request, run

LONG = [1 + i * 7 % 39 for i in range(200)]


def alone(one: Request, **program: int) -> Outcome:
    """The request on a fresh engine of its own."""
    return run(Engine(FakeProgram(**program)), [one])[one.id]


@pytest.mark.parametrize("budget", [1, 2, 7, 16, 17, 50, 512])
def test_chunking_of_the_prompt_does_not_matter(budget: int) -> None:
    """The text is the same whatever the budget of rows per step, and the budget is kept."""
    one = request("a", LONG[:70], max_tokens=20)
    program = FakeProgram(max_rows=budget)
    outcome = run(Engine(program, EngineConfig(max_batch_tokens=budget)), [one])["a"]
    assert outcome.tokens == alone(one).tokens
    assert len(outcome.tokens) > 1
    assert program.rows_computed == 70 + len(outcome.tokens) - 1


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 64])
def test_the_same_prompt_again_gives_the_same_text(length: int) -> None:
    """A full hit, on a page's boundary and beside it, changes nothing but the tokens computed."""
    program = FakeProgram()
    engine = Engine(program)
    first = run(engine, [request("a", LONG[:length])])["a"]
    before = program.rows_computed
    second = run(engine, [request("b", LONG[:length])])["b"]
    assert second.tokens == first.tokens == alone(request("a", LONG[:length])).tokens
    full = (length + len(first.tokens) - 1) // 16 * 16
    assert (first.cached, second.cached) == ([0], [min(length - 1, full)])
    assert program.rows_computed - before == length - second.cached[0] + len(second.tokens) - 1


def test_neighbours_and_shared_prefixes_do_not_matter() -> None:
    """Requests that share prefixes of every length, in one batch, each give the text they give alone."""
    requests = [
        request(
            f"r{i}", [*LONG[: 5 * i], *LONG[100 : 110 + i]], seed=i, temperature=0.5 + i / 10, max_tokens=30
        )
        for i in range(12)
    ]
    engine = Engine(FakeProgram(kv_pages=200))
    outcomes = run(engine, requests)
    for one in requests:
        assert outcomes[one.id].tokens == alone(one).tokens
    again = run(engine, [msgspec.structs.replace(one, id=one.id + "x") for one in requests])
    for one in requests:
        assert again[one.id + "x"].tokens == outcomes[one.id].tokens
    assert engine.load().cached_tokens > 300


def test_preempted_requests_resume_token_for_token() -> None:
    """With too few pages for all, the latest are thrown out and come back: no text changes, no token comes
    twice, and cached_tokens tells what the first admission found, not what the sequence finds of its own
    later."""
    requests = [
        request(f"r{i}", LONG[i * 20 : i * 20 + 20], max_tokens=60, ignore_eos=True) for i in range(5)
    ]
    engine = Engine(FakeProgram(kv_pages=12))
    outcomes = run(engine, requests)
    assert engine.load().preemptions >= 2
    for one in requests:
        assert outcomes[one.id].tokens == alone(one).tokens
        assert outcomes[one.id].cached == [0]
    assert engine.load().cached_tokens == 0


def test_a_resumed_request_goes_on_as_if_never_interrupted() -> None:
    """Given its output so far, a request continues with the same tokens: they count for length, penalties,
    positions."""
    params: dict[str, Any] = {
        "max_tokens": 40,
        "ignore_eos": True,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
    }
    whole = alone(request("a", LONG[:21], **params)).tokens
    assert len(whole) == 40
    for cut in (1, 11, 12, 39):
        rest = alone(request("a", LONG[:21], output=whole[:cut], **params))
        assert whole[:cut] + rest.tokens == whole
        assert rest.finish == "length"


def test_a_resumed_request_that_was_complete_only_ends() -> None:
    """A request whose worker died between its last token and its end gets the end, and no further token."""
    done = alone(request("a", LONG[:5], output=[3, 4], max_tokens=2))
    assert (done.tokens, done.finish) == ([], "length")
    done = alone(request("a", LONG[:5], output=[3, 0]))
    assert (done.tokens, done.finish, done.stop_token) == ([], "stop", 0)


def test_endings() -> None:
    """max_tokens, end of sequence, stop ids, ignore_eos and the context's end, each with its reason and
    token."""
    free = alone(request("a", LONG[:9], max_tokens=30, ignore_eos=True))
    assert (len(free.tokens), free.finish) == (30, "length")
    stop = next(token for token in free.tokens[3:] if token != 0)
    at = free.tokens.index(stop)
    stopped = alone(request("a", LONG[:9], max_tokens=30, ignore_eos=True, stop_token_ids=(stop,)))
    assert (stopped.tokens, stopped.finish, stopped.stop_token) == (free.tokens[: at + 1], "stop", stop)
    forced = alone(request("a", LONG[:9], logit_bias={0: 100.0}))
    assert (forced.tokens, forced.finish, forced.stop_token) == ([0], "stop", 0)
    ignored = alone(request("a", LONG[:9], logit_bias={0: 100.0}, ignore_eos=True))
    assert (ignored.tokens, ignored.finish) == ([0] * 8, "length")
    last = alone(request("a", LONG[:9], max_tokens=1, logit_bias={0: 100.0}))
    assert (last.tokens, last.finish) == ([0], "stop")
    context = alone(request("a", LONG[:9], max_tokens=None, ignore_eos=True), max_context=50)
    assert (len(context.tokens), context.finish) == (41, "length")


def test_logprobs_come_with_the_tokens_that_asked() -> None:
    """One TokenLogprob per token with as many alternatives as asked, beside neighbours that ask for more or
    none."""
    requests = [
        request("none", LONG[:9]),
        request("zero", LONG[:9], logprobs=0),
        request("five", LONG[:9], logprobs=5),
    ]
    outcomes = run(Engine(FakeProgram()), requests)
    assert outcomes["none"].logprobs == []
    for name, top in (("zero", 0), ("five", 5)):
        assert len(outcomes[name].logprobs) == len(outcomes[name].tokens)
        assert all(len(entry.top) == top and entry.logprob < 0 for entry in outcomes[name].logprobs)
    best = outcomes["five"].logprobs[0].top
    assert [p for _, p in best] == sorted((p for _, p in best), reverse=True)
    assert [entry.logprob for entry in outcomes["zero"].logprobs] == [
        entry.logprob for entry in outcomes["five"].logprobs
    ]


def test_the_program_gets_the_sampling_parameters_of_each_row() -> None:
    """Every field of SamplingParams arrives at its own rows, with the history counted token by token."""
    seen: list[dict[str, list[float]]] = []

    class Recorder(FakeProgram):
        def step(self, batch: StepBatch) -> StepOutput:
            s = batch.sampling
            seen.append({name: getattr(s, name).tolist() for name in s.__struct_fields__})
            return super().step(batch)

    engine = Engine(Recorder())
    params: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.75,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "logit_bias": {5: -2.0, 0: -math.inf},
        "seed": -1,
        "logprobs": 2,
    }
    outcomes = run(
        engine, [request("plain", [7], max_tokens=3), request("all", [8, 9, 8], max_tokens=3, **params)]
    )
    assert seen[0] == {
        "temperature": [1, 0.5],
        "top_k": [0, 9],
        "top_p": [1, 0.75],
        "min_p": [0, 0.125],
        "repetition": [1, 1.5],
        "presence": [0, 0.25],
        "frequency": [0, -0.5],
        "seed": [1, 2**64 - 1],
        "position": [1, 3],
        "history_offsets": [0, 0, 2],
        "history_tokens": [8, 9],
        "history_counts": [0, 0],
        "bias_offsets": [0, 0, 2],
        "bias_tokens": [5, 0],
        "bias_values": [-2, -math.inf],
        "logprobs": [-1, 2],
        "mask_rows": [-1, -1],
        "masks": [],
    }
    drawn = outcomes["all"].tokens
    history = dict(zip(seen[2]["history_tokens"], seen[2]["history_counts"], strict=True))
    assert history == {token: drawn[:2].count(token) for token in {8, 9, *drawn[:2]}}
    assert seen[2]["position"][-1] == 5


def test_a_request_without_a_seed_gets_one() -> None:
    """Two requests without a seed draw differently; with the same seed, alike."""
    texts = [
        alone(request("a", LONG[:9], seed=seed, temperature=3.0, max_tokens=30, ignore_eos=True)).tokens
        for seed in (None, None, 5, 5)
    ]
    assert texts[0] != texts[1]
    assert texts[2] == texts[3]


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (request("a", []), "prompt is empty"),
        (request("a", [1, 40]), "prompt has the token id 40, which is not in the vocabulary (0 to 39)"),
        (request("a", [-1]), "prompt has the token id -1"),
        (request("a", [1], output=[99]), "output has the token id 99"),
        (request("a", [1] * 300), "prompt is too long: it has 300 tokens; the model's context is 300"),
        (
            request("a", [1] * 161),
            "prompt is too long: it has 161 tokens; they do not fit the KV memory, which holds 160",
        ),
        (request("a", [1], temperature=-0.1), "temperature is -0.1"),
        (request("a", [1], temperature=math.nan), "temperature is nan"),
        (request("a", [1], temperature=1e-9), "temperature is 1e-09"),
        (request("a", [1], top_k=-1), "top_k is -1"),
        (request("a", [1], top_p=0.0), "top_p is 0.0"),
        (request("a", [1], top_p=1.1), "top_p is 1.1"),
        (request("a", [1], min_p=2.0), "min_p is 2.0"),
        (request("a", [1], repetition_penalty=0.0), "repetition_penalty is 0.0"),
        (request("a", [1], presence_penalty=3.0), "presence_penalty is 3.0"),
        (request("a", [1], frequency_penalty=math.inf), "frequency_penalty is inf"),
        (request("a", [1], logit_bias={40: 1.0}), "logit_bias has the token id 40"),
        (request("a", [1], logit_bias={4: math.nan}), "logit_bias[4] is nan"),
        (request("a", [1], seed=2**64), "seed is 18446744073709551616"),
        (request("a", [1], stop_token_ids=(77,)), "stop_token_ids has the token id 77"),
        (request("a", [1], max_tokens=0), "max_tokens is 0"),
        (request("a", [1], logprobs=21), "logprobs is 21; it must be from 0 to 20"),
        (request("busy", [1]), "id 'busy' is that of a request under way"),
    ],
)
def test_bad_requests_are_refused_by_name(one: Request, message: str) -> None:
    """A request that cannot be served is refused with a message that names field and value, and leaves no
    trace."""
    engine = Engine(FakeProgram(max_context=300, kv_pages=10))
    engine.add(request("busy", [1]))
    with pytest.raises(RequestError) as error:
        engine.add(one)
    assert message in str(error.value)
    assert message.startswith(error.value.field)
    assert list(run(engine)) == ["busy"]


def test_config_is_checked() -> None:
    """A config that could never make a step is refused by name."""
    with pytest.raises(ValueError, match="max_running is 0"):
        EngineConfig(max_running=0)


def test_abort_in_every_phase() -> None:
    """Waiting, mid-prefill, decoding, preempted: an abort ends the request with one chunk, and all pages come
    back."""
    engine = Engine(FakeProgram(kv_pages=8), EngineConfig(max_batch_tokens=16, max_running=3))
    outcomes = {name: Outcome() for name in ("first", "decoding", "prefill", "waiting")}

    def step() -> None:
        for chunk in engine.step():
            outcomes[chunk.id].hear(chunk)
        engine.check_integrity()

    engine.add(request("first", LONG[:4], max_tokens=100, ignore_eos=True))
    engine.add(request("decoding", LONG[10:14], max_tokens=90, ignore_eos=True))
    step()
    engine.add(request("prefill", LONG[20:60]))
    engine.add(request("waiting", LONG[:50]))
    step()
    assert engine.load().running == 3
    for name in ("prefill", "decoding", "waiting"):
        assert engine.abort(name)
        assert not engine.abort(name)
        engine.check_integrity()
    step()
    assert {name: (o.finish, len(o.tokens)) for name, o in outcomes.items()} == {
        "first": (None, 3),
        "decoding": ("abort", 2),
        "prefill": ("abort", 0),
        "waiting": ("abort", 0),
    }
    outcomes["late"] = Outcome()
    engine.add(request("late", LONG[60:70], max_tokens=100, ignore_eos=True))
    while engine.load().preemptions == 0:
        step()
    assert engine.load().waiting == 1
    assert engine.abort("late")
    assert not engine.abort("never heard of")
    while engine.has_work:
        step()
    assert (outcomes["late"].finish, outcomes["first"].finish) == ("abort", "length")
    assert (
        outcomes["first"].tokens == alone(request("first", LONG[:4], max_tokens=100, ignore_eos=True)).tokens
    )
    assert engine.load().pages_free == 8


def test_an_id_may_be_used_again_after_an_abort() -> None:
    """The end of the aborted request is told before anything of the new one."""
    engine = Engine(FakeProgram())
    engine.add(request("a", [1, 2]))
    engine.abort("a")
    engine.add(request("a", [3, 4]))
    chunks = [chunk for _ in range(9) for chunk in engine.step()]
    assert chunks[0].finish == "abort"
    assert chunks[-1].finish in ("length", "stop")


def test_a_request_that_outgrows_the_memory_ends_with_an_error() -> None:
    """A request that needs more pages than there are gets all that fit, then an error that says so; others go
    on."""
    big = request("big", LONG[:20], max_tokens=400, ignore_eos=True)
    small = request("small", LONG[50:60], max_tokens=12)
    outcomes = run(Engine(FakeProgram(kv_pages=4)), [big, small])
    assert outcomes["big"].finish == "error"
    assert "KV memory is full" in (outcomes["big"].error or "")
    assert len(outcomes["big"].tokens) == 64 - 20 + 1
    assert outcomes["big"].tokens == alone(big, kv_pages=4).tokens
    assert outcomes["small"].tokens == alone(small).tokens


def test_what_is_too_much_for_this_memory_is_told_from_other_faults() -> None:
    """Promise: a request that outgrows the KV memory here, or is too long for it from the start, says that a
    larger one may serve it; one that is too long for the model does not."""
    engine = Engine(FakeProgram(kv_pages=4, max_context=200))
    engine.add(request("big", LONG[:60], max_tokens=100, ignore_eos=True))
    chunks = []
    while engine.has_work:
        chunks += engine.step()
    assert [chunk.beyond_memory for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].finish == "error" and chunks[-1].tokens == ()
    assert len([token for chunk in chunks for token in chunk.tokens]) == 5  # page by page, to the last row
    with pytest.raises(BeyondMemory, match="do not fit the KV memory"):
        engine.add(request("long", LONG[:65]))
    with pytest.raises(RequestError, match="the model's context is 200") as caught:
        engine.add(request("too long", LONG[:200]))
    assert not isinstance(caught.value, BeyondMemory)


def test_a_failing_step_ends_its_requests_and_no_others() -> None:
    """Requests of the failed step end with its error and give their pages back; a waiting one is served after
    it."""
    program = FakeProgram(kv_pages=32)
    engine = Engine(program, EngineConfig(max_running=2))
    requests = [request(name, LONG[:30], max_tokens=10) for name in ("a", "b", "c")]
    for one in requests:
        engine.add(one)
    engine.step()
    program.failures.append(RuntimeError("the memory burned"))
    outcomes = run(engine)
    for name in ("a", "b"):
        assert outcomes[name].finish == "error"
        assert outcomes[name].error == "the step failed: RuntimeError: the memory burned"
    assert outcomes["c"].tokens == alone(requests[2]).tokens


def test_a_row_without_a_token_to_draw_ends_its_request_and_no_others() -> None:
    """A program that finds no number among a request's logits says -1: that is an error, not token 0."""

    class Numberless(FakeProgram):
        """As its base, but the first sequence of every step gets no token."""

        def step(self, batch: StepBatch) -> StepOutput:
            output = super().step(batch)
            output.tokens[0] = -1
            return output

    engine = Engine(Numberless(), EngineConfig(max_batch_tokens=64))
    requests = [request(name, LONG[:9], max_tokens=1) for name in ("a", "b")]
    for one in requests:
        engine.add(one)
    outcomes = run(engine)
    assert outcomes["a"].finish == "error"
    assert outcomes["a"].error is not None and "no token can be drawn" in outcomes["a"].error
    assert outcomes["b"].tokens == alone(requests[1]).tokens


def test_rows_of_a_failed_step_never_enter_the_cache() -> None:
    """After a failed prefill the same prompt finds only what earlier steps finished."""
    program = FakeProgram()
    engine = Engine(program, EngineConfig(max_batch_tokens=32))
    engine.add(request("a", LONG[:60]))
    engine.step()
    program.failures.append(ValueError("no"))
    assert run(engine)["a"].finish == "error"
    again = run(engine, [request("a", LONG[:60])])["a"]
    assert again.cached == [32]
    assert again.tokens == alone(request("a", LONG[:60])).tokens


def test_a_failing_copy_ends_its_request_only() -> None:
    """Where cached rows cannot be copied the request that wanted them ends with an error, the others go
    on."""
    program = FakeProgram()
    engine = Engine(program)
    run(engine, [request("a", LONG[:40])])
    program.copy_failures.append(RuntimeError("no"))
    outcomes = run(engine, [request("b", LONG[:20]), request("c", LONG[5:30])])
    assert outcomes["b"].finish == "error"
    assert "could not be copied: no" in (outcomes["b"].error or "")
    assert outcomes["c"].tokens == alone(request("c", LONG[5:30])).tokens


def test_nobody_starves() -> None:
    """A large request that has to wait for pages is served before small ones that came after it, though they
    would fit, under a load that never ends; and every request is served in the end."""
    engine = Engine(FakeProgram(kv_pages=12), EngineConfig(max_batch_tokens=24, max_running=4))
    outcomes: dict[str, Outcome] = {}
    served: list[str] = []
    large = {10, 30, 50}
    for i in range(70):
        prompt = LONG[i : i + (120 if i in large else 10)]
        engine.add(request(f"r{i}", prompt, max_tokens=12, ignore_eos=True))
        outcomes[f"r{i}"] = Outcome()
    added, steps = 70, 0
    while engine.has_work:
        for chunk in engine.step():
            if not outcomes[chunk.id].tokens:
                served.append(chunk.id)
            outcomes[chunk.id].hear(chunk)
            if chunk.finish and added < 150:
                outcomes[f"r{added}"] = Outcome()
                engine.add(request(f"r{added}", LONG[added % 50 : added % 50 + 10], max_tokens=12))
                added += 1
        steps += 1
        assert steps < 5000
    assert served == [f"r{i}" for i in range(150)]
    assert all(outcome.finish in ("length", "stop") for outcome in outcomes.values())


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    """Each step of a chunked prefill also gives every decoding sequence its token."""
    engine = Engine(FakeProgram(), EngineConfig(max_batch_tokens=16))
    engine.add(request("decode", [1, 2], max_tokens=40, ignore_eos=True))
    engine.step()
    engine.add(request("long", LONG, max_tokens=1))
    for _ in range(200 // 15):
        assert [chunk.id for chunk in engine.step()] == ["decode"]
    assert [chunk.id for chunk in engine.step()] == ["decode", "long"]


def test_limits_of_the_program_are_kept() -> None:
    """The fake refuses a step beyond max_rows or max_logit_rows; with more requests than those, all are
    served."""
    program = FakeProgram(max_rows=5, max_logit_rows=3)
    requests = [request(f"r{i}", LONG[i : i + 4]) for i in range(20)]
    outcomes = run(Engine(program), requests)
    assert all(outcome.finish in ("stop", "length") for outcome in outcomes.values())
    for one in requests:
        assert outcomes[one.id].tokens == alone(one).tokens


def test_load_tells_what_is_there() -> None:
    """Each number of the snapshot, in a scene where all are known."""
    engine = Engine(FakeProgram(kv_pages=10), EngineConfig(max_running=1))
    engine.add(request("a", LONG[:40], max_tokens=3, ignore_eos=True))
    engine.add(request("b", LONG[:40], max_tokens=3, ignore_eos=True))
    assert (engine.load().running, engine.load().waiting, engine.load().pages_free) == (0, 2, 10)
    engine.step()
    load = engine.load()
    assert (load.running, load.waiting, load.pages_total, load.pages_free) == (1, 1, 10, 7)
    assert (load.steps, load.prompt_tokens, load.cached_tokens, load.generated_tokens) == (1, 80, 0, 1)
    run(engine)
    load = engine.load()
    assert (load.running, load.waiting, load.pages_free, load.preemptions) == (0, 0, 10, 0)
    assert (load.steps, load.prompt_tokens, load.cached_tokens, load.generated_tokens) == (6, 80, 32, 6)


def test_check_integrity_finds_planted_faults() -> None:
    """A leaked page and a lost sequence are both found."""
    engine = Engine(FakeProgram())
    engine.add(request("a", LONG[:40]))
    engine.step()
    engine.check_integrity()
    engine._cache.pool.take()
    with pytest.raises(IntegrityError, match="counts 1 owners"):
        engine.check_integrity()
    engine = Engine(FakeProgram())
    engine.add(request("a", LONG[:40]))
    engine._scheduler.waiting.clear()
    with pytest.raises(IntegrityError, match="not those under way in order of arrival"):
        engine.check_integrity()


def test_the_fake_notices_a_wrong_page() -> None:
    """The tests above can fail: a text computed over a swapped page differs."""
    program = FakeProgram()
    engine = Engine(program)
    engine.add(request("a", LONG[:40], ignore_eos=True))
    tokens = [token for chunk in engine.step() for token in chunk.tokens]
    program.write_page(0, program.read_page(1))
    tokens += [token for _ in range(7) for chunk in engine.step() for token in chunk.tokens]
    assert tokens != alone(request("a", LONG[:40], ignore_eos=True)).tokens
