"""The log: one line for each request, for people or for machines. Prompts and answers are never in it."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec

from tenfold.log_format import OneLine


class RequestLine(msgspec.Struct, frozen=True, kw_only=True):
    """A request that ended, in whatever way. As text it is one line of ``name=value``."""

    id: str
    endpoint: str
    model: str
    status: int | None
    """The HTTP status that was sent; None when the client left before there was one."""
    finish: str
    """stop, length, tool_calls, error, or abort: the client was gone; of several choices, each that occurred,
    separated by commas."""
    choices: int
    cancelled: bool
    """Whether the client hung up."""
    stream: bool
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    """Of the prompt, computed."""
    completion_tokens: int
    queue_ms: float | None
    """In the engine, before the first step; this and what follows up to ``ttft_ms`` is of the choice that had
    the first token."""
    prefill_ms: float | None
    """From the first step to the first token, in the front."""
    decode_ms: float | None
    """From the first token to the last, of all choices."""
    ttft_ms: float | None
    """From the request's arrival to the first token."""
    total_ms: float
    acceptance: float | None
    """Tokens that came of a decoding step."""
    deaths: int
    """Workers that died with it."""
    traceparent: str | None = None
    """The client's W3C trace context, if it sent one."""

    @property
    def operation(self) -> str:
        """What was done, in OpenTelemetry's words."""
        return {"completion": "text_completion", "embeddings": "embeddings"}.get(self.endpoint, "chat")

    def __str__(self) -> str:
        rate = None
        if self.decode_ms and self.completion_tokens > self.choices:
            rate = (self.completion_tokens - self.choices) / self.decode_ms * 1e3
        return (
            f"{self.id} {self.endpoint} model={_word(self.model)} prompt={self.prompt_tokens} "
            f"cached={self.cached_tokens} new={self.new_tokens} queue_ms={_short(self.queue_ms)} "
            f"prefill_ms={_short(self.prefill_ms)} ttft_ms={_short(self.ttft_ms)} "
            f"decode_ms={_short(self.decode_ms)} tokens={self.completion_tokens} tok/s={_short(rate, 1)} "
            f"acceptance={_short(self.acceptance, 2)} deaths={self.deaths} finish={self.finish} "
            f"status={'-' if self.status is None else self.status}"
        )


class RefusalLine(msgspec.Struct, frozen=True, kw_only=True):
    """A request that never began."""

    id: str
    status: int
    error: str
    model: str | None = None
    """None: it named none that is here."""
    param: str | None = None
    code: str | None = None

    def __str__(self) -> str:
        return f"{self.id} refused: {self.status} {self.error}"


def milliseconds(begin: float | None, end: float | None) -> float | None:
    """From one time (in seconds) to another, if both are known."""
    return None if begin is None or end is None else round((end - begin) * 1e3, 3)


class JsonFormatter(logging.Formatter):
    """A JSON object a line: ``time`` (UTC), ``level``, ``event``, and what belongs to it.

    ``event`` is ``request`` (with the fields of `RequestLine`), ``refusal`` (`RefusalLine`) or ``message``.
    """

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
        }
        what: object = record.msg
        if isinstance(what, RequestLine):
            line |= {"event": "request", **msgspec.structs.asdict(what)}
        elif isinstance(what, RefusalLine):
            line |= {"event": "refusal", **msgspec.structs.asdict(what)}
        else:
            line |= {"event": "message", "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def log_handler(format: str) -> logging.Handler:
    """A handler that writes to standard error; ``format``: one of `config.LOG_FORMATS`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if format == "json" else OneLine("%(asctime)s %(message)s"))
    return handler


def _word(name: str) -> str:
    """A name as it is, or as a JSON string where it would not stay one word."""
    plain = name.isprintable() and not any(char.isspace() or char == '"' for char in name)
    return name if plain else msgspec.json.encode(name).decode()


def _short(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
