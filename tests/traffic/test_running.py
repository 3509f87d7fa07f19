"""Computing recorded requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.protocol import Chunk, EngineSettings, Request, SamplingParams
from tenfold.server.answer_stream import Sections
from tenfold.server.tool_formats.choose import FORMATS
from tenfold.traffic.running import EngineFault, Job, run_jobs
from tests.helpers import expected
from tests.helpers.fake_engine import EOS, REFUSED, FakeConfig, FakeEngine
from tests.helpers.fake_text import FakeTokenizer, load_fake_text, piece_of

TEXT = load_fake_text("")


class Watched(FakeEngine):
    """Notes what is under way."""

    def __init__(self, max_running: int = 8, config: FakeConfig | None = None) -> None:
        super().__init__(EngineSettings(model="", max_running=max_running), config or FakeConfig())
        self.open: list[str] = []
        self.most = 0
        self.added: list[str] = []

    def add(self, request: Request) -> None:
        super().add(request)
        self.open.append(request.id)
        self.added.append(request.id)
        self.most = max(self.most, len(self.open))

    def abort(self, id: str, keep: int | None = None) -> bool:
        if id in self.open:
            self.open.remove(id)
        return super().abort(id)

    def step(self) -> list[Chunk]:
        chunks = super().step()
        for chunk in chunks:
            if chunk.finish is not None:
                self.open.remove(chunk.id)
        return chunks


def job(id: str, conversation: str | None = None, stop: tuple[str, ...] = (), tokens: int = 6) -> Job:
    params = SamplingParams(seed=5, max_tokens=tokens, stop=stop, ignore_eos=not stop)
    return Job(id, 1, id if conversation is None else conversation, (1, 2, 3 + len(id)), params)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=20),
    st.integers(1, 4),
)
def test_every_request_ends_once_and_conversations_keep_their_order(
    rows: list[tuple[int, int]], streams: int
) -> None:
    """No more than ``streams`` at a time, one of a conversation at a time, in the order given."""
    jobs = [job(str(i), f"c{talk}", tokens=tokens) for i, (talk, tokens) in enumerate(rows)]
    engine = Watched()
    done = list(run_jobs(engine, TEXT, jobs, streams))
    assert sorted(int(one.job.id) for one in done) == list(range(len(jobs)))
    for one in done:
        prompt, params = one.job.prompt, one.job.params
        assert params.max_tokens is not None and params.seed is not None
        assert list(one.tokens) == expected.tokens(prompt, params.seed, params.max_tokens)
        assert one.began <= one.first <= one.ended
    assert engine.most <= streams
    for talk in range(6):
        mine = [one.job.id for one in done if one.job.conversation == f"c{talk}"]
        assert mine == [one.id for one in jobs if one.conversation == f"c{talk}"]
    assert not engine.has_work


def test_a_stop_string_ends_a_request_where_the_server_would() -> None:
    """What came after it is not part of the answer, and the engine is free again."""
    (plain,) = run_jobs(Watched(), TEXT, [job("a", tokens=40)], 1)
    stream = TEXT.stream(())
    text = stream.push(plain.tokens) + stream.finish()
    engine = Watched()
    (found,) = run_jobs(engine, TEXT, [job("a", stop=(text[4:7],), tokens=40)], 1)
    assert found.finish == "stop"
    assert found.tokens == plain.tokens[: len(found.tokens)]
    assert len(found.tokens) < len(plain.tokens)
    stream = TEXT.stream(())
    assert text[4:7] in stream.push(found.tokens) + stream.finish()
    assert not engine.has_work


def test_an_answer_of_one_call_ends_with_it_as_the_server_s_does() -> None:
    """With its arguments. A drafter that learnt what came behind would learn what nobody sees."""
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    said = f"Well. {call} and more"
    tokens = tuple(FakeTokenizer().encode("@x@", add_special_tokens=False, parse_special=True))
    sections = Sections(tools=FORMATS["hermes"], tool_names=frozenset({"f"}), one_call=True)
    for one_call in (True, False):
        engine = Watched(config=FakeConfig(scripts={"x": said}))
        params = SamplingParams(seed=1, max_tokens=200)
        job = Job("a", 1, "a", tokens, params, replace(sections, one_call=one_call))
        (found,) = run_jobs(engine, TEXT, [job], 1)
        text = "".join(piece_of(token) for token in found.tokens)
        assert found.finish == "stop"
        assert text == (said[: said.index("</tool_call>")] if one_call else said)
        assert not engine.has_work


def test_the_token_that_ends_an_answer_is_part_of_it() -> None:
    """A drafter must learn to guess it too."""
    request = Job("a", 1, "a", tuple(range(1, 93)), SamplingParams(seed=1, max_tokens=50))
    (found,) = run_jobs(Watched(), TEXT, [request], 1)
    assert (found.finish, found.tokens[-1], len(found.tokens)) == ("stop", EOS, 5)


def test_a_request_that_the_engine_refuses_is_named_by_its_line() -> None:
    """And what is under way is given up."""
    bad = Job("b", 17, "b", (REFUSED,), SamplingParams(seed=1, max_tokens=2))
    engine = Watched()
    with pytest.raises(EngineFault, match=r"line 17 of the traffic: prompt has the token 510"):
        list(run_jobs(engine, TEXT, [job("a"), bad], 2))
    assert not engine.has_work
