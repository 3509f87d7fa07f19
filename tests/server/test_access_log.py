"""One line a request, for people and for machines."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tenfold.log_format import OneLine
from tenfold.server.access_log import JsonFormatter
from tests.helpers.fake_engine import FakeConfig
from tests.helpers.server_process import running_server, wait_for


def lines(log: Path) -> list[dict[str, Any]]:
    """Every line must be JSON."""
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_every_request_is_one_json_object(tmp_path: Path) -> None:
    """Ended, refused, left by its client: with what it cost, and never with what was said."""
    log = tmp_path / "log"
    with running_server(log, FakeConfig(delay_s=0.01), log_format="json") as server:
        url = f"{server.url}/v1/completions"
        headers = {"x-request-id": "mine"}
        body: dict[str, Any] = {"prompt": "secret" * 5, "max_tokens": 5, "ignore_eos": True}
        assert httpx.post(url, json=body, headers=headers).headers["x-request-id"] == "mine"
        bad = httpx.post(url, json={**body, "top_p": 7})
        with httpx.stream("POST", url, json={**body, "max_tokens": 400, "stream": True}) as response:
            next(response.iter_lines())
        wait_for(lambda: sum(line["event"] != "message" for line in lines(log)) == 3)
    told = [line for line in lines(log) if line["event"] != "message"]
    ended, refused, left = told
    assert ended | {"id": "mine", "endpoint": "completion", "model": "fake", "status": 200} == ended
    assert (
        ended | {"finish": "length", "choices": 1, "cancelled": False, "stream": False, "queue_ms": 1.5}
        == ended
    )
    assert ended | {"prompt_tokens": 30, "cached_tokens": 16, "new_tokens": 14} == ended
    assert ended | {"completion_tokens": 5, "choices": 1, "acceptance": 1.0, "deaths": 0} == ended
    assert ended["total_ms"] >= ended["ttft_ms"] >= ended["prefill_ms"] > 0
    assert 20 <= ended["decode_ms"] <= ended["total_ms"]
    assert refused | {"event": "refusal", "status": 400, "param": "top_p"} == refused
    assert refused["id"] == bad.headers["x-request-id"]
    assert left | {"finish": "abort", "cancelled": True, "status": 200, "stream": True} == left
    assert "secret" not in log.read_text()


def test_an_id_that_could_forge_a_line_is_not_taken_over(tmp_path: Path) -> None:
    """Too long, or with characters that mean something elsewhere: a new one is made."""
    with running_server(tmp_path / "log") as server:
        for id in ("a" * 65, "a b", "a=b", 'a"b', "ä"):
            response = httpx.get(f"{server.url}/health", headers={b"x-request-id": id.encode()})
            assert response.headers["x-request-id"] != id
            assert len(response.headers["x-request-id"]) == 16


def test_no_request_writes_lines_of_its_own(tmp_path: Path) -> None:
    """A path (of who has no key, too), the name of a field or of a model: line ends and other control
    characters are escaped."""
    keys = tmp_path / "keys"
    keys.write_text("key")
    keys.chmod(0o600)
    log, forged = tmp_path / "log", "\n\x00\u2028forged line"
    with running_server(log, api_key_file=str(keys)) as server:
        assert httpx.get(f"{server.url}/x%0A%00%E2%80%A8forged%20line").status_code == 401
        for body in ({forged: 1}, {"model": forged}, {"prompt": "x", "stop": [{forged: 1}]}):
            url, headers = f"{server.url}/v1/completions", {"x-api-key": "key"}
            assert httpx.post(url, json=body, headers=headers).status_code in (400, 404)
    text = log.read_text()
    assert text.count("forged line") >= 3
    assert not [char for char in text if not char.isprintable() and char != "\n"]
    assert not any(line.startswith("forged") for line in text.splitlines())


def test_a_worker_s_lines_are_lines_too() -> None:
    """Whoever writes them: what is printable stays, in every language; a traceback has lines of its own."""
    record = logging.LogRecord("name", logging.ERROR, "", 0, "Grüße 你好 %s", ("a\r\nb\x1b[0m\\",), None)
    assert OneLine("%(name)s: %(message)s").format(record) == "name: Grüße 你好 a\\r\\nb\\x1b[0m\\"
    with pytest.raises(ValueError) as caught:
        raise ValueError("wrong")
    record.exc_info = (caught.type, caught.value, caught.tb)
    assert OneLine().format(record).endswith("\nValueError: wrong")


def test_other_lines_are_json_too() -> None:
    """A message with arguments, line ends and an exception is one line."""
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("name", logging.ERROR, "", 0, "it %s\nfailed", ("really",), sys.exc_info())
    text = JsonFormatter().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert line | {"event": "message", "level": "error", "logger": "name"} == line
    assert line["message"] == "it really\nfailed"
    assert "ValueError: two\nlines" in line["exception"]
