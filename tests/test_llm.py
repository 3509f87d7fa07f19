"""The Python API, over the fake engine."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import tenfold
from tenfold.limits import PromptTooLong
from tenfold.llm import LLM, GenerationError, Prompt
from tenfold.protocol import Chunk, Constraint, EngineSettings, Pooling, PoolingKind, SamplingParams
from tests.helpers import expected
from tests.helpers.fake_engine import REFUSED, STATE_WIDTH, FakeConfig, FakeEngine, embedding_of
from tests.helpers.fake_text import load_fake_text

PARAMS = SamplingParams(seed=4, max_tokens=12, ignore_eos=True)
WRONG: Any = "hot"
WRONG_POOLING: Any = "max"
WRONG_TEXTS: Any = None


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(EngineSettings(model="", max_running=2), FakeConfig())


@pytest.fixture
def llm(engine: FakeEngine) -> LLM:
    llm = LLM.__new__(LLM)
    llm._setup(engine, load_fake_text(""), 512)
    return llm


def test_many_prompts_are_answered_in_their_order(llm: LLM) -> None:
    """More than run at once, as text and as ids."""
    prompts: list[Prompt] = ["abc", [66, 67], "x"]
    found = llm.generate(prompts, PARAMS)
    assert [each.text for each in found] == [
        expected.text("abc", 4, 12),
        expected.text("ab", 4, 12),
        expected.text("x", 4, 12),
    ]
    assert [each.finish_reason for each in found] == ["length"] * 3
    assert [len(each.token_ids) for each in found] == [12] * 3


def test_texts_become_vectors(llm: LLM, engine: FakeEngine) -> None:
    """One row a text, in their order, more than run at once, as text and as ids; by the model's own pooling,
    the mean, unless another is asked for; no text, no row."""
    texts: list[Prompt] = ["abc", [66, 67], "x", "y", "z"]
    found = llm.embed(texts)
    assert found.dtype == np.float32 and found.shape == (5, STATE_WIDTH)

    def exact(prompt: tuple[int, ...], kind: PoolingKind = "mean", normalize: bool = True) -> bytes:
        return embedding_of(prompt, Pooling(kind=kind, normalize=normalize))

    assert found[0].tobytes() == exact((66, 67, 68)) and found[1].tobytes() == exact((66, 67))
    last = llm.embed("abc", pooling="last", normalize=False)
    assert last.shape == (1, STATE_WIDTH) and last.tobytes() == exact((66, 67, 68), "last", False)
    assert llm.embed([]).shape == (0, 0)
    with pytest.raises(ValueError, match="refuses"):
        llm.embed([[66], [REFUSED]])
    assert not engine.has_work
    with pytest.raises(ValueError, match="pooling is 'max'; it must be 'mean' or 'last'"):
        llm.embed("a", pooling=WRONG_POOLING)
    with pytest.raises(TypeError, match="texts is None"):
        llm.embed(WRONG_TEXTS)
    with pytest.raises(TypeError, match="normalize is 'hot'"):
        llm.embed("a", normalize=WRONG)


def test_one_prompt_gives_a_list_of_one(llm: LLM) -> None:
    """As text, as ids, and as a conversation; several conversations are several answers."""
    assert [each.text for each in llm.generate("abc", PARAMS)] == [expected.text("abc", 4, 12)]
    assert [each.text for each in llm.generate([66, 67, 68], PARAMS)] == [expected.text("abc", 4, 12)]
    talk = [{"role": "user", "content": "Hi"}]
    assert [each.text for each in llm.chat(talk, PARAMS)] == [expected.chat_text("Hi", 4, 12)]
    assert len(llm.chat([talk, talk], PARAMS)) == 2


def test_a_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    """Only the last piece has a finish reason."""
    pieces = list(llm.stream("abc", PARAMS))
    assert "".join(piece.text for piece in pieces) == expected.text("abc", 4, 12)
    assert [piece.finish_reason for piece in pieces] == [None] * 11 + ["length"]


def test_a_stop_string_ends_the_answer_and_frees_the_engine(llm: LLM, engine: FakeEngine) -> None:
    """The text ends before it, the engine goes on with nothing, and hears how many tokens were the answer."""
    full = expected.text("abc", 4, 12)
    stop = full[5:8]
    params = SamplingParams(seed=4, max_tokens=400, ignore_eos=True, stop=(stop,))
    (found,) = llm.generate("abc", params)
    assert (found.text, found.finish_reason) == (full[: full.index(stop)], "stop")
    assert not engine.has_work
    assert [keep for _, keep in engine.aborted] == [found.completion_tokens]


def test_a_stream_that_is_dropped_is_aborted(llm: LLM, engine: FakeEngine) -> None:
    """Whoever stops reading leaves nothing behind."""
    stream = llm.stream("abc", SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    assert engine.has_work
    stream.close()  # type: ignore[attr-defined]
    assert not engine.has_work
    assert [keep for _, keep in engine.aborted] == [None]


def test_logprobs_and_usage_are_handed_over(llm: LLM) -> None:
    """One entry a token."""
    params = SamplingParams(seed=4, max_tokens=5, ignore_eos=True, logprobs=2)
    (found,) = llm.generate("x" * 20, params)
    assert [len(entry.top) for entry in found.logprobs] == [2] * 5
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens) == (20, 5, 16)


def test_a_refused_prompt_leaves_nothing_of_the_others(llm: LLM, engine: FakeEngine) -> None:
    """The error is the engine's, and no request is left running."""
    with pytest.raises(ValueError, match="refuses"):
        llm.generate([[66], [REFUSED]], PARAMS)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda llm: llm.generate(["a", "b"], [PARAMS]), TypeError, "params is .* one SamplingParams"),
        (lambda llm: llm.generate("a", {"seed": 4}), TypeError, "params is {'seed': 4}"),
        (lambda llm: llm.generate("a", SamplingParams(temperature=WRONG)), TypeError, "temperature"),
        (lambda llm: llm.generate("a", SamplingParams(stop=WRONG)), TypeError, r"\.stop"),
        (lambda llm: llm.generate("a", SamplingParams(stop=("",))), ValueError, r"stop\[0\] is empty"),
        (lambda llm: llm.generate(None), TypeError, "prompts is None"),
        (lambda llm: llm.generate(b"abc"), TypeError, "prompts is b'abc'"),
        (lambda llm: llm.generate([None]), TypeError, r"prompts\[0\] is None"),
        (lambda llm: llm.generate(["a", 5]), TypeError, r"prompts\[1\] is 5"),
        (lambda llm: llm.generate([5, "a"]), TypeError, r"prompts\[1\] is 'a'"),
        (lambda llm: llm.generate([[5, True]]), TypeError, r"prompts\[0\]\[1\] is True"),
        (lambda llm: llm.stream(7), TypeError, "prompt is 7"),
        (lambda llm: llm.stream_chat("hello"), TypeError, "messages is 'hello'"),
        (lambda llm: llm.stream_chat([]), ValueError, "messages is empty"),
        (lambda llm: llm.chat([]), ValueError, "messages is empty"),
        (lambda llm: llm.chat([[]]), ValueError, r"messages\[0\] is empty"),
        (lambda llm: llm.chat(["Hi"]), TypeError, r"messages\[0\] is 'Hi'"),
        (lambda llm: llm.chat([{"content": "Hi"}]), ValueError, r"messages\[0\]\['role'\] is None"),
        (lambda llm: llm.chat([{"role": "user"}]), TypeError, r"messages\[0\]\['content'\] is None"),
    ],
)
def test_a_wrong_argument_is_named(llm: LLM, call: Any, kind: type[Exception], says: str) -> None:
    """At the call itself, also of a stream, and not by an attribute error from the depths."""
    with pytest.raises(kind, match=says):
        call(llm)


