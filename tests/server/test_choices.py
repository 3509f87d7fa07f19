"""The choices of a request: when they set out, how their news merge, how they end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from tenfold.protocol import Chunk, Request, SamplingParams
from tenfold.server.answer import Answer
from tenfold.server.answer_stream import AnswerStream, Sections
from tenfold.server.choices import Choice, Choices
from tenfold.server.errors import ApiError
from tenfold.server.flights import Flight


class Letters:
    """Tokens are characters."""

    stopped: str | None = None
    tokens_used = 0

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(map(chr, token_ids))

    def finish(self) -> str:
        return ""


class Tower:
    """Takes flights up and writes down what becomes of them; full after ``room``."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.flights: list[Flight] = []
        self.released: list[tuple[str, int | None]] = []

    def submit(self, request: Request, admitted: bool = False, brief: bool = False) -> Flight:
        if len(self.flights) >= self.room:
            raise ApiError(429, "full")
        self.flights.append(Flight(request, 0.0))
        return self.flights[-1]

    def release(self, flight: Flight, keep: int | None = None) -> None:
        self.released.append((flight.request.id, keep))

    def cancel(self, flight: Flight) -> None:
        raise AssertionError("nobody hangs up here")

    def says(self, index: int, text: str, end: bool = False) -> None:
        """News for the flight that set out as number ``index``."""
        flight = self.flights[index]
        ids = tuple(map(ord, text))
        flight.arrived(Chunk(id=flight.request.id, tokens=ids, finish="stop" if end else None))


def choices_of(tower: Tower, prompts: int, n: int, stop: tuple[str, ...] = ()) -> Choices:
    return Choices(
        tower,
        [
            Choice(
                index=prompt * n + choice,
                request=Request(id=f"{prompt}.{choice}", prompt=(1, 2, 3), params=SamplingParams()),
                answer=Answer(AnswerStream(Letters(), stop, Sections())),
                first=not choice,
            )
            for prompt in range(prompts)
            for choice in range(n)
        ],
    )


def test_a_lone_prompt_is_computed_once() -> None:
    """Its other choices set out when the first has a token: then the prompt's pages are in the cache."""

    async def scenario() -> None:
        tower = Tower()
        choices = choices_of(tower, 1, 3)
        choices.start()
        assert len(tower.flights) == 1
        news = choices.news()
        tower.says(0, "a")
        assert (await anext(news))[0].index == 0
        assert [flight.request.id for flight in tower.flights] == ["0.0", "0.1", "0.2"]
        for index in (2, 0, 1):
            tower.says(index, "b", end=True)
        ended = [choice.index async for choice, delta in news if choice.answer.finish]
        assert sorted(ended) == [0, 1, 2]
        usage = choices.usage()
        assert (usage.prompt_tokens, usage.completion_tokens) == (3, 4)

    asyncio.run(scenario())


def test_several_prompts_set_out_at_once() -> None:
    """And each of them counts."""
    tower = Tower()
    choices = choices_of(tower, 2, 2)
    choices.start()
    assert len(tower.flights) == 4
    assert choices.usage().prompt_tokens == 6


@pytest.mark.parametrize(("field", "status"), [("guided_regex", 400), (None, 500)])
def test_a_failure_says_whose_fault_it_is(field: str | None, status: int) -> None:
    """A constraint that exceeds a limit under way is the request's own fault, named by its field: no 5xx."""

    async def scenario() -> None:
        tower = Tower()
        choices = choices_of(tower, 1, 1)
        choices.start()
        id = tower.flights[0].request.id
        tower.flights[0].arrived(Chunk(id=id, finish="error", error="over a limit", error_field=field))
        with pytest.raises(ApiError, match="over a limit") as caught:
            async for _ in choices.news():
                pass
        assert (caught.value.status, caught.value.param) == (status, field)

    asyncio.run(scenario())


@pytest.mark.parametrize(("prompts", "n"), [(1, 4), (2, 2)])
def test_without_room_for_all_none_is_left(prompts: int, n: int) -> None:
    """Whether that turns out at the start or when the others set out."""

    async def scenario() -> None:
        tower = Tower(room=3)
        choices = choices_of(tower, prompts, n)
        with pytest.raises(ApiError):
            choices.start()
            tower.says(0, "a")
            await anext(choices.news())
        assert {id for id, _ in tower.released} == {flight.request.id for flight in tower.flights}

    asyncio.run(scenario())


def test_a_choice_that_fails_fails_the_request() -> None:
    """With its error; no task goes on waiting for the others."""

    async def scenario() -> None:
        tower = Tower()
        choices = choices_of(tower, 2, 2)
        choices.start()
        tower.says(1, "a")
        tower.flights[2].fail(ApiError(500, "broken"))
        seen = []
        with pytest.raises(ApiError, match="broken"):
            async for choice, _ in choices.news():
                seen.append(choice.index)
        assert seen == [1]
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_a_slow_reader_gets_joined_news() -> None:
    """What comes while nobody reads waits at the flight and arrives as one delta."""

    async def scenario() -> None:
        tower = Tower()
        choices = choices_of(tower, 2, 1)
        choices.start()
        news = choices.news()
        tower.says(0, "a")
        await anext(news)
        for char in "bcdefgh":
            tower.says(0, char)
            await asyncio.sleep(0)
        tower.says(0, "i", end=True)
        tower.says(1, "x", end=True)
        deltas = [delta async for choice, delta in news if choice.index == 0]
        assert len(deltas) < 5
        assert [token for delta in deltas for token in delta.tokens] == list(map(ord, "bcdefghi"))

    asyncio.run(scenario())


def test_a_stop_string_ends_a_flight_that_goes_on() -> None:
    """The engine is told how many tokens are the answer."""

    async def scenario() -> None:
        tower = Tower()
        choices = choices_of(tower, 1, 1, ("b",))
        choices.start()
        tower.says(0, "abcd")
        assert [choice.answer.completion_tokens async for choice, _ in choices.news()] == [2]
        assert tower.released == [("0.0", 2)]

    asyncio.run(scenario())
