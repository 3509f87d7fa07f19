"""Several models in one server: each answers by its name, and nothing of one touches another."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.helpers import expected
from tests.helpers.fake_engine import FakeConfig
from tests.helpers.server_process import ServerProcess, running_server, serving_model, wait_for
from tests.helpers.tiny_served import write_tiny

HI = [{"role": "user", "content": "Who are you? @who@"}]
OPEN = {"max_tokens": 12, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "@who@"},
    "/v1/responses": {"input": "@who@"},
    "/v1/messages": {"messages": HI, "max_tokens": 40},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/embeddings": {"input": "abc"},
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [65]},
}


def says(what: str, **changes: Any) -> FakeConfig:
    """A model that says ``what`` when it is asked who it is."""
    return FakeConfig(scripts={"who": what}, **changes)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The models `fake` and `other`; they differ in what they say and in their contexts."""
    log = tmp_path_factory.mktemp("pair") / "log"
    with running_server(
        log, says("I am the first"), others={"other": says("Other", max_context=256)}
    ) as both:
        yield both


def told(path: str, answer: dict[str, Any]) -> str:
    """The text of an answer."""
    if path == "/v1/responses":
        return str(answer["output"][0]["content"][0]["text"])
    if path == "/v1/messages":
        return str(answer["content"][0]["text"])
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("path", [*BODIES])
def test_every_api_answers_by_model(pair: ServerProcess, path: str) -> None:
    """The model that is named answers, under its name; none, or one that is not here, is an error that lists
    those that are."""
    for name, said in (("fake", "I am the first"), ("other", "Other")):
        answer = httpx.post(pair.url + path, json={**BODIES[path], "model": name})
        assert answer.status_code == 200, answer.text
        if path.startswith("/v1/") and not path.endswith("count_tokens"):
            assert answer.json()["model"] == name
            assert path == "/v1/embeddings" or told(path, answer.json()) == said
        elif path == "/tokenize":
            assert answer.json()["max_model_len"] == {"fake": 512, "other": 256}[name]
    missing = httpx.post(pair.url + path, json=BODIES[path])
    assert missing.status_code == 400
    assert missing.json()["error"]["code"] == "missing_parameter"
    unknown = httpx.post(pair.url + path, json={**BODIES[path], "model": "nobody"})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"
    for refused in (missing, unknown):
        assert refused.json()["error"]["param"] == "model"
        assert "there are: fake, other" in refused.json()["error"]["message"]


def test_lists_and_figures_are_by_model(pair: ServerProcess) -> None:
    """/v1/models, /stats, /health, /ready and the label of /metrics."""
    models = {model["id"]: model for model in httpx.get(f"{pair.url}/v1/models").json()["data"]}
    assert [*models] == ["fake", "other"]
    for name, model in models.items():
        assert httpx.get(f"{pair.url}/v1/models/{name}").json() == model
        stats = httpx.get(f"{pair.url}/stats", params={"model": name}).json()
        assert stats["model"] == name and stats["models"] == ["fake", "other"]
        assert stats["max_context_tokens"] == model["max_model_len"]
    assert httpx.get(f"{pair.url}/stats").json()["model"] == "fake"
    for path in ("/health?at=now", "/metrics?at=now"):
        assert httpx.get(pair.url + path).status_code == 200
    for path in ("/stats?foo=1", "/ready?model=one&x=", "/v1/models?limit=1"):
        refused = httpx.get(pair.url + path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unknown_parameter"), path
    twice = httpx.get(f"{pair.url}/stats?model=one&model=two")
    assert (twice.status_code, twice.json()["error"]["param"]) == (400, "model")
    assert httpx.get(f"{pair.url}/?from=elsewhere").status_code == 200
    for path in ("/v1/models/nobody", "/stats?model=nobody", "/ready?model=nobody"):
        lost = httpx.get(pair.url + path)
        assert lost.status_code == 404 and "there are: fake, other" in lost.json()["error"]["message"]
    assert httpx.get(f"{pair.url}/ready").json() == {"status": "ready"}
    assert httpx.get(f"{pair.url}/health").json()["workers"] == {"fake/w0": "up", "other/w0": "up"}

    def count(name: str) -> float:
        return pair.metric(f'tenfold_generated_tokens_total{{model="{name}"}}')

    before = {name: count(name) for name in models}
    body = {"model": "other", "prompt": "x", **OPEN}
    assert httpx.post(f"{pair.url}/v1/completions", json=body).status_code == 200
    assert {name: count(name) - before[name] for name in models} == {"fake": 0, "other": 12}
    rejected = 'tenfold_requests_rejected_total{status="404"}'
    lost_before = pair.metric(rejected)
    httpx.post(f"{pair.url}/v1/completions", json={**body, "model": "nobody"})
    assert pair.metric(rejected) == lost_before + 1
    page = httpx.get(f"{pair.url}/metrics").text
    assert page.count("# TYPE tenfold_generated_tokens_total counter") == 1
    assert page.count("# TYPE tenfold_time_to_first_token_seconds histogram") == 1


def test_the_log_names_the_model(pair: ServerProcess) -> None:
    """In the line of a request."""
    headers = {"x-request-id": "log-1"}
    httpx.post(f"{pair.url}/v1/completions", json={"model": "other", "prompt": "x", **OPEN}, headers=headers)
    wait_for(lambda: "log-1 completion model=other prompt=1 " in pair.log.read_text())


def test_responses_are_kept_apart_by_model(pair: ServerProcess) -> None:
    """Who goes on from another model's response is told whose it is; by its id alone it can be had."""
    client = openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0)
    first = client.responses.create(model="fake", input="@who@")
    with pytest.raises(openai.NotFoundError, match="is of the model fake"):
        client.responses.create(model="other", input="and?", previous_response_id=first.id)
    assert client.responses.create(model="fake", input="and?", previous_response_id=first.id).id
    assert client.responses.retrieve(first.id).output_text == "I am the first"


