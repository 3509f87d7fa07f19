"""A request under way."""

from __future__ import annotations

import time

import numpy as np

from tenfold.backends.base import Floats, Int32s
from tenfold.constraints.base import Matcher
from tenfold.engine.history import History
from tenfold.engine.pooling import Pool
from tenfold.kv.cache import PageTable
from tenfold.protocol import FinishReason, Request


class Sequence:
    """The tokens of a request so far, and how far the program has got with them.

    ``computed`` of the ``tokens`` have their KV row in the pages of ``table``; the rest is pending. One
    pending token is a decode step; more are a prefill. A waiting sequence has no table and nothing computed.

    ``cached_tokens_news`` is how many prompt tokens the cache held when the sequence was admitted first,
    until that is told; what a preempted sequence finds again is its own and not counted. ``queue_ms`` is how
    long it waited for that admission. ``features`` are the program's of the row that drew the last token, if
    the speculator wants them and the program has them. A `tenfold.speculate.base.DraftSequence`.

    It is ``handed_over`` if another engine has computed its prompt, and all full pages of that are here: then
    less than a page of rows is left to compute.

    ``matcher`` has accepted the output so far; None: any text will do. With a ``pool`` the sequence draws
    nothing: it ends when all its tokens are computed, and its states are there.
    """

    __slots__ = (
        "admitted",
        "arrived",
        "bias_tokens",
        "bias_values",
        "cached_tokens_news",
        "computed",
        "features",
        "handed_over",
        "history",
        "id",
        "matcher",
        "max_length",
        "namespace",
        "params",
        "pool",
        "prompt_length",
        "queue_ms",
        "seed",
        "stop_tokens",
        "table",
        "tokens",
    )

    def __init__(self, request: Request, seed: int, max_context: int, matcher: Matcher | None = None) -> None:
        params = request.params
        self.id = request.id
        self.namespace = request.namespace
        self.params = params
        self.seed = seed
        self.tokens = [*request.prompt, *request.output]
        self.prompt_length = len(request.prompt)
        self.max_length = max_context
        if params.max_tokens is not None:
            self.max_length = min(max_context, self.prompt_length + params.max_tokens)
        self.pool: Pool | None = None
        if request.pooling is not None:
            self.pool = Pool(request.pooling, self.prompt_length)
            self.max_length = self.prompt_length
        self.stop_tokens = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.stop_tokens |= frozenset(request.eos_token_ids)
        self.matcher = matcher
        if matcher is not None:
            # Whatever the request calls its ends: beyond these nothing can be drawn.
            self.stop_tokens |= matcher.ends
            for token in request.output:
                if token not in self.stop_tokens:
                    matcher.accept(token)
        self.computed = 0
        self.table: PageTable | None = None
        self.arrived = time.monotonic()
        self.admitted = False
        self.handed_over = False
        self.queue_ms = 0.0
        self.cached_tokens_news: int | None = None
        self.features: Floats | None = None
        self.history: History | None = None
        if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
            self.history = History(request.prompt, request.output)
        self.bias_tokens: Int32s = np.array(list(params.logit_bias), np.int32)
        self.bias_values: Floats = np.array(list(params.logit_bias.values()), np.float32)

    @property
    def pending(self) -> int:
        """Tokens without a KV row."""
        return len(self.tokens) - self.computed

    @property
    def prefills(self) -> bool:
        """Whether it is still at its prompt, or at what it had before it was put back."""
        return self.pending > 1 or self.pool is not None

    @property
    def reusable(self) -> int:
        """Most first tokens whose rows may come from the cache, or from elsewhere: all but the last, whose
        logits are needed, unless the states of others are too."""
        return len(self.tokens) - 1 if self.pool is None else self.pool.reusable

    def admit(self, table: PageTable, cached: int) -> None:
        """The sequence runs (again), with ``cached`` of its tokens in the pages of ``table`` already."""
        self.table, self.computed = table, cached
        if not self.admitted:
            self.admitted = True
            self.cached_tokens_news = min(cached, self.prompt_length)
            self.queue_ms = (time.monotonic() - self.arrived) * 1000

    def stop_after_one(self) -> bool:
        """The next token is the last one drawn here. False if it would have been so anyway."""
        if self.max_length <= len(self.tokens) + 1:
            return False
        self.max_length = len(self.tokens) + 1
        return True

    def append(self, token: int) -> None:
        """One generated token more."""
        self.tokens.append(token)
        if self.history is not None:
            self.history.add(token)
        if self.matcher is not None and token not in self.stop_tokens:
            self.matcher.accept(token)

    def finish(self) -> FinishReason | None:
        """Why the last generated token is the last, if it is. A stop token counts before the length."""
        if len(self.tokens) > self.prompt_length and self.tokens[-1] in self.stop_tokens:
            return "stop"
        return "length" if len(self.tokens) >= self.max_length else None
