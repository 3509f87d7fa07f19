"""Who is let in: API keys, and pages of other origins."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tenfold.server.cors import check_origin
from tenfold.server.keys import load_keys
from tenfold.server.page import FILES
from tests.helpers.server_process import ServerProcess, running_server

BODY = {"prompt": "abc", "max_tokens": 2}
FRIEND = "https://chat.example.com"


def write_keys(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with two keys, and one friendly origin."""
    folder = tmp_path_factory.mktemp("keys")
    keys = write_keys(folder / "keys", "# of the team\nfirst-key-1\n\n  second-key-2  \n")
    with running_server(folder / "log", api_key_file=keys, cors_origins=[FRIEND]) as server:
        yield server


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first-key-1"},
        {"authorization": "bearer second-key-2"},
        {"x-api-key": "second-key-2"},
    ],
)
def test_a_key_opens_everything(locked: ServerProcess, headers: dict[str, str]) -> None:
    """Each key, sent as OpenAI's or as Anthropic's clients do."""
    assert httpx.post(f"{locked.url}/v1/completions", json=BODY, headers=headers).status_code == 200
    for path in ("/v1/models", "/metrics", "/stats"):
        assert httpx.get(locked.url + path, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer first-key-"},
        {"authorization": "Bearer first-key-12"},
        {"authorization": "Bearer # of the team"},
        {"authorization": "Bearer"},
        {"authorization": "Basic first-key-1"},
        {"x-api-key": ""},
        {"x-api-key": "FIRST-KEY-1"},
    ],
)
def test_without_a_key_all_is_401(locked: ServerProcess, headers: dict[str, str]) -> None:
    """In OpenAI's shape, with the request's id, on every path but the open ones; nothing was begun."""
    paths = ["/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics", "/stats", "/nowhere"]
    for path in paths:
        response = httpx.post(locked.url + path, json=BODY, headers={"x-request-id": "mine", **headers})
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"] == "mine"


def test_anthropics_clients_are_told_in_their_shape(locked: ServerProcess) -> None:
    """So that they raise the error they have for it."""
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        refused = httpx.post(locked.url + path, json={}, headers={"x-request-id": "mine"})
        assert refused.status_code == 401
        said = refused.json()
        assert (said["type"], said["error"]["type"]) == ("error", "authentication_error")
        assert said["request_id"] == refused.headers["request-id"] == "mine"


def test_a_response_is_its_keys_alone(locked: ServerProcess) -> None:
    """Another key's holder who knows its id cannot read it, go on from it or delete it."""
    url = f"{locked.url}/v1/responses"
    mine, other = {"x-api-key": "first-key-1"}, {"x-api-key": "second-key-2"}
    body = {"input": "abc", "max_output_tokens": 2}
    id = httpx.post(url, json=body, headers=mine).json()["id"]
    assert httpx.get(f"{url}/{id}", headers=other).status_code == 404
    assert httpx.get(f"{url}/{id}/input_items", headers=other).status_code == 404
    assert httpx.delete(f"{url}/{id}", headers=other).status_code == 404
    on = {**body, "previous_response_id": id}
    assert httpx.post(url, json=on, headers=other).status_code == 404
    assert httpx.post(url, json=on, headers=mine).status_code == 200
    assert httpx.get(f"{url}/{id}", headers=mine).json()["id"] == id
    assert httpx.delete(f"{url}/{id}", headers=mine).status_code == 200


def test_what_tells_nothing_is_open(locked: ServerProcess) -> None:
    """Health for balancers, the page that asks for the key, the description of the API."""
    for path in (*FILES, "/health", "/ready", "/openapi.json"):
        assert httpx.get(locked.url + path).status_code == 200, path
    described = httpx.get(f"{locked.url}/openapi.json").json()
    assert described["security"] == [{"bearer": []}, {"header": []}]


