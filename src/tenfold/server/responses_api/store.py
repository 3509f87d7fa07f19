"""Responses that are kept, so that a conversation can go on from them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import msgspec

from tenfold.server.errors import ApiError
from tenfold.server.responses_api.items import Item

MAX_RESPONSES = 4096
MAX_BYTES = 256 << 20


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One response."""

    response: dict[str, Any]
    """As it was answered."""
    input: list[Item]
    """Of its own request."""
    conversation: list[Item]
    """All up to and with its answer. Its items are shared with the responses before it."""
    bytes: int
    """About what it takes to keep: its own part and those before it, which may be gone otherwise."""


class ResponseStore:
    """The last responses of this process; what was used longest ago goes first.

    They are lost with the process. Whoever knows an id may read the response: ids cannot be guessed. Safe to
    use from several threads.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """About what all of them take."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, id: str, kept: Kept) -> None:
        """Takes a response in; one that is larger than all the memory is not kept."""
        with self._lock:
            if kept.bytes > self._max_bytes:
                return
            self._kept[id] = kept
            self._bytes += kept.bytes
            while len(self._kept) > self._max_responses or self._bytes > self._max_bytes:
                self._bytes -= self._kept.popitem(last=False)[1].bytes

    def get(self, id: str, param: str | None = None) -> Kept:
        """A response. Raises ApiError (404) where there is none; ``param`` is the field that named it."""
        with self._lock:
            kept = self._kept.get(id)
            if kept is None:
                raise self._lost(id, param)
            self._kept.move_to_end(id)
            return kept

    def delete(self, id: str) -> None:
        """Forgets one. Raises ApiError (404) where there is none."""
        with self._lock:
            kept = self._kept.pop(id, None)
            if kept is None:
                raise self._lost(id, None)
            self._bytes -= kept.bytes

    def _lost(self, id: str, param: str | None) -> ApiError:
        return ApiError(
            404,
            f"there is no response {id[:80]} here: it was not stored, was deleted, made room for newer ones "
            f"(the last {self._max_responses} are kept, in {self._max_bytes >> 20} MiB), or is of an earlier "
            "run of the server. Send the whole conversation as input",
            param=param,
            code="previous_response_not_found" if param else "not_found",
        )
