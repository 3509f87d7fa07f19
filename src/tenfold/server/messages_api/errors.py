"""Errors as Anthropic's clients expect them."""

from __future__ import annotations

from typing import Any

import msgspec

from tenfold.server.errors import ApiError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_object(error: ApiError) -> dict[str, Any]:
    """``{"type": "error", "error": {...}}``; the field and the code, which Anthropic's own has not, stand in
    it too."""
    fallback = "api_error" if error.status >= 500 else "invalid_request_error"
    return {
        "type": "error",
        "error": {
            "type": _TYPES.get(error.status, fallback),
            "message": error.message,
            "param": error.param,
            "code": error.code,
        },
    }


def error_body(error: ApiError, id: str) -> bytes:
    """The body of a response that is an error; ``id`` is the request's."""
    return msgspec.json.encode({**error_object(error), "request_id": id})