def test_arrays_of_tokens_are_prompts(llm: LLM) -> None:
    """As one prompt and among several."""
    tokens: Any = np.array([66, 67, 68])
    abc, x = expected.text("abc", 4, 12), expected.text("x", 4, 12)
    assert [each.text for each in llm.generate(tokens, PARAMS)] == [abc]
    assert [each.text for each in llm.generate([tokens, "x"], PARAMS)] == [abc, x]


def test_more_than_the_context_holds_is_refused_as_over_http(llm: LLM) -> None:
    """Exactly what fits is served."""
    params = SamplingParams(seed=4, max_tokens=509, ignore_eos=True)
    assert llm.generate("abc", params)[0].completion_tokens == 509
    with pytest.raises(
        PromptTooLong, match="has 4 tokens and 509 were asked for; the model's context is 512"
    ):
        llm.stream("abcd", params)


def test_a_closed_model_says_so(llm: LLM, engine: FakeEngine) -> None:
    """Instead of an attribute error from the depths; its engine is freed, once."""
    with llm:
        assert not engine.closed
    assert engine.closed
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        llm.generate("abc")


def test_calls_from_threads_share_steps_and_change_no_answer() -> None:
    """A real engine, six threads, half of them streaming: each text is the one that it has alone, and the
    engine is never called by two at once (it would say so, or worse)."""
    prompts = ["The sea is", "Once upon a time", "I think that", "Bread", "A list: 1, 2,", "Why do"]
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=24)
    with LLM("smollm2", threads=1, kv_memory_bytes=64 << 20) as llm, ThreadPoolExecutor(6) as pool:

        def ask(n: int) -> str:
            if n % 2:
                return llm.generate(prompts[n], params)[0].text
            return "".join(piece.text for piece in llm.stream(prompts[n], params))

        alone = [ask(n) for n in range(6)]
        for _ in range(3):
            assert list(pool.map(ask, range(6))) == alone


