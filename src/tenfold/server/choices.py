"""The choices of one request: from its prompts to the flights that compute them, and their news as deltas.

Who owns what: a `Choices` belongs to the exchange that made it, which must `release` it; every flight belongs
to its choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from tenfold.protocol import Request
from tenfold.server.answer import Answer
from tenfold.server.answer_events import Delta, Usage
from tenfold.server.embeddings import EmbeddingAnswer
from tenfold.server.errors import broken, invalid
from tenfold.server.flights import Backlog, Flight


class Tower(Protocol):
    """Where flights are taken up and given back: see `Flights`."""

    def submit(self, request: Request, admitted: bool = False, brief: bool = False) -> Flight: ...

    def release(self, flight: Flight, keep: int | None = None) -> None: ...

    def cancel(self, flight: Flight) -> None: ...


@dataclass
class Choice:
    """One choice of one prompt."""

    index: int
    """Among all of the request: those of the first prompt come first."""
    request: Request
    answer: Answer | EmbeddingAnswer
    first: bool
    """The first of its prompt: the prompt counts with it."""
    flight: Flight | None = field(default=None)
    """None: not submitted yet."""


class Choices:
    """All choices of one request.

    The other choices of a lone prompt set out when the first has its first token: then the prompt's pages are
    in the cache, and are computed once. Those of several prompts set out at once.
    """

    brief = False
    """Whether each is over so soon that many of them are no long queue."""

    def __init__(self, tower: Tower, choices: list[Choice]) -> None:
        self._tower = tower
        self.all = choices
        self._backlog = Backlog()
        self._lone = sum(choice.first for choice in choices) == 1

    def start(self) -> None:
        """Submits them. Raises ApiError; then none is in flight."""
        self._submit(self.all[:1] if self._lone else self.all)

    def cancel(self) -> None:
        """The client is gone."""
        for flight in self._flights():
            self._tower.cancel(flight)

    def release(self) -> None:
        """Ends what is in flight still."""
        for flight in self._flights():
            self._tower.release(flight)

    def usage(self) -> Usage:
        """What all of them used so far."""
        usage = Usage()
        for choice in self.all:
            answer = choice.answer
            if choice.first:
                usage.prompt_tokens += len(choice.request.prompt)
                usage.cached_tokens += answer.cached_tokens or 0
            usage.completion_tokens += answer.completion_tokens
            usage.reasoning_tokens += answer.reasoning_tokens
        return usage

    async def news(self) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """Deltas as they come, until all have ended. Raises ApiError or ClientGone when one of them fails."""
        first = self.all[0]
        if self._lone:
            delta = await self._next(first)
            self._submit(self.all[1:])
            yield first, delta
        if len(self.all) == 1:
            while first.answer.finish is None:
                yield first, await self._next(first)
            return
        async for news in self._merged():
            yield news

    async def _merged(self) -> AsyncGenerator[tuple[Choice, Delta], None]:
        # With room for one: who reads slowly lets news gather at the flights, where they are joined.
        queue: asyncio.Queue[tuple[Choice, Delta] | Exception] = asyncio.Queue(1)

        async def pump(choice: Choice) -> None:
            try:
                while choice.answer.finish is None:
                    await queue.put((choice, await self._next(choice)))
            except Exception as error:
                await queue.put(error)

        running = [choice for choice in self.all if choice.answer.finish is None]
        pumps = [asyncio.create_task(pump(choice)) for choice in running]
        try:
            left = len(running)
            while left:
                news = await queue.get()
                if isinstance(news, Exception):
                    raise news
                left -= bool(news[1].events) and news[0].answer.finish is news[1].events[-1]
                yield news
        finally:
            for task in pumps:
                task.cancel()

    async def _next(self, choice: Choice) -> Delta:
        flight, answer = choice.flight, choice.answer
        assert flight is not None
        delta = answer.push(await flight.next())
        ended = answer.engine_finish
        if ended is None:
            return delta
        # After a stop string the engine is still at work.
        self._tower.release(flight, answer.completion_tokens if ended == "stop" else None)
        if answer.error_field is not None:
            raise invalid(answer.error_field, f"{answer.error_field}: {answer.error}")
        if ended in ("error", "abort"):
            raise broken(answer.error or f"the engine ended the request: {ended}")
        return delta

    def _submit(self, choices: list[Choice]) -> None:
        for choice in choices:
            try:
                choice.flight = self._tower.submit(choice.request, choice is not self.all[0], self.brief)
                choice.flight.backlog = self._backlog
            except BaseException:
                self.release()
                raise

    def _flights(self) -> list[Flight]:
        return [choice.flight for choice in self.all if choice.flight is not None]
