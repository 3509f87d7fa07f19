"""KV events as other routers read them: over ZeroMQ, decoded by structs declared as vLLM declares its own."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from tenfold.kv.cache import KVCache
from tenfold.kv.wire_news import WireEvent, WireNews
from tenfold.protocol import EngineSettings, Request, SamplingParams
from tenfold.router.names import page_names
from tenfold.worker import kv_events
from tenfold.worker.build import build_engine
from tenfold.worker.kv_events import KVEventPublisher, address_of_rank
from tests.helpers.fake_program import FakeProgram
from tests.helpers.model_files import random_weights, tiny_config, write_gguf_model
from tests.kv.test_news import prompts, serve


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """As in vLLM: this and what follows."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True): ...


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent): ...


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


DECODER = msgspec.msgpack.Decoder(KVEventBatch)


class Reader:
    """A router of somebody else's: which blocks there are, by hash, with their tokens up to there."""

    def __init__(self) -> None:
        self.blocks: dict[Any, tuple[int, ...]] = {}
        self.salts: dict[Any, Any] = {}

    def apply(self, batch: KVEventBatch) -> None:
        """Stricter than routers are: a parent must be known, and nothing is told twice."""
        for event in batch.events:
            if isinstance(event, BlockStored):
                size = event.block_size
                assert len(event.token_ids) == size * len(event.block_hashes)
                assert (event.lora_id, event.medium, event.lora_name) == (None, "GPU", None)
                before = () if event.parent_block_hash is None else self.blocks[event.parent_block_hash]
                keys = event.extra_keys or [None] * len(event.block_hashes)
                for n, (name, key) in enumerate(zip(event.block_hashes, keys, strict=True)):
                    assert name not in self.blocks
                    before = (*before, *event.token_ids[n * size : (n + 1) * size])
                    self.blocks[name] = before
                    if key is not None:
                        self.salts[name] = key
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del self.blocks[name]
            else:
                self.blocks.clear()


class Kept:
    """Encodes batches as the publisher does, and keeps them."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []

    def publish(self, events: list[WireEvent]) -> None:
        from tenfold.kv.wire_news import KVEventBatch as Batch

        self.batches.append(msgspec.msgpack.encode(Batch(1.5, events, 3)))

    def close(self) -> None: ...


@given(st.lists(st.tuples(prompts, st.sampled_from(["", "a"]), st.booleans()), max_size=20))
def test_a_reader_knows_what_is_there(served: list[tuple[list[int], str, bool]]) -> None:
    """Promise: whoever decodes all batches with vLLM's structs has exactly the blocks of the cache under the
    names that routers compute, with their tokens, whatever was stored, shared and evicted; what is told over
    the worker's own link is the same as without."""
    kept = Kept()
    news = WireNews(kept)
    cache = KVCache(FakeProgram(kv_pages=6), news=news)
    reader = Reader()
    for tokens, namespace, take in served:
        assert serve(cache, tokens, namespace)
        if not take:
            continue
        news.take()
        for batch in kept.batches:
            decoded = DECODER.decode(batch)
            assert (decoded.ts, decoded.data_parallel_rank) == (1.5, 3)
            reader.apply(decoded)
        kept.batches.clear()
        assert set(reader.blocks) == set(news.snapshot().names)
        names = page_names(tokens, 16, namespace)
        assert [reader.blocks[name] for name in names] == [
            tuple(tokens[: 16 * n]) for n in range(1, len(names) + 1)
        ]
        if namespace:
            assert reader.salts[names[0]] == (namespace,) and names[0] not in names[1:]


@contextmanager
def publishing(rank: int = 0) -> Iterator[tuple[KVEventPublisher, str, str]]:
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as sock:
            ports.append(sock.getsockname()[1] - rank)
    events, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    with closing(KVEventPublisher(events, replay, rank)) as publisher:
        yield publisher, address_of_rank(events, rank), address_of_rank(replay, rank)


