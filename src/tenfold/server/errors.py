"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

import msgspec


class ApiError(Exception):
    """An answer that is not the one wanted: an HTTP status and OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> bytes:
        """``{"error": {...}}``"""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A field with a value that cannot be: 400."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, retry_after_s: int) -> ApiError:
    """The server cannot take the request now, through no fault of the request: 503."""
    return ApiError(
        503,
        message,
        type="server_error",
        code="unavailable",
        headers=(("retry-after", str(retry_after_s)),),
    )


def unexpected() -> ApiError:
    """A fault of the server's own: 500. What it was is in the log, and no business of the client's."""
    return broken("the server failed on this request; its log says why")


def broken(message: str) -> ApiError:
    """The request was accepted and could not be finished: 500."""
    return ApiError(500, message, type="server_error", code="internal_error")
