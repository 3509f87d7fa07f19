"""Reading and deleting responses that are kept: ``/v1/responses/ID`` and its ``input_items``."""

from __future__ import annotations

from typing import Any

import msgspec

from tenfold.server.errors import invalid
from tenfold.server.fields import show
from tenfold.server.query import read_query
from tenfold.server.responses_api.store import Shelf

PREFIX = "/v1/responses/"
_ITEMS = "/input_items"
_MOST_ITEMS = 100


def methods_of(path: str) -> tuple[str, ...]:
    """What may be done with a path that begins with `PREFIX`."""
    return ("GET", "HEAD") if path.endswith(_ITEMS) else ("GET", "HEAD", "DELETE")


def kept_response(store: Shelf, method: str, path: str, query: bytes) -> bytes:
    """The body that answers. Raises ApiError."""
    id = path.removeprefix(PREFIX)
    if id.endswith(_ITEMS):
        asked = read_query(query, ("limit", "order", "after"))
        return msgspec.json.encode(_items(store, id.removesuffix(_ITEMS), asked))
    if method == "DELETE":
        read_query(query, ())
        store.delete(id)
        return msgspec.json.encode({"id": id, "object": "response", "deleted": True})
    asked = read_query(query, ("stream", "starting_after"))
    if asked.get("stream", "false") != "false" or "starting_after" in asked:
        raise invalid("stream", "stream: a response that is kept comes whole", code="unsupported_value")
    return msgspec.json.encode(store.get(id).response)


def _items(store: Shelf, id: str, asked: dict[str, str]) -> dict[str, Any]:
    limit, order, after = asked.get("limit", "20"), asked.get("order", "desc"), asked.get("after")
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit) <= _MOST_ITEMS:
        raise invalid("limit", f"limit is {show(limit)}; it must be an integer from 1 to {_MOST_ITEMS}")
    if order not in ("asc", "desc"):
        raise invalid("order", f"order is {show(order)}; it must be asc or desc")
    items = store.get(id).input[:: 1 if order == "asc" else -1]
    if after is not None:
        at = next((index for index, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise invalid("after", f"after is {show(after)}; the response has no input item of that id")
        items = items[at + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(items),
    }
