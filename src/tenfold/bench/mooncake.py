"""The Mooncake trace format: one JSON object a line, a request each, without its text.

``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}``; a hash id names 512
tokens and everything before them, the last one perhaps fewer. (Mooncake, FAST '25, kvcache-ai/Mooncake.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

TRACE_BLOCK = 512
MOST_S = 1e10
"""Of a trace: beyond some three hundred years seconds lose the digits that a step takes."""


class TraceError(ValueError):
    """The file is not a trace; says where and why."""


class TraceLine(msgspec.Struct, frozen=True):
    """One line, as it is written."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class TraceRequest(msgspec.Struct, frozen=True):
    """A request of a trace."""

    arrival: float
    """Seconds after the first request."""
    prompt_tokens: int
    output_tokens: int
    names: tuple[int, ...]
    """Names of its full pages."""


def read_trace(path: Path, page_tokens: int, limit: int | None = None) -> list[TraceRequest]:
    """The requests of a trace file, by time, with pages of ``page_tokens`` tokens (which must divide 512).
    Its times may count from anywhere: those that come back count from the first request.

    Raises TraceError, with the line, for what is no trace; OSError if there is no file.
    """
    if page_tokens < 1 or TRACE_BLOCK % page_tokens:
        raise TraceError(
            f"page_tokens must divide {TRACE_BLOCK}, the tokens of a trace's block, not {page_tokens}"
        )
    lines = sorted(_lines(path, limit), key=lambda line: line.timestamp)
    if not lines:
        raise TraceError(f"{path} has no requests")
    first = lines[0].timestamp
    check_length((lines[-1].timestamp - first) / 1000, str(path))
    return [_request(line, first, page_tokens) for line in lines]


def check_length(seconds: float, what: str) -> None:
    """Raises TraceError for a trace that lasts too long to be simulated."""
    if not seconds <= MOST_S:
        raise TraceError(
            f"{what} lasts {seconds:g} s from its first request to its last; the most is {MOST_S:g} s"
        )


def _lines(path: Path, limit: int | None) -> Iterator[TraceLine]:
    decoder = msgspec.json.Decoder(TraceLine)
    with path.open("rb") as file:
        found = 0
        for number, raw in enumerate(file, 1):
            if limit is not None and found >= limit:
                return
            if not raw.strip():
                continue
            try:
                line = decoder.decode(raw)
            except msgspec.DecodeError as error:
                raise TraceError(
                    f"{path}, line {number}: not a request of a Mooncake trace: {error}"
                ) from None
            blocks = -(-line.input_length // TRACE_BLOCK)
            if line.input_length < 1 or line.output_length < 1 or line.timestamp < 0:
                raise TraceError(
                    f"{path}, line {number}: lengths must be at least 1 and the timestamp at least 0"
                )
            if len(line.hash_ids) != blocks or min(line.hash_ids) < 0 or max(line.hash_ids) >= 1 << 50:
                raise TraceError(
                    f"{path}, line {number}: {line.input_length} tokens need {blocks} hash ids "
                    f"from 0 to 2^50, not {len(line.hash_ids)}"
                )
            found += 1
            yield line


def _request(line: TraceLine, first: float, page_tokens: int) -> TraceRequest:
    parts = TRACE_BLOCK // page_tokens
    names = [block * parts + part for block in line.hash_ids for part in range(parts)]
    return TraceRequest(
        (line.timestamp - first) / 1000,
        line.input_length,
        line.output_length,
        tuple(names[: line.input_length // page_tokens]),
    )
