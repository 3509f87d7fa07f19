"""JSON from outside: what is lost elsewhere is an error here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tenfold.json_body import DuplicateKey, decode_json


def least_s(work: Callable[[], object]) -> float:
    """CPU seconds, of several runs the one that was least disturbed."""
    times = []
    for _ in range(9):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


COLONS: dict[str, Any] = {
    "a:b": ["c:d", {"e": '":\\:\n', "f": [{}, {"g": None}]}],
    "u": "\u003a \\u003a",
    ":": {":": ":"},
}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(COLONS),
        json.dumps(COLONS).replace(":d", "\\u003ad"),
        '{"a\\u003Ab": 1}',
        '{"a": {"a": {"a": 1}}, "b": [{"a": 1}, {"a": 1}]}',
        "[1.5, -2e3, true, null]",
        "{}",
    ],
)
def test_each_key_once_is_taken_as_it_is(text: str) -> None:
    """However many colons are in it, and however they are written."""
    assert decode_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"a": 1, "a": 1}', "a"),
        ('{"a": null, "b": 2, "a": null}', "a"),
        ('{"x": [1, {"y": {"deep": 1, "deep": {}}}]}', "deep"),
        ('{"a": {"b": 1}, "a": {"c": 2}}', "a"),
        ('{"a": 1, "\\u0061": 2}', "a"),
        # As many colons as were read, for one is escaped where one was dropped.
        ('{"a": 1, "a": "\\u003a"}', "a"),
        ('{"a": 1, "a": "\\u003A"}', "a"),
        ('{"k:": 1, "k\\u003a": 2}', "k:"),
        ('{"": 1, "": 1}', ""),
    ],
)
def test_a_key_that_is_twice_in_an_object_is_refused(text: str, key: str) -> None:
    """At any depth, whatever its values, and however it is escaped: nothing is accepted and ignored."""
    with pytest.raises(DuplicateKey, match="twice in one object; give it once") as caught:
        decode_json(text.encode())
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (rb'{"a": "\ud800"}', r"has \\ud800 \(byte 7\), half of a pair"),
        (rb'{"a": "x\udfffabcdefgh"}', r"has \\udfff \(byte 8\), half of a pair"),
        (rb'{"a": "\ud83d\ude00 \\ud800 \uD801x"}', r"has \\uD801 \(byte 28\), half of a pair"),
        (b'{"a": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"a": "x', "truncated"),
        (rb'{"a": "\ud83d\ude00', "truncated"),
        (b"{]", "malformed"),
        (b'{"a": 1e999}', "too large"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_what_is_wrong_is_said_as_it_is(data: bytes, says: str) -> None:
    """Half of a surrogate pair is not a body that was cut short."""
    with pytest.raises(ValueError, match=says):
        decode_json(data)


def test_looking_for_keys_costs_little() -> None:
    """A body of 100 kB takes less than Python's own reader does three times (1.2 times, measured; of what
    such a body costs until it is tokenized, below a hundredth)."""
    turn = {"role": "user", "content": "Why is it so: " + 'it is, and "so" it\n was. ' * 20}
    body = json.dumps({"model": "m", "messages": [turn] * 200, "max_tokens": 5}).encode()
    assert len(body) > 100_000
    assert least_s(lambda: decode_json(body)) < 3 * least_s(lambda: json.loads(body))


def test_doubled_keys_cost_time_in_the_body_s_length() -> None:
    """No body makes the search worse than linear: twice as long, about twice the time."""

    def body(count: int) -> bytes:
        return b'{"x": "\\u003a", ' + b", ".join(b'"%d": 1' % n for n in range(count)) + b"}"

    short, long = body(20_000), body(80_000)
    assert least_s(lambda: decode_json(long)) < 12 * least_s(lambda: decode_json(short))
