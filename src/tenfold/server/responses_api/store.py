"""Responses that are kept, so that a conversation can go on from them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
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

    They are lost with the process. Each lies on the shelf of the API key that it was asked for with. Whoever
    has that key (anybody, where no keys are asked for) and knows the id may read it; ids cannot be guessed.
    Safe to use from several threads.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """About what all of them take."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._kept)

    def shelf(self, owner: str) -> Shelf:
        """What is the owner's: see `asgi.key_owner`."""
        return Shelf(self, owner)

    def keep(self, owner: str, id: str, kept: Kept) -> None:
        """Takes a response in; one that is larger than all the memory is not kept."""
        with self._lock:
            if kept.bytes > self._max_bytes:
                return
            self._kept[owner, id] = kept
            self._bytes += kept.bytes
            while len(self._kept) > self._max_responses or self._bytes > self._max_bytes:
                self._bytes -= self._kept.popitem(last=False)[1].bytes

    def get(self, owner: str, id: str, param: str | None = None) -> Kept:
        """A response. Raises ApiError (404) where the owner has none of that id; ``param`` is the field that
        named it."""
        with self._lock:
            kept = self._kept.get((owner, id))
            if kept is None:
                raise self._lost(id, param)
            self._kept.move_to_end((owner, id))
            return kept

    def delete(self, owner: str, id: str) -> None:
        """Forgets one. Raises ApiError (404) where the owner has none of that id."""
        with self._lock:
            kept = self._kept.pop((owner, id), None)
            if kept is None:
                raise self._lost(id, None)
            self._bytes -= kept.bytes

    def forget(self, model: str) -> None:
        """Forgets all of a model."""
        with self._lock:
            for key in [key for key, kept in self._kept.items() if kept.response["model"] == model]:
                self._bytes -= self._kept.pop(key).bytes

    def _lost(self, id: str, param: str | None) -> ApiError:
        return ApiError(
            404,
            f"there is no response {id[:80]} here: it was not stored, was deleted, made room for newer ones "
            f"(the last {self._max_responses} are kept, in {self._max_bytes >> 20} MiB), or is of an earlier "
            "run of the server. Send the whole conversation as input",
            param=param,
            code="previous_response_not_found" if param else "not_found",
        )


@dataclass(frozen=True)
class Shelf:
    """One owner's part of a store: its methods, for that owner."""

    store: ResponseStore
    owner: str
    model: str | None = None
    """None: of whatever model."""

    def of(self, model: str) -> Shelf:
        """The part of it that is of a model."""
        return replace(self, model=model)

    def keep(self, id: str, kept: Kept) -> None:
        """See `ResponseStore.keep`."""
        self.store.keep(self.owner, id, kept)

    def get(self, id: str, param: str | None = None) -> Kept:
        """See `ResponseStore.get`; also ApiError (404) for one of another model."""
        kept = self.store.get(self.owner, id, param)
        if self.model is not None and kept.response["model"] != self.model:
            raise ApiError(
                404,
                f"the response {id[:80]} is of the model {kept.response['model']}, and this request is for "
                f"{self.model}. Go on with the first, or send the whole conversation as input",
                param=param,
                code="previous_response_not_found",
            )
        return kept

    def delete(self, id: str) -> None:
        """See `ResponseStore.delete`."""
        self.store.delete(self.owner, id)
