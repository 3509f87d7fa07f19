"""Making traffic, and answers to it, for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tenfold.protocol import SamplingParams
from tenfold.traffic.reading import TrafficRequest


def line(content: str = "Hi", **fields: Any) -> dict[str, Any]:
    """A line of traffic, before it is written as JSON."""
    return {"messages": [{"role": "user", "content": content}], **fields}


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    """The file, written."""
    path.write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    return path


def traffic_request(
    number: int,
    *,
    kind: str = "chat",
    conversation: str | None = None,
    time: float | None = None,
    prompt: tuple[int, ...] | None = None,
    answer: str | None = None,
    **params: Any,
) -> TrafficRequest:
    """A request of 8 tokens at most with a seed of its own."""
    return TrafficRequest(
        line=number,
        kind=kind,
        conversation=f"talk {number}" if conversation is None else conversation,
        time=float(number) if time is None else time,
        prompt=(1 + number % 90, 2, 3) if prompt is None else prompt,
        params=SamplingParams(**{"seed": number, "max_tokens": 8, **params}),
        answer=answer,
    )