def test_the_document_asks_for_a_model(pair: ServerProcess) -> None:
    """Where there are several a body must name one, and the document says so."""
    schemas = httpx.get(f"{pair.url}/openapi.json").json()["components"]["schemas"]
    for kind in ("ChatRequest", "CompletionRequest", "MessagesRequest", "ResponsesRequest"):
        assert (
            "model" in schemas[kind]["required"] and schemas[kind]["properties"]["model"]["type"] == "string"
        )


def test_a_crash_of_one_model_does_not_touch_the_other(tmp_path: Path) -> None:
    """Its streams go on without a pause for a new worker; the crashed one's go on in theirs."""
    slow = FakeConfig(delay_s=0.01)
    with running_server(tmp_path / "log", slow, others={"other": slow}) as server:
        pids = server.worker_pids()
        body = {"prompt": "abc", "max_tokens": 150, "ignore_eos": True, "seed": 5, "stream": True}
        texts = {"fake": "", "other": ""}
        with (
            httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "model": "fake"}) as one,
            httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "model": "other"}) as two,
        ):
            lines = {"fake": one.iter_lines(), "other": two.iter_lines()}
            for name in texts:
                texts[name] += piece(next(lines[name]))
            assert len(pids) == 2
            os.kill(pids[1], signal.SIGKILL)
            for name in texts:
                texts[name] += "".join(piece(line) for line in lines[name])
        assert texts == dict.fromkeys(texts, expected.text("abc", 5, 150))
        restarts = {name: server.metric(f'tenfold_worker_restarts_total{{model="{name}"}}') for name in texts}
        assert sorted(restarts.values()) == [0, 1]
        assert set(pids) & set(server.worker_pids()), "the other worker is the same"


def piece(line: str) -> str:
    """The text in a line of a stream."""
    if not line.startswith("data: {"):
        return ""
    return "".join(choice["text"] for choice in json.loads(line[6:])["choices"])


def test_with_one_model_down_the_others_serve(tmp_path: Path) -> None:
    """/ready says which is not ready, and is red for that one alone."""
    once = str(tmp_path / "once")
    with running_server(tmp_path / "log", others={"other": FakeConfig(only_once=once)}) as server:
        body = {"prompt": "abc", **OPEN, "seed": 1}

        def ask(model: str) -> int:
            return httpx.post(f"{server.url}/v1/completions", json={**body, "model": model}).status_code

        assert ask("other") == 200
        kill_worker_of(server, "other")
        wait_for(lambda: "cannot be started" in httpx.get(f"{server.url}/ready").text, 60)
        ready = httpx.get(f"{server.url}/ready")
        assert ready.status_code == 200 and [*ready.json()["not_ready"]] == ["other"]
        alone = httpx.get(f"{server.url}/ready?model=other")
        assert alone.status_code == 503 and "cannot be started" in alone.json()["reason"]
        assert httpx.get(f"{server.url}/ready?model=fake").status_code == 200
        assert httpx.get(f"{server.url}/health").json()["workers"]["other/w0"] == "down"
        assert (ask("fake"), ask("other")) == (200, 503)


def kill_worker_of(server: ServerProcess, model: str) -> None:
    """The worker that dies must be this model's."""
    for pid in server.worker_pids():
        before = server.metric(f'tenfold_worker_restarts_total{{model="{model}"}}')
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: server.metric("tenfold_worker_restarts_total") >= 1)
        if server.metric(f'tenfold_worker_restarts_total{{model="{model}"}}') > before:
            return


def test_texts_are_those_of_a_server_of_one_model(tmp_path: Path) -> None:
    """Real models, from the command line, with the official client switching between them: to the byte."""
    paths = {
        name: write_tiny(tmp_path / f"{name}.gguf", seed, family)
        for name, seed, family in (("a", 1, "llama"), ("b", 2, "qwen3"))
    }

    def texts(server: ServerProcess, names: list[str]) -> dict[str, list[str]]:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        found: dict[str, list[str]] = {name: [] for name in names}
        for seed in range(3):
            for name in names:
                ask: Any = {"model": name, "seed": seed, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
                whole = client.completions.create(prompt="Once upon", **ask)
                found[name].append(whole.choices[0].text)
                stream = client.chat.completions.create(
                    messages=[{"role": "user", "content": "Say it"}], stream=True, **ask
                )
                found[name].append("".join(chunk.choices[0].delta.content or "" for chunk in stream))
        return found

    single: dict[str, list[str]] = {}
    for name, path in paths.items():
        with serving_model(tmp_path / name, path, kv_memory="4MiB", options=["--name", name]) as server:
            single |= texts(server, [name])
    models = [f"a={paths['a']}", f"b={paths['b']}"]
    with serving_model(tmp_path / "log", *models, kv_memory="4MiB") as server:
        assert texts(server, ["a", "b"]) == single
    assert single["a"] != single["b"]