@contextmanager
def connected(kind: int, address: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as sock:
        sock.setsockopt(zmq.RCVTIMEO, 20_000)
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(address)
        yield sock


def replayed(address: str, first: int) -> list[tuple[int, KVEventBatch]]:
    """What the replay socket has from a number on."""
    found: list[tuple[int, KVEventBatch]] = []
    with connected(zmq.DEALER, address) as sock:
        sock.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            empty, number, batch = sock.recv_multipart()
            assert empty == b""
            if not batch:
                assert number == b"\xff" * 8
                return found
            found.append((int.from_bytes(number, "big"), DECODER.decode(batch)))


def test_batches_are_numbered_and_a_gap_can_be_replayed() -> None:
    """Promise: the frames are vLLM's (an empty topic, eight bytes of number, the batch); who came late, or
    lost some, asks the replay socket from the number that it misses and gets all of them, in order, and the
    end."""
    with publishing(rank=2) as (publisher, events, replay), connected(zmq.SUB, events) as sock:
        sock.subscribe(b"")
        news = WireNews(publisher)
        cache = KVCache(FakeProgram(kv_pages=64), news=news)
        prompts = [[n] * 16 + list(range(32)) for n in range(6)]
        serve(cache, prompts[0], "")
        news.take()
        # Until the subscription has arrived, what is published is lost for this subscriber.
        while not sock.poll(50):
            publisher.publish([])
        topic, number, payload = sock.recv_multipart()
        assert topic == b"" and len(number) == 8 and DECODER.decode(payload).data_parallel_rank == 2
        heard = int.from_bytes(number, "big")
        for prompt in prompts[1:]:
            serve(cache, prompt, "")
            news.take()
        live: list[tuple[int, KVEventBatch]] = []
        while len(live) < 5:
            _, number, payload = sock.recv_multipart()
            if DECODER.decode(payload).events:
                live.append((int.from_bytes(number, "big"), DECODER.decode(payload)))
        missed = [item for item in replayed(replay, 0) if item[0] < live[0][0]]
        assert [number for number, _ in missed] == list(range(live[0][0]))
        assert heard < live[0][0]
        assert isinstance(missed[0][1].events[0], AllBlocksCleared)
        assert replayed(replay, live[2][0]) == live[2:]
        assert replayed(replay, 10_000) == []
        reader = Reader()
        for _, batch in [*missed, *live]:
            reader.apply(batch)
        assert set(reader.blocks) == {name for prompt in prompts for name in page_names(prompt, 16)}


def test_all_that_is_kept_can_be_replayed_at_once() -> None:
    """Promise: of thousands of batches, more than ZeroMQ queues by itself, none is left out, also for who
    asks twice before he reads."""
    count = 9000
    with publishing() as (publisher, _, replay):
        for _ in range(count):
            publisher.publish([])
        # Another thread takes them in: who asks at once gets those that are there, and the end.
        while len(heard := [number for number, _ in replayed(replay, 0)]) < count:
            assert heard == list(range(len(heard)))
        assert heard == list(range(count))
        with connected(zmq.DEALER, replay) as sock:
            for _ in range(2):
                sock.send_multipart((b"", (0).to_bytes(8, "big")))
            heard = [
                int.from_bytes(sock.recv_multipart()[1], "big", signed=True) for _ in range(2 * (count + 1))
            ]
        assert heard == 2 * [*range(count), -1]


def test_what_does_not_fit_is_never_left_out_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: who does not read what he asked for gets the beginning, without a gap, and the end only behind
    all of it."""
    monkeypatch.setattr(kv_events, "MOST_UNREAD", 5)
    with publishing() as (publisher, _, replay):
        for _ in range(3000):
            publisher.publish([])
        with connected(zmq.DEALER, replay) as sock:
            sock.send_multipart((b"", (0).to_bytes(8, "big")))
            heard = []
            while sock.poll(1000):
                heard.append(int.from_bytes(sock.recv_multipart()[1], "big", signed=True))
        assert heard == list(range(len(heard))) or heard == [*range(3000), -1]


def test_what_is_no_request_for_events_does_no_harm() -> None:
    """Promise: after nonsense on the replay socket, the next request is answered."""
    with publishing() as (publisher, _, replay):
        WireNews(publisher).take()
        with connected(zmq.DEALER, replay) as sock:
            for nonsense in ((b"",), (b"", b"7"), (b"", b"", b"", b"")):
                sock.send_multipart(nonsense)
        assert [number for number, _ in replayed(replay, 0)] == [0]


def test_an_address_in_use_is_said_with_its_option() -> None:
    """Promise: the error names option and address; the next rank's address is another."""
    error = pytest.raises(OSError, match=r"--kv-events\): cannot use tcp://127.0.0.1:\d+: Address")
    with publishing() as (_, events, _), error:
        KVEventPublisher(events, None)
    assert address_of_rank("tcp://[::1]:5557", 3) == "tcp://[::1]:5560"


def test_an_engine_tells_what_it_computes(tmp_path: Path) -> None:
    """Promise: `--kv-events` reaches the engine of a real model, without a router of our own too: a prompt's
    pages are told under the names that the front gives them."""
    path = tmp_path / "model.gguf"
    write_gguf_model(path, config := tiny_config("llama"), random_weights(config))
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        events, replay = (f"tcp://127.0.0.1:{sock.getsockname()[1]}" for sock in (one, two))
    engine, _ = build_engine(
        EngineSettings(
            model=str(path), threads=1, kv_memory_bytes=1 << 20, kv_events=events, kv_events_replay=replay
        )
    )
    prompt = tuple(range(3, 43))
    engine.add(Request(id="a", prompt=prompt, params=SamplingParams(seed=1, max_tokens=1)))
    while engine.has_work:
        engine.step()
    engine.kv_events()
    reader = Reader()
    for _, batch in replayed(replay, 0):
        reader.apply(batch)
    assert set(reader.blocks) == set(page_names(prompt, 16))
    engine.close()
    with socket.create_server(("127.0.0.1", int(events.rpartition(":")[2]))):
        pass  # The address is free again.
