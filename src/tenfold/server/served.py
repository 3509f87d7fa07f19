"""One model that is served: its workers, its text side, and what is counted of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tenfold.config import ResolvedPlan, format_bytes
from tenfold.constraints.checker import Checker, CheckFailed
from tenfold.limits import RequestError
from tenfold.protocol import Constraint
from tenfold.server.chat_setup import ChatSetup
from tenfold.server.errors import unavailable
from tenfold.server.fields import Fields
from tenfold.server.flights import Flights
from tenfold.server.metrics import Metrics
from tenfold.server.prepare import Preparer
from tenfold.server.stats import StatsSource
from tenfold.server.text import Text
from tenfold.server.tokenize import TokenEndpoints
from tenfold.server.tool_constraint import refusal


class ServedModel:
    """All that answers for one model. `tenfold.server.models.Models` owns it, and ends its flights."""

    def __init__(
        self, resolved: ResolvedPlan, text: Text, chat: ChatSetup, flights: Flights, metrics: Metrics
    ) -> None:
        """``resolved``: its configuration and what came of it; ``flights`` count in ``metrics``."""
        self.name = resolved.config.model_name
        """In the API."""
        self.resolved = resolved
        self.plan = resolved.engine
        self.flights = flights
        self.metrics = metrics
        self.preparer = Preparer(self.name, self.plan, text, chat, lambda: flights.kv_tokens)
        self.stats = StatsSource(self.name, self.plan, self.metrics, flights.not_ready)
        self.created = int(time.time())
        self.users = 0
        """Requests that are being answered, from when their model is known to their last byte."""
        self._tokens = TokenEndpoints(self.preparer)
        self._checker = Checker(lambda: text.tokenizer, self.plan.vocab_size)
        metrics.refused_constraints = self._checker.refused

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Around a request: a model that is unloaded lets it end first, as long as that may take."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1

    def tokenize(self, body: Fields) -> bytes:
        """See `TokenEndpoints`."""
        return self._tokens.tokenize(body)

    def detokenize(self, body: Fields) -> bytes:
        """See `TokenEndpoints`."""
        return self._tokens.detokenize(body)

    async def check_constraint(self, constraint: Constraint) -> None:
        """Has it compiled, as the worker will: what cannot be enforced never gets there. Raises ApiError."""
        try:
            if (begun := self._checker.begin(constraint)) is not None:
                await asyncio.wrap_future(begun)
        except RequestError as error:
            raise refusal(error) from None
        except CheckFailed as error:
            raise unavailable(str(error), 1) from None

    def end_checks(self) -> None:
        """Nothing is checked any more: the model goes."""
        self._checker.close()

    def entry(self) -> dict[str, Any]:
        """The model as OpenAI's API shows one."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "tenfold",
            "max_model_len": self.plan.max_context,
        }

    @property
    def wanted_bytes(self) -> int:
        """Memory of all its workers, once their KV caches are full."""
        plan = self.plan
        each = sum(plan.format_bytes.values()) + plan.kv_pages * plan.page_bytes
        return each * self.resolved.config.processes

    def __str__(self) -> str:
        return f"{self.name} ({format_bytes(self.wanted_bytes)})"
