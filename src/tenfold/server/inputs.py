"""The inputs of one request for embeddings: a few at a time, so that one request does not fill the queue, and
who comes after it waits for little of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator

from tenfold.server.answer_events import Delta
from tenfold.server.choices import Choice, Choices, Tower
from tenfold.server.errors import ApiError
from tenfold.server.flights import ClientGone

AT_ONCE = 32
"""Inputs of one request in flight: enough to fill steps with short ones, few beside what others want."""
AT_ONCE_TOKENS = 4096
"""Their tokens, unless one alone has more: eight steps, as steps are by default."""
ROOM_S = 0.02
"""How soon an input is tried again that found the queue full."""


class Inputs(Choices):
    """All inputs of one request. The first is taken up at once or the request is refused; where the queue is
    full later on, the others wait."""

    brief = True

    def __init__(self, tower: Tower, choices: list[Choice]) -> None:
        super().__init__(tower, choices)
        self._gone = False
        self._tokens = 0
        """In flight."""
        self._landed = asyncio.Condition()

    def start(self) -> None:
        """Submits the first. Raises ApiError."""
        self._submit(self.all[:1])

    def cancel(self) -> None:
        """The client is gone."""
        self._gone = True
        super().cancel()

    async def news(self) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """Deltas as they come, until all have ended. Raises ApiError or ClientGone when one of them fails."""
        queue: asyncio.Queue[tuple[Choice, Delta] | Exception] = asyncio.Queue()
        waiting = iter(self.all)
        tasks = [asyncio.create_task(self._pump(waiting, queue)) for _ in range(min(AT_ONCE, len(self.all)))]
        left = len(self.all)
        try:
            while left:
                news = await queue.get()
                if isinstance(news, Exception):
                    raise news
                left -= news[0].answer.finish is not None
                yield news
        finally:
            for task in tasks:
                task.cancel()

    async def _pump(
        self, waiting: Iterator[Choice], queue: asyncio.Queue[tuple[Choice, Delta] | Exception]
    ) -> None:
        """One input after another, of those that no other pump has taken."""
        try:
            for choice in waiting:
                await self._reserve(choice)
                if choice.flight is None:
                    await self._board(choice)
                while choice.answer.finish is None:
                    delta = await self._next(choice)
                    queue.put_nowait((choice, delta))
                await self._give_back(choice)
        except Exception as error:
            queue.put_nowait(error)

    async def _reserve(self, choice: Choice) -> None:
        size = len(choice.request.prompt)
        async with self._landed:
            await self._landed.wait_for(lambda: not self._tokens or self._tokens + size <= AT_ONCE_TOKENS)
            self._tokens += size

    async def _give_back(self, choice: Choice) -> None:
        async with self._landed:
            self._tokens -= len(choice.request.prompt)
            self._landed.notify_all()

    async def _board(self, choice: Choice) -> None:
        while True:
            if self._gone:
                raise ClientGone
            try:
                choice.flight = self._tower.submit(choice.request, True, self.brief)
                return
            except ApiError as error:
                if error.status != 429:
                    raise
            await asyncio.sleep(ROOM_S)
