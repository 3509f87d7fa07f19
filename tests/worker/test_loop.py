"""The worker's loop over an engine that can be watched."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
from msgspec.structs import replace

from tenfold.protocol import (
    Abort,
    Chunk,
    Chunks,
    EngineSettings,
    Fetch,
    FrontMessage,
    Generate,
    KVSnapshot,
    Pages,
    PagesStored,
    Refused,
    Request,
    Resync,
    SamplingParams,
    Shutdown,
    WorkerMessage,
)
from tenfold.router.names import page_names
from tenfold.worker.framing import Channel, FrameReader, frame
from tenfold.worker.loop import WorkerLoop
from tests.helpers.expected import tokens
from tests.helpers.fake_engine import REFUSED, FakeConfig, FakeEngine


class Front:
    """The other end of a loop that runs in a thread."""

    def __init__(self, config: FakeConfig, routed: bool = False) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(10)
        self.checks = 0
        engine = FakeEngine(EngineSettings(model="", routed=routed), config)
        original = engine.check_integrity

        def check() -> None:
            self.checks += 1
            original()

        engine.check_integrity = check  # type: ignore[method-assign]
        self.aborted = engine.aborted
        self.ended: BaseException | None = None
        self._reader = FrameReader(msgspec.msgpack.Decoder(WorkerMessage))
        self._pending: list[WorkerMessage] = []
        self.thread = threading.Thread(target=self._run, args=(engine, theirs))
        self.thread.start()

    def _run(self, engine: FakeEngine, theirs: socket.socket) -> None:
        with theirs:
            try:
                WorkerLoop(engine, Channel(theirs)).run()
            except EOFError as error:
                self.ended = error

    def say(self, *messages: FrontMessage) -> None:
        self.socket.sendall(b"".join(frame(message) for message in messages))

    def hear(self) -> WorkerMessage:
        while not self._pending:
            self._pending += self._reader.feed(self.socket.recv(1 << 16))
        return self._pending.pop(0)


@pytest.fixture
def front() -> Iterator[Front]:
    front = Front(FakeConfig(delay_s=0.002))
    yield front
    front.socket.close()
    front.thread.join(10)
    assert not front.thread.is_alive()


def request(id: str, count: int, prompt: tuple[int, ...] = (1, 2, 3)) -> Generate:
    params = SamplingParams(seed=7, max_tokens=count, ignore_eos=True)
    return Generate(request=Request(id=id, prompt=prompt, params=params))


def test_steps_travel_together_and_idleness_is_reported_and_checked(front: Front) -> None:
    """Both requests' tokens of a step, and of quick steps, travel in one message, the first and the last at
    once; when all is done the load says so."""
    assert front.hear() == Chunks(load=FakeEngine(EngineSettings(model=""), FakeConfig()).load())
    front.say(request("a", 5), request("b", 5))
    got: dict[str, list[int]] = {"a": [], "b": []}
    sizes: list[int] = []
    while True:
        message = front.hear()
        assert isinstance(message, Chunks)
        if not message.chunks:
            break
        assert [chunk.id for chunk in message.chunks] == ["a", "b"] * (len(message.chunks) // 2)
        sizes.append(len(message.chunks) // 2)
        for chunk in message.chunks:
            got[chunk.id] += chunk.tokens
    assert got["a"] == got["b"] == tokens((1, 2, 3), 7, 5)
    assert sizes[0] == 1 and len(sizes) < 5
    assert message.load is not None
    assert (message.load.running, message.load.waiting, message.load.generated_tokens) == (0, 0, 10)
    assert front.checks == 2


def test_an_idle_worker_says_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again, without a look at the books each time; and it hears what is said meanwhile."""
    monkeypatch.setattr("tenfold.worker.loop.HEARTBEAT_S", 0.02)
    front = Front(FakeConfig())
    try:
        first = front.hear()
        for _ in range(3):
            assert front.hear() == first
        assert front.checks == 1
        front.say(Shutdown())
        front.thread.join(10)
        assert not front.thread.is_alive()
    finally:
        front.socket.close()
        front.thread.join(10)


def test_pages_are_told_with_tokens_and_in_full_when_asked_for() -> None:
    """Events come in the message of the step that made them, before the load that names them; a snapshot has
    the number of the last."""
    front = Front(FakeConfig(), routed=True)
    try:
        front.hear()
        front.say(request("a", 2, tuple(range(1, 40))))
        message = front.hear()
        assert isinstance(message, Chunks) and message.events is not None
        assert message.chunks and message.load is not None
        assert message.load.kv_sequence == message.events.sequence == 1
        names = page_names(range(1, 40), 16)
        assert message.events.events == (PagesStored(names),)
        while not isinstance(message := front.hear(), Chunks) or message.load is None or message.load.running:
            pass
        front.say(Resync())
        while not isinstance(message := front.hear(), Pages):
            pass
        assert message.snapshot == KVSnapshot(sequence=1, names=names)
    finally:
        front.socket.close()
        front.thread.join(10)


