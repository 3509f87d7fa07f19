"""Recorded traffic: a JSON object a line, the body of a chat completion with a few notes beside its fields.

The body is checked as the server checks it, so what is refused there is refused here, with the line's number.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

from tenfold.json_body import decode_json
from tenfold.limits import RequestError, check_params, check_prompt
from tenfold.protocol import SamplingParams
from tenfold.server.answer_stream import Sections
from tenfold.server.chat_setup import choose_chat
from tenfold.server.errors import ApiError, invalid
from tenfold.server.fields import Fields, show
from tenfold.server.prepare import Preparer
from tenfold.server.requests import ApiRequest, parse_chat
from tenfold.server.text import Text

NOTES = ("class", "conversation", "time", "answer")
"""Keys beside the body's own."""
UNNAMED = "unnamed"
"""The class of a line that has none."""
SHOWN = 5
"""Faulty lines that an error tells of."""


PLAIN = Sections()
"""Nothing but text."""


class TrafficError(ValueError):
    """Lines that are not traffic; the message names the file and each line."""


class TrafficRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A line of traffic, ready to be computed."""

    line: int
    """Counted from 1."""
    kind: str
    """Its ``class``."""
    conversation: str
    time: float
    """Seconds since 1970, or the line's number in traffic without times."""
    prompt: tuple[int, ...]
    params: SamplingParams
    """With a seed: the body's, or one that is made of the body."""
    answer: str | None
    """What was answered when the traffic was recorded."""
    sections: Sections = PLAIN
    """What the answer may have beside text: where stop strings count, and whether it ends with its first
    call."""


class _Room(msgspec.Struct, frozen=True):
    """See `tenfold.server.prepare.Room`."""

    vocab_size: int
    max_context: int
    state_width: int = 0
    """Traffic has no embeddings."""


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """A request before it is known whether all lines have a time."""

    request: TrafficRequest
    timed: bool


def read_traffic(path: Path, text: Text, vocab_size: int, max_context: int) -> list[TrafficRequest]:
    """All requests of the file, oldest first. ``model`` may be anything: this model answers. Empty lines are
    passed over. Raises TrafficError, OSError if the file cannot be read."""
    room = _Room(vocab_size, max_context)
    preparer = Preparer("this model", room, text, choose_chat(text))
    lines: list[_Line] = []
    problems: list[str] = []
    seen: Counter[bytes] = Counter()
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            if not data.strip():
                continue
            try:
                lines.append(_line(number, data, preparer, seen))
            except ApiError as error:
                problems.append(f"line {number}: {error.message}")
            except ValueError as error:
                problems.append(f"line {number}: {error}")
    if not problems:
        problems = list(_times(lines))
    if problems:
        more = f"\n  and {len(problems) - SHOWN} more lines" if len(problems) > SHOWN else ""
        raise TrafficError(
            f"{path} has lines that cannot be used:\n  " + "\n  ".join(problems[:SHOWN]) + more
        )
    if not lines:
        raise TrafficError(f"{path} has no requests; each line must be the body of a chat completion")
    return sorted((line.request for line in lines), key=lambda request: request.time)


def _line(number: int, data: bytes, preparer: Preparer, seen: Counter[bytes]) -> _Line:
    vocab_size, max_context = preparer.plan.vocab_size, preparer.plan.max_context
    try:
        body = decode_json(data)
    except ValueError as error:
        raise ValueError(f"it {error}") from None
    fields = Fields(body)
    kind, conversation = _name(fields, "class"), _name(fields, "conversation")
    time, answer = fields.take("time"), fields.string("answer")
    rest = {name: value for name, value in body.items() if name not in NOTES}
    fields.string("model")
    rest.pop("model", None)
    request = parse_chat(msgspec.json.encode(rest), (), vocab_size)
    assert request.messages is not None
    made = preparer.prompt_of(request)
    prompt, sections = tuple(made.ids), preparer.sections(request.tools, made.text)
    _check_plain(preparer.constrained(request, sections))
    try:
        check_params(request.params, vocab_size)
        check_prompt(prompt, 0, vocab_size, max_context, max_context)
    except RequestError as error:
        raise ValueError(f"{error}") from None
    params = request.params
    if rest.get("seed") is None:
        params = msgspec.structs.replace(params, seed=_seed(prompt, params, seen))
    return _Line(
        request=TrafficRequest(
            line=number,
            kind=UNNAMED if kind is None else kind,
            conversation=_opening(request.messages) if conversation is None else conversation,
            time=float(number) if time is None else _time(time),
            prompt=prompt,
            params=params,
            answer=answer,
            sections=sections,
        ),
        timed=time is not None,
    )


