"""Which traffic a drafter learns from, which stops its training, and which is kept to judge it.

By conversation, for the turns of one repeat each other; and by time, the newest kept back, for a drafter is
used on traffic that is newer than what it has learnt from.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tenfold.traffic.reading import TrafficRequest

HELD_OUT = 0.15
VALIDATION = 0.10
TRAINED = "trained.json"
"""In a drafter's folder: which conversations it has learnt from."""


class Split(NamedTuple):
    """Three parts without a conversation in common, each oldest first."""

    training: list[TrafficRequest]
    validation: list[TrafficRequest]
    held_out: list[TrafficRequest]


def split(
    requests: Sequence[TrafficRequest], held_out: float = HELD_OUT, validation: float = VALIDATION
) -> Split:
    """Divides the conversations of each class: the newest share ``held_out``, the next newest share
    ``validation``, the rest.

    A conversation is as old as its last request, and of its first request's class. A class of two
    conversations has none to validate with, a class of one is for training alone. Raises ValueError where one
    of the three parts would be empty, and for shares that are not shares.
    """
    if not (0 < held_out < 1 and 0 < validation < 1 and held_out + validation < 1):
        raise ValueError(
            f"the shares to hold out ({held_out:g}) and to validate with ({validation:g}) must be above 0, "
            "and below 1 together"
        )
    parts: tuple[list[str], list[str], list[str]] = ([], [], [])
    for conversations in _by_class(requests).values():
        count = len(conversations)
        kept = max(1, round(held_out * count)) if count > 1 else 0
        checked = max(1, round(validation * count)) if count > 2 else 0
        # Rounding may leave nothing to learn from.
        while kept + checked >= count > 1:
            kept, checked = (kept - 1, checked) if kept > checked else (kept, checked - 1)
        rest = count - kept - checked
        parts[0].extend(conversations[:rest])
        parts[1].extend(conversations[rest : rest + checked])
        parts[2].extend(conversations[rest + checked :])
    found = Split(*(_of(requests, set(part)) for part in parts))
    if not (found.training and found.validation and found.held_out):
        raise ValueError(
            "the traffic has too few conversations to train on some, validate with others and hold out a "
            "third part: a class needs at least 3. Record more, or check the conversation key: lines with "
            "the same one are one conversation"
        )
    return found


def newest(requests: Sequence[TrafficRequest], share: float = HELD_OUT) -> list[TrafficRequest]:
    """The newest share of each class's conversations, at least one: what `split` holds out, or with share 1
    everything. Raises ValueError for a share that is none."""
    if not 0 < share <= 1:
        raise ValueError(f"the share to replay is {share:g}; it must be above 0 and at most 1")
    chosen: set[str] = set()
    for conversations in _by_class(requests).values():
        chosen.update(conversations[len(conversations) - max(1, round(share * len(conversations))) :])
    return _of(requests, chosen)


def before_newest(requests: Sequence[TrafficRequest], share: float, most: int) -> list[TrafficRequest]:
    """Of each class, requests of the conversations that are next older than `newest`: at most so many."""
    counts = Counter(request.conversation for request in requests)
    chosen: set[str] = set()
    for conversations in _by_class(requests).values():
        taken = 0
        for conversation in reversed(conversations[: -max(1, round(share * len(conversations)))]):
            if taken < most:
                chosen.add(conversation)
                taken += counts[conversation]
    return first_of_each(_of(requests, chosen), most)


def first_of_each(requests: Iterable[TrafficRequest], most: int) -> list[TrafficRequest]:
    """The first requests of each class, at most so many."""
    counts: Counter[str] = Counter()
    chosen = []
    for request in requests:
        counts[request.kind] += 1
        if counts[request.kind] <= most:
            chosen.append(request)
    return chosen


def _by_class(requests: Iterable[TrafficRequest]) -> dict[str, list[str]]:
    """Conversations of each class, oldest first."""
    kinds: dict[str, str] = {}
    last: dict[str, float] = {}
    for request in requests:
        kinds.setdefault(request.conversation, request.kind)
        last[request.conversation] = max(request.time, last.get(request.conversation, request.time))
    classes: dict[str, list[str]] = {}
    for conversation in sorted(last, key=last.__getitem__):
        classes.setdefault(kinds[conversation], []).append(conversation)
    return classes


def _of(requests: Iterable[TrafficRequest], conversations: set[str]) -> list[TrafficRequest]:
    return [request for request in requests if request.conversation in conversations]


def write_trained(folder: Path, requests: Iterable[TrafficRequest]) -> None:
    """Notes the conversations of these requests in a drafter's folder, by digests: their names are nobody
    else's business. Raises OSError."""
    marks = sorted({_mark(request.conversation) for request in requests})
    (folder / TRAINED).write_bytes(msgspec.json.encode(marks))


def untrained(folder: Path, requests: Sequence[TrafficRequest]) -> list[TrafficRequest]:
    """The requests of conversations that the drafter in ``folder`` has not learnt from. Raises OSError,
    ValueError for a file that cannot be read."""
    path = folder / TRAINED
    try:
        marks = set(msgspec.json.decode(path.read_bytes(), type=list[str]))
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}; train the drafter again") from None
    return [request for request in requests if _mark(request.conversation) not in marks]


def _mark(conversation: str) -> str:
    data = conversation.encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=8).hexdigest()
