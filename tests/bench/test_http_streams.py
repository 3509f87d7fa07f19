"""The lean client, against the real front over a fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tenfold.bench.http_streams import read_answer, read_streams
from tests.helpers import expected
from tests.helpers.fake_engine import FakeConfig
from tests.helpers.server_process import ServerProcess, running_server

PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests."""
    folder: Path = tmp_path_factory.mktemp("streams")
    with running_server(folder / "log", FakeConfig(delay_s=0.002)) as server:
        yield server


def address(server: ServerProcess) -> tuple[str, int]:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return host, int(port)


def body(content: str, tokens: int) -> dict[str, object]:
    return {
        "messages": [{"role": "user", "content": content}],
        "seed": 3,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_streams_are_read_whole_and_timed(server: ServerProcess) -> None:
    """All streams at once, each with its own text and tokens; the times span the steps of each."""
    counts = (5, 60, 31)
    records = read_streams(address(server), PATH, [body(f"q{n}", n) for n in counts])
    for count, record in zip(counts, records, strict=True):
        answer = read_answer(b"".join(record.parts))
        assert answer.text == expected.chat_text(f"q{count}", 3, count)
        assert (answer.finish_reason, answer.completion_tokens) == ("length", count)
        # A step takes 2 ms at least.
        assert record.last_at - record.first_at > 0.001 * (count - 2)


def test_a_refusal_is_no_answer(server: ServerProcess) -> None:
    """What is not a good, whole stream is an error with the reason."""
    (record,) = read_streams(address(server), PATH, [{**body("q", 5), "temperature": 1e9}])
    with pytest.raises(ValueError, match=r"status 400.*temperature"):
        read_answer(b"".join(record.parts))
    (record,) = read_streams(address(server), PATH, [body("q", 5)])
    raw = b"".join(record.parts)
    with pytest.raises(ValueError, match="not whole"):
        read_answer(raw[:-20])
    assert read_answer(raw).finish_reason == "length"
    with pytest.raises(ValueError, match="finish reasons"):
        read_answer(raw.replace(b'"finish_reason":"length"', b'"finish_reason": null   '))