def test_a_call_amid_a_stream_takes_nothing_from_it(llm: LLM) -> None:
    """The steps of one call bring tokens of the other's request; they are kept for it."""
    stream = llm.stream("abc", PARAMS)
    text = next(stream).text
    assert [each.text for each in llm.generate("x", PARAMS)] == [expected.text("x", 4, 12)]
    assert text + "".join(piece.text for piece in stream) == expected.text("abc", 4, 12)


def test_a_stream_dropped_amid_a_step_waits_for_its_end() -> None:
    """As when the garbage collector drops it: no deadlock, and no abort before the step is over."""
    llm = LLM.__new__(LLM)
    dropped: list[Any] = []
    aborted: list[str] = []

    class Dropping(FakeEngine):
        def step(self) -> list[Chunk]:
            if dropped:
                dropped.pop().close()
                assert aborted == []
            return super().step()

        def abort(self, id: str, keep: int | None = None) -> bool:
            aborted.append(id)
            return super().abort(id, keep)

    llm._setup(Dropping(EngineSettings(model=""), FakeConfig()), load_fake_text(""), 512)
    stream = llm.stream("abc", PARAMS)
    next(stream)
    dropped.append(stream)
    assert [each.text for each in llm.generate("x", PARAMS)] == [expected.text("x", 4, 12)]
    assert len(aborted) == 1


def test_a_stream_fails_once_the_model_is_closed(llm: LLM) -> None:
    """Also when news had come for it before."""
    stream = llm.stream("abc", PARAMS)
    next(stream)
    llm.generate("x", SamplingParams(max_tokens=2, ignore_eos=True))  # brings the stream tokens
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        next(stream)


def test_a_forked_child_is_told_to_make_its_own(llm: LLM, engine: FakeEngine) -> None:
    """No step is tried, and what the parent had under way goes on."""
    stream = llm.stream("abc", PARAMS)
    text = next(stream).text
    steps = engine.load().steps
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            llm.generate("x", PARAMS)
        except GenerationError as error:
            said = f"{error} ({engine.load().steps - steps} steps)"
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert re.search(r"make a new LLM in the child \(0 steps\)", answer.read())
    assert text + "".join(piece.text for piece in stream) == expected.text("abc", 4, 12)


def test_the_package_offers_its_names_and_no_others() -> None:
    """``from tenfold import LLM, SamplingParams``."""
    assert tenfold.LLM is LLM
    assert tenfold.SamplingParams is SamplingParams
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = tenfold.nothing_such


def test_a_constraint_that_compiles_without_end_is_refused(llm: LLM) -> None:
    """It is not looked at in the caller's process."""
    parts = [{"type": "string", "pattern": f"a{i}"} for i in range(200)]
    constraint = Constraint(kind="json_schema", text=json.dumps({"allOf": parts}))
    with pytest.raises(ValueError, match="constraint takes more than 1 s to compile"):
        llm.generate("a", SamplingParams(constraint=constraint))
    llm.close()