def test_a_readable_key_file_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Owner alone: no word. Group or others: a warning with the remedy, and it works all the same."""
    with caplog.at_level(logging.WARNING):
        load_keys(write_keys(tmp_path / "a", "key\n"))
        assert caplog.text == ""
        load_keys(write_keys(tmp_path / "b", "key\n", 0o644))
    assert f"chmod 600 {tmp_path / 'b'}" in caplog.text


@pytest.mark.parametrize(
    ("text", "says"),
    [("# none\n\n", "has no key"), ("good\ntwo words\n", "line 2"), ("schlüssel\n", "line 1")],
)
def test_a_key_file_that_cannot_be_is_an_error(tmp_path: Path, text: str, says: str) -> None:
    """It names the file and the line, and never shows a key."""
    path = write_keys(tmp_path / "keys", text)
    with pytest.raises(ValueError, match=says) as caught:
        load_keys(path)
    assert path in str(caught.value)
    assert "two words" not in str(caught.value)


def test_a_friendly_origin_may_use_it(locked: ServerProcess) -> None:
    """The preflight needs no key; the answer may be read, an error too."""
    asked = {
        "origin": FRIEND,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type, x-stainless-os",
    }
    preflight = httpx.options(f"{locked.url}/v1/completions", headers=asked)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == FRIEND
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
    for headers, status in (({"x-api-key": "first-key-1"}, 200), ({}, 401)):
        answer = httpx.post(f"{locked.url}/v1/completions", json=BODY, headers={"origin": FRIEND, **headers})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == FRIEND
        assert answer.headers["vary"] == "origin"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize("origin", ["https://evil.example.com", f"{FRIEND}.evil.com", "null", FRIEND.upper()])
def test_other_origins_may_not(locked: ServerProcess, origin: str) -> None:
    """No header says yes to them, on no way; the preflight fails."""
    asked = {"origin": origin, "access-control-request-method": "POST", "x-api-key": "first-key-1"}
    for response in (
        httpx.options(f"{locked.url}/v1/completions", headers=asked),
        httpx.post(f"{locked.url}/v1/completions", json=BODY, headers=asked),
        httpx.get(f"{locked.url}/v1/models", headers=asked),
    ):
        assert "access-control-allow-origin" not in response.headers
        assert response.headers["vary"] == "origin"


def test_no_page_may_set_an_open_server_at_work(server: ServerProcess) -> None:
    """A simple request needs no preflight: it is refused itself, but for the server's own page."""
    foreign = httpx.post(
        f"{server.url}/v1/completions",
        content=json.dumps(BODY),
        headers={"origin": "https://evil.example.com", "content-type": "text/plain"},
    )
    assert foreign.status_code == 403
    assert "--cors-origin https://evil.example.com" in foreign.json()["error"]["message"]
    nobody = httpx.post(f"{server.url}/v1/completions", json=BODY, headers={"origin": "null"})
    assert nobody.status_code == 403
    assert "--cors-origin" not in nobody.text and "--api-key-file" in nobody.text, "what can be done, no more"
    own = httpx.post(f"{server.url}/v1/completions", json=BODY, headers={"origin": server.url})
    assert own.status_code == 200
    assert "access-control-allow-origin" not in own.headers


@pytest.mark.parametrize(
    "origin",
    [
        "*",
        "null",
        "ftp://a.com",
        "file://x",
        "example.com",
        "https://a.com/",
        "https://A.com",
        "https://a.com:x",
    ],
)
def test_an_origin_that_cannot_be_is_refused_at_the_start(origin: str) -> None:
    """It names what was given and shows how to write one."""
    with pytest.raises(ValueError, match="is not an origin"):
        check_origin(origin)


@pytest.mark.parametrize(
    ("options", "warns"), [({}, True), ({"keys": True}, False), ({"host": "127.0.0.1"}, False)]
)
def test_listening_to_all_without_a_key_is_warned_of(
    tmp_path: Path, options: dict[str, Any], warns: bool
) -> None:
    """Not on loopback, and not where a key is asked for."""
    config: dict[str, Any] = {"host": options.get("host", "0.0.0.0")}
    if "keys" in options:
        config["api_key_file"] = write_keys(tmp_path / "keys", "key\n")
    with running_server(tmp_path / "log", **config) as server:
        pass
    assert ("without --api-key-file" in server.log.read_text()) == warns