def _check_plain(request: ApiRequest) -> None:
    """Refuses what a server would do with a request and is not done here: dropping it would compute another
    request than was recorded."""
    constraint = request.params.constraint
    if constraint is not None:
        raise invalid(
            constraint.field,
            f"{constraint.field} is not supported in recorded traffic: what a grammar forces is not what the "
            "model would say, and a drafter is to learn that; leave such requests out of the file",
        )
    if request.n > 1:
        raise invalid(
            "n", "n is not supported in recorded traffic: a line is one answer; write a line for each choice"
        )


def _name(fields: Fields, name: str) -> str | None:
    value = fields.string(name)
    if value is not None and not value.strip():
        raise invalid(name, f"{name} is empty; give it a name, or leave it out")
    return value


def _opening(messages: list[dict[str, Any]]) -> str:
    """Names a conversation by its messages up to the user's first: later turns begin with the same."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages) - 1)
    return "opening-" + hashlib.blake2b(msgspec.json.encode(messages[: first + 1]), digest_size=8).hexdigest()


def contents(prompt: tuple[int, ...], params: SamplingParams, sections: Sections = PLAIN) -> bytes:
    """What a request is known by, to be digested: its prompt, the parameters that are not the defaults, and
    what in ``sections`` can end its answer. So a parameter that did not exist when a file was answered does
    not make all its requests new ones."""
    given = {
        name: value
        for name, value in msgspec.structs.asdict(params).items()
        if value != getattr(_DEFAULTS, name)
    }
    tools, reasoning = sections.tools, sections.reasoning
    if not sections.one_call and (not params.stop or (tools is None and reasoning is None)):
        return msgspec.msgpack.encode((prompt, sorted(given.items())))
    parts = (
        tools and tools.name,
        sorted(sections.tool_names),
        sections.one_call,
        reasoning and reasoning.name,
        sections.opened,
    )
    return msgspec.msgpack.encode((prompt, sorted(given.items()), parts))


_DEFAULTS = SamplingParams()


def _seed(prompt: tuple[int, ...], params: SamplingParams, seen: Counter[bytes]) -> int:
    """The same each time that the file is read, and another for each of several lines that are the same."""
    content = contents(prompt, msgspec.structs.replace(params, seed=None))
    digest = hashlib.blake2b(content, digest_size=16).digest()
    seen[digest] += 1
    numbered = hashlib.blake2b(digest + seen[digest].to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(numbered, "little") >> 1


def _time(value: Any) -> float:
    """Seconds since 1970, of such a number or of an ISO 8601 text (UTC where it does not say)."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    try:
        # Python 3.10 does not know the Z.
        moment = datetime.fromisoformat(value.replace("Z", "+00:00"))
    except (ValueError, AttributeError):
        raise invalid(
            "time",
            f"time is {show(value)}; it must be seconds since 1970, or a text like 2026-03-01T12:00:00Z",
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def _times(lines: list[_Line]) -> Iterator[str]:
    """What is wrong where some lines have a time and others not."""
    untimed = [line.request.line for line in lines if not line.timed]
    if len(untimed) < len(lines):
        for number in untimed:
            yield f"line {number}: time is missing, and other lines have one; give it to all or to none"
