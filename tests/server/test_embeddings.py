"""``/v1/embeddings``: the official client, what is refused, and what happens on the way."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.checkpoint.pooling import PoolingRule
from tenfold.protocol import Chunk, Pooling, PoolingKind, Request, SamplingParams
from tenfold.server.choices import Choice
from tenfold.server.embeddings import EmbeddingAnswer, parse_embeddings, pooling_of, vector_json
from tenfold.server.errors import ApiError
from tenfold.server.flights import ClientGone, Flight
from tenfold.server.inputs import AT_ONCE, AT_ONCE_TOKENS, Inputs
from tests.helpers.fake_engine import POISON, STATE_WIDTH, FakeConfig, embedding_of
from tests.helpers.fake_text import FakeTokenizer
from tests.helpers.server_process import ServerProcess, running_server, wait_for


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ids_of(text: str) -> list[int]:
    return FakeTokenizer().encode(text, add_special_tokens=True, parse_special=True)


def expected(text: str, kind: PoolingKind = "mean", normalize: bool = True) -> list[float]:
    data = embedding_of(tuple(ids_of(text)), Pooling(kind=kind, normalize=normalize))
    return list(struct.unpack(f"<{STATE_WIDTH}f", data))


def post(server: ServerProcess, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)


def float32(values: list[float]) -> list[float]:
    return [float(value) for value in np.array(values, np.float32)]


def idle(server: ServerProcess) -> bool:
    names = ("tenfold_requests_in_flight", "tenfold_requests_running", "tenfold_requests_waiting")
    return all(server.metric(name) == 0 for name in names)


def test_the_official_client_gets_vectors(client: openai.OpenAI) -> None:
    """Text, texts, ids and lists of ids, in base64 (the client's default) and as numbers: the same float32
    numbers, in the order of the inputs, with their tokens counted."""
    texts = ["Hello there", "a", "b" * 40]
    forms: list[tuple[Any, list[str]]] = [
        ("Hello there", texts[:1]),
        (texts, texts),
        (ids_of("Hello there"), texts[:1]),
        ([ids_of(text) for text in texts], texts),
        (["Hello there"], texts[:1]),
    ]
    for form, meant in forms:
        packed = client.embeddings.create(model="fake", input=form)
        plain = client.embeddings.create(model="fake", input=form, encoding_format="float", user="me")
        assert [entry.index for entry in packed.data] == list(range(len(meant)))
        assert [entry.embedding for entry in packed.data] == [expected(text) for text in meant]
        assert [float32(entry.embedding) for entry in plain.data] == [expected(text) for text in meant]
        assert (packed.object, packed.model, packed.data[0].object) == ("list", "fake", "embedding")
        tokens = sum(map(len, meant))
        assert (packed.usage.prompt_tokens, packed.usage.total_tokens) == (tokens, tokens)
    fields: Any = {"model": "fake", "input": "b" * 40, "extra_body": {"pooling": "last", "normalize": False}}
    last = client.embeddings.create(**fields)
    assert last.data[0].embedding == expected("b" * 40, "last", False)
    assert last.usage.model_extra == {"prompt_tokens_details": {"cached_tokens": 32}}
    assert client.embeddings.create(model="fake", input="a", dimensions=STATE_WIDTH).data[0].index == 0
    with pytest.raises(openai.BadRequestError, match="vectors of this model have 8 and are not cut"):
        client.embeddings.create(model="fake", input="a", dimensions=4)
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.embeddings.create(model="other", input="a")


def test_more_inputs_than_the_server_takes_at_once(tmp_path: Path) -> None:
    """A request with many inputs is served by a server that takes a handful; one that finds no room for its
    first input is refused with 429."""
    with running_server(tmp_path / "log", FakeConfig(delay_s=0.02), max_running=2, max_queue=3) as server:
        many = [f"text number {n}" for n in range(2 * AT_ONCE + 5)]
        data = post(server, input=many).json()["data"]
        assert [float32(entry["embedding"]) for entry in data] == [expected(text) for text in many]
        assert [entry["index"] for entry in data] == list(range(len(many)))
        assert server.metric("tenfold_embeddings_total") == len(many)
        assert server.metric('tenfold_requests_total{finish="stop"}') == len(many)
        assert server.metric("tenfold_generated_tokens_total") == 0
        wait_for(lambda: idle(server))
        long = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}
        with ThreadPoolExecutor(2 + 3) as pool:
            for _ in range(2 + 3):
                pool.submit(httpx.post, f"{server.url}/v1/completions", json=long, timeout=60)
            wait_for(lambda: server.metric("tenfold_requests_in_flight") == 2 + 3)
            full = post(server, input="a")
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")


def test_requests_at_once_get_each_its_own(server: ServerProcess) -> None:
    """Several requests with many inputs, at the same time: every vector is that of its text."""

    def ask(number: int) -> None:
        texts = [f"text {n} of {number}" for n in range(3 * AT_ONCE)]
        data = post(server, input=texts, encoding_format="base64").json()["data"]
        found = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4").tolist() for entry in data]
        assert found == [expected(text) for text in texts]

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == [None] * 6


REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({}, "missing_parameter", "input", "input is missing"),
    ({"input": None}, "missing_parameter", "input", "input is missing"),
    ({"input": ""}, "invalid_value", "input", "input is an empty string"),
    ({"input": []}, "invalid_value", "input", "input is an empty list; it must have at least one"),
    ({"input": [[]]}, "invalid_value", "input[0]", "at least one token"),
    ({"input": ["a", ""]}, "invalid_value", "input[1]", "input[1] is an empty string"),
    ({"input": ["a", 5]}, "invalid_value", "input", "input[1] is 5"),
    ({"input": [5, "a"]}, "invalid_value", "input[1]", 'input[1] is "a"'),
    ({"input": 5}, "invalid_value", "input", "it must be a string or a list of token ids"),
    ({"input": [512]}, "invalid_value", "input[0]", "an integer from 0 to 511"),
    ({"input": [[1], [-1]]}, "invalid_value", "input[1][0]", "an integer from 0 to 511"),
    (
        {"input": ["a"] * 2049},
        "invalid_value",
        "input",
        "input has 2049 entries; a request can have up to 2048",
    ),
    ({"input": ["b" * 500] * 601}, "invalid_value", "input", "300500 tokens in all"),
    (
        {"input": "a" * 513},
        "context_length_exceeded",
        "input",
        "input is too long: it has 513 tokens; the model's context is 512",
    ),
    (
        {"input": ["a", "a" * 513]},
        "context_length_exceeded",
        "input[1]",
        "input[1] is too long: it has 513 tokens",
    ),
    ({"input": "a" * 9999}, "context_length_exceeded", "input", "input is too long: it has 9999 bytes"),
    ({"input": "a", "encoding_format": "int8"}, "invalid_value", "encoding_format", '"float" or "base64"'),
    ({"input": "a", "dimensions": 0}, "invalid_value", "dimensions", "an integer from 1"),
    ({"input": "a", "dimensions": 7}, "unsupported_value", "dimensions", "Leave it out, or give 8"),
    ({"input": "a", "pooling": "cls"}, "invalid_value", "pooling", '"mean" or "last"'),
    ({"input": "a", "normalize": "yes"}, "invalid_value", "normalize", "true or false"),
    ({"input": "a", "user": 5}, "invalid_value", "user", "it must be a string"),
    ({"input": "a", "stream": True}, "unknown_parameter", "stream", "unknown field stream"),
    ({"input": "a", "model": "x"}, "model_not_found", "model", "there is no model"),
]


@pytest.mark.parametrize(("body", "code", "param", "says"), REFUSED)
def test_what_is_wrong_is_named(
    server: ServerProcess, body: dict[str, Any], code: str, param: str, says: str
) -> None:
    """Every error has its field, its place in a list, and what would do; and costs the worker nothing."""
    answer = post(server, **body)
    error = answer.json()["error"]
    assert answer.status_code == (404 if code == "model_not_found" else 400)
    assert (error["code"], error["param"]) == (code, param)
    assert says in error["message"]


def test_a_full_context_is_embedded(server: ServerProcess) -> None:
    """Nothing is generated, so a text may be as long as the context."""
    answer = post(server, input="a" * 512)
    assert float32(answer.json()["data"][0]["embedding"]) == expected("a" * 512)


def test_workers_that_die_do_not_show(tmp_path: Path) -> None:
    """SIGKILL amid many inputs: the ones in flight are computed by the next worker, to the same bytes; a text
    that kills workers ends as one error."""
    with running_server(tmp_path / "log", FakeConfig(delay_s=0.05), max_running=4) as server:
        many = [f"text number {n}" for n in range(60)]
        found: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: found.append(post(server, input=many)))
        asking.start()
        wait_for(lambda: server.metric("tenfold_embeddings_total") > 8)
        server.kill_worker()
        asking.join()
        data = found[0].json()["data"]
        assert [float32(entry["embedding"]) for entry in data] == [expected(text) for text in many]
        assert server.metric("tenfold_worker_restarts_total") == 1
        killer = post(server, input=[[5], [5, POISON]])
        assert killer.status_code == 500
        assert "2 workers died" in killer.json()["error"]["message"]
        wait_for(lambda: idle(server))
        assert post(server, input="a").status_code == 200


def test_who_hangs_up_frees_the_server(tmp_path: Path) -> None:
    """A client that leaves amid many inputs: those in flight are aborted and no other sets out; the log says
    what was made of it."""
    config: Any = {"max_running": 2, "log_format": "json"}
    with running_server(tmp_path / "log", FakeConfig(delay_s=0.05), **config) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/embeddings", json={"input": ["a"] * 1000}, timeout=3)
        wait_for(lambda: idle(server))
        made = server.metric("tenfold_embeddings_total")
        assert 0 < made < 900
        assert post(server, input="ab", pooling="last").status_code == 200
        assert server.metric("tenfold_embeddings_total") == made + 1

        def lines() -> list[Any]:
            text = server.log.read_text().splitlines()
            return [line for line in map(json.loads, text) if line["event"] == "request"]

        gone, served = wait_for(lambda: lines() if len(lines()) == 2 else None)
        assert (gone["endpoint"], gone["cancelled"], gone["finish"]) == ("embeddings", True, "abort")
        assert (served["prompt_tokens"], served["completion_tokens"], served["status"]) == (2, 0, 200)
        assert served["finish"] == "stop" and served["queue_ms"] == 1.5 and served["ttft_ms"] > 0


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_both_encodings_are_exact(values: list[float]) -> None:
    """Any float32, the smallest and the largest too, comes back from JSON and from base64 as it was (but that
    JSON's -0 is 0 to many)."""
    data = struct.pack(f"<{len(values)}f", *values)
    numbers = json.loads(vector_json(data, "float"))
    assert float32(numbers) == values
    assert base64.b64decode(json.loads(vector_json(data, "base64"))) == data


def test_an_end_without_a_vector_is_an_error() -> None:
    """Nobody waits for a vector that does not come."""
    answer = EmbeddingAnswer("float")
    answer.push([Chunk(id="a", finish="stop", cached_tokens=3)])
    assert (answer.engine_finish, answer.finish) == ("error", None)
    assert answer.error == "the engine ended the request without a vector"


def test_a_model_whose_own_pooling_is_not_there() -> None:
    """Then a request must say which it wants; one that does is served."""
    rule = PoolingRule(None, "its 1_Pooling/config.json asks for cls")
    with pytest.raises(ApiError, match=r"pooling must be given for this model, .*asks for cls") as refused:
        pooling_of(parse_embeddings(b'{"input": "a"}', (), 9), rule)
    assert (refused.value.status, refused.value.param) == (400, "pooling")
    asked = parse_embeddings(b'{"input": "a", "pooling": "last", "normalize": false}', (), 9)
    assert pooling_of(asked, rule) == Pooling(kind="last", normalize=False)
    unsaid = parse_embeddings(b'{"input": "a"}', (), 9)
    assert pooling_of(unsaid, PoolingRule("last", "it says so")) == Pooling(kind="last")


class Tower:
    """Takes flights up while fewer than ``room`` are in the air."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.air: dict[str, Flight] = {}
        self.most = 0

    def submit(self, request: Request, admitted: bool = False, brief: bool = False) -> Flight:
        if len(self.air) >= self.room:
            raise ApiError(429, "full")
        flight = self.air[request.id] = Flight(request, 0.0)
        self.most = max(self.most, len(self.air))
        return flight

    def release(self, flight: Flight, keep: int | None = None) -> None:
        self.air.pop(flight.request.id, None)

    def cancel(self, flight: Flight) -> None:
        self.release(flight)
        flight.fail(ClientGone())

    def land(self) -> None:
        id = next(iter(self.air))
        flight = self.air.pop(id)
        flight.arrived(Chunk(id=id, finish="stop", cached_tokens=0, embedding=bytes(4)))


def inputs_of(tower: Tower, count: int, tokens: int = 1) -> Inputs:
    return Inputs(
        tower,
        [
            Choice(
                index=index,
                request=Request(id=str(index), prompt=(1,) * tokens, params=SamplingParams()),
                answer=EmbeddingAnswer("float"),
                first=True,
            )
            for index in range(count)
        ],
    )


@pytest.mark.parametrize(
    ("room", "tokens", "most"),
    [(1, 1, 1), (5, 1, 5), (1000, 1, AT_ONCE), (1000, 1500, 2), (1000, AT_ONCE_TOKENS + 1, 1)],
)
def test_inputs_set_out_a_few_at_a_time(room: int, tokens: int, most: int) -> None:
    """Never more than `AT_ONCE`, nor of more than `AT_ONCE_TOKENS` unless one alone has them, nor than there
    is room for; all arrive, and nothing is left in the air."""

    async def scenario() -> None:
        tower = Tower(room)
        inputs = inputs_of(tower, 3 * AT_ONCE, tokens)
        inputs.start()
        arrived = []

        async def read() -> None:
            async for choice, delta in inputs.news():
                assert delta.embedding == b"[0]"
                arrived.append(choice.index)

        reading = asyncio.create_task(read())
        while not reading.done():
            await asyncio.sleep(0.001)
            if tower.air:
                tower.land()
        await reading
        assert sorted(arrived) == list(range(3 * AT_ONCE))
        assert tower.most == most and not tower.air
        assert inputs.usage().prompt_tokens == 3 * AT_ONCE * tokens

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["cancel", "error"])
def test_one_end_is_the_end_of_all(how: str) -> None:
    """When the client is gone, or one input fails, the others are taken down and none sets out any more."""

    async def scenario() -> None:
        tower = Tower(4)
        inputs = inputs_of(tower, 200)
        inputs.start()

        async def read() -> None:
            async for _ in inputs.news():
                pass

        reading = asyncio.create_task(read())
        for _ in range(5):
            await asyncio.sleep(0.03)
            tower.land()
        await asyncio.sleep(0.03)
        if how == "cancel":
            inputs.cancel()
        else:
            id = next(iter(tower.air))
            tower.air[id].arrived(Chunk(id=id, finish="error", error="no"))
        with pytest.raises(ClientGone if how == "cancel" else ApiError):
            await reading
        inputs.release()
        await asyncio.sleep(0.1)
        assert not tower.air

    asyncio.run(scenario())


def test_a_client_that_leaves_between_two_inputs() -> None:
    """When nothing is in the air at that moment, nothing sets out afterwards either."""

    async def scenario() -> None:
        tower = Tower(1)
        inputs = inputs_of(tower, 3)
        inputs.start()
        news = inputs.news()
        tower.land()
        assert (await anext(news))[0].index == 0
        tower.room = 0
        await asyncio.sleep(0.01)
        inputs.cancel()
        tower.room = 1
        with pytest.raises(ClientGone):
            await anext(news)
        await news.aclose()
        assert not tower.air

    asyncio.run(scenario())