def test_a_doubted_request_is_acknowledged_before_it_is_computed(front: Front) -> None:
    """Also one that is refused: a worker that dies of it has said that it was there."""
    front.hear()
    for prompt in ((1, 2), (REFUSED,)):
        front.say(msgspec.structs.replace(request("a", 1, prompt), acknowledge=True))
        assert front.hear() == Chunks(chunks=(Chunk(id="a"),))
        answer = front.hear()
        assert isinstance(answer, Refused) or (isinstance(answer, Chunks) and answer.chunks[0].tokens)
        if isinstance(answer, Chunks):
            front.hear()


def test_a_refused_request_is_answered_and_harms_nobody(front: Front) -> None:
    """An engine's RequestError becomes Refused with its reason and field; others go on."""
    front.hear()
    front.say(request("bad", 3, (REFUSED,)), request("good", 3))
    error = f"prompt has the token {REFUSED}, which this engine refuses"
    assert front.hear() == Refused(id="bad", error=error, field="prompt")
    message = front.hear()
    assert isinstance(message, Chunks)
    assert [chunk.id for chunk in message.chunks] == ["good"]


def test_a_request_too_large_for_this_worker_says_so() -> None:
    """Promise: the front learns that a larger worker may take it."""
    front = Front(FakeConfig(kv_pages=2))
    try:
        front.say(request("long", 3, tuple(range(1, 40))))
        while not isinstance(message := front.hear(), Refused):
            pass
        assert (message.id, message.field, message.beyond_memory) == ("long", "prompt", True)
    finally:
        front.socket.close()
        front.thread.join(10)


def test_an_aborted_request_yields_nothing_more(front: Front) -> None:
    """After Abort the engine is idle again, long before the request's own end; an unknown id does no harm."""
    front.hear()
    front.say(request("a", 500))
    front.hear()
    front.say(Abort(id="a", keep=7), Abort(id="never seen"))
    for _ in range(100):
        message = front.hear()
        assert isinstance(message, Chunks)
        if message.load is not None and not message.load.running:
            assert front.aborted == [("a", 7), ("never seen", None)]
            return
    raise AssertionError("the request runs on")


def test_load_snapshots_do_not_come_with_every_step(front: Front) -> None:
    """At most one every 100 ms while the engine works."""
    front.hear()
    front.say(request("a", 100))
    messages: list[Chunks] = []
    while not messages or all(chunk.finish is None for chunk in messages[-1].chunks):
        message = front.hear()
        assert isinstance(message, Chunks)
        messages.append(message)
    # 100 steps of 2 ms and more: a slow machine makes more snapshots, but never one a step.
    assert 1 <= sum(message.load is not None for message in messages) < 50
    assert sum(len(message.chunks) for message in messages) == 100


@pytest.mark.parametrize("busy", [False, True])
def test_the_loop_ends_with_its_front(front: Front, busy: bool) -> None:
    """A worker does not outlive the front, idle or in the middle of a request."""
    front.hear()
    if busy:
        front.say(request("a", 10**6))
        front.hear()
    front.socket.close()
    front.thread.join(10)
    assert isinstance(front.ended, EOFError)


def test_shutdown_ends_the_loop(front: Front) -> None:
    """Also in the middle of a request."""
    front.hear()
    front.say(request("a", 10**6), Shutdown())
    front.thread.join(10)
    assert not front.thread.is_alive()
    assert front.ended is None


def test_a_front_that_goes_takes_what_it_told_of_along() -> None:
    """Promise: a request that was told of with a `Fetch` may be under way before it is sent: when the front
    is gone it is given up too; one that was sent and has ended is not."""
    ours, theirs = socket.socketpair()
    engine = FakeEngine(EngineSettings(model=""), FakeConfig())
    ended = Request(id="ended", prompt=(1, 2), params=SamplingParams(seed=1, max_tokens=1))
    with ours:
        for message in (Generate(request=ended), Fetch(request=replace(ended, id="fetched", handoff={}))):
            ours.sendall(frame(message))
        ours.shutdown(socket.SHUT_WR)
        loop = WorkerLoop(engine, Channel(theirs))
        with theirs, pytest.raises(EOFError):
            loop.run()
    loop.abandon()
    assert engine.aborted == [("fetched", None)]
