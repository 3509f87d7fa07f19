"""An engine without a model: the engine's API, tokens from a hash, time from a clock, faults on demand."""

from __future__ import annotations

import hashlib
import os
import signal
import struct
import time
import zlib
from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec

from tenfold.config import PAGE_ROWS
from tenfold.engine.scheduler import FULL
from tenfold.kv.news import PageNews
from tenfold.limits import RequestError, check_prompt
from tenfold.protocol import (
    Chunk,
    EngineSettings,
    Fetch,
    KVEvents,
    KVSnapshot,
    LoadSnapshot,
    Pooling,
    Request,
    StepTime,
    TokenLogprob,
)

VOCAB = 512
EOS = 0
POISON = 511
"""A prompt with this token kills the process at its first step."""
REFUSED = 510
"""A prompt with this token is refused by `FakeEngine.add`."""
HANG = 509
"""A prompt with this token makes its first step last for ten seconds."""


STATE_WIDTH = 8
"""Of embeddings."""


class FakeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Given as JSON in the place of the model's path."""

    delay_s: float = 0.0
    """Time of a step."""
    load_s: float = 0.0
    max_context: int = 512
    kv_pages: int = 4096
    only_once: str = ""
    """Not empty: a file; the engine makes it, and cannot be built when it is there."""
    scripts: dict[str, str] = {}
    """What is answered, in printable ASCII and one character a token, to a prompt with ``@name@`` in it."""
    prompt_token_s: float = 0.0
    """Time of each prompt token that is not cached, in the step that takes its request up."""
    lose_events: int = 0
    """The batch of `KVEvents` with this number never leaves the engine."""
    faults: bool = True
    """Whether `POISON` and `HANG` do what they say: not where prompts are made at random."""
    step_cpu_s: float = 0.0
    """CPU time that a step takes, without a word."""
    fail: str = ""
    """Not empty: the engine cannot be built, for this reason."""


def token_at(prompt: tuple[int, ...], seed: int, position: int) -> int:
    """The token at ``position`` (counted with the prompt): a printable one, never end of sequence."""
    key = f"{prompt}/{seed}/{position}".encode()
    return 1 + zlib.crc32(key) % 300


def embedding_of(prompt: tuple[int, ...], pooling: Pooling) -> bytes:
    """`STATE_WIDTH` numbers, of both signs and of no short decimals."""
    keys = (f"{prompt}/{pooling.kind}/{pooling.normalize}/{i}".encode() for i in range(STATE_WIDTH))
    return struct.pack(f"<{STATE_WIDTH}f", *(zlib.crc32(key) / 2**32 - 0.5 for key in keys))


class FakeEngine:
    """Draws `token_at` for every running request in every step."""

    def __init__(self, settings: EngineSettings, config: FakeConfig) -> None:
        self._config = config
        self._max_running = settings.max_running
        self._waiting: deque[Request] = deque()
        self._running: dict[str, tuple[Request, list[int]]] = {}
        self._started: set[str] = set()
        self.aborted: list[tuple[str, int | None]] = []
        self.closed = False
        self._steps = 0
        self._prompt = self._cached = self._generated = 0
        self._routed = settings.routed
        self._news = PageNews()
        self._pages: dict[tuple[int | str, tuple[int, ...]], int] = {}
        """Only where it is routed: the page that holds these tokens after that page."""
        self._times: list[StepTime] = []

    def add(self, request: Request) -> None:
        if REFUSED in request.prompt:
            raise RequestError("prompt", f"has the token {REFUSED}, which this engine refuses")
        check_prompt(
            request.prompt,
            len(request.output),
            VOCAB,
            self._config.max_context,
            self._config.kv_pages * PAGE_ROWS,
            generates=request.pooling is None,
        )
        self._prompt += len(request.prompt)
        self._waiting.append(request)

    def abort(self, id: str, keep: int | None = None) -> bool:
        self.aborted.append((id, keep))
        self._started.discard(id)
        if self._running.pop(id, None) is not None:
            return True
        before = len(self._waiting)
        self._waiting = deque(request for request in self._waiting if request.id != id)
        return len(self._waiting) < before

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> list[Chunk]:
        began, new = time.monotonic(), 0
        while self._waiting and len(self._running) < self._max_running:
            request = self._waiting.popleft()
            self._running[request.id] = (request, list(request.output))
            if self._config.faults and POISON in request.prompt:
                os.kill(os.getpid(), signal.SIGKILL)
            if self._config.faults and HANG in request.prompt:
                time.sleep(10)
            if self._routed:
                rows = len(request.prompt) + len(request.output) - self._store(request)
                time.sleep(self._config.prompt_token_s * rows)
                new += rows
        if self._config.delay_s:
            time.sleep(self._config.delay_s)
        if self._config.step_cpu_s:
            _compute(self._config.step_cpu_s)
        self._steps += 1
        chunks = [self._advance(request, output) for request, output in list(self._running.values())]
        self._generated += sum(len(chunk.tokens) for chunk in chunks)
        if self._routed and chunks:
            seconds = time.monotonic() - began
            decoded = 0 if new else len(chunks)
            self._times.append(StepTime(new, decoded, 100 * decoded, decoded, seconds))
        return chunks

    def _advance(self, request: Request, output: list[int]) -> Chunk:
        params = request.params
        if request.pooling is not None:
            return self._embed(request, request.pooling)
        assert params.seed is not None, "the front draws a seed"
        cached = None
        if request.id not in self._started:
            self._started.add(request.id)
            cached = len(request.prompt) // 16 * 16
            self._cached += cached
        position = len(request.prompt) + len(output)
        if position > self._config.kv_pages * PAGE_ROWS:
            del self._running[request.id]
            self._started.discard(request.id)
            return Chunk(id=request.id, finish="error", error=FULL, beyond_memory=True)
        token = token_at(request.prompt, params.seed, position)
        script = self._script(request.prompt)
        if script is not None:
            token = ord(script[len(output)]) - 31 if len(output) < len(script) else EOS
        # The end of sequence comes where a hash says so, unless it is to be ignored.
        elif not params.ignore_eos and request.eos_token_ids and position % 97 == 96:
            token = request.eos_token_ids[0]
        output.append(token)
        finish: Any = None
        stop_token = None
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_token_ids))
        if token in ends:
            finish, stop_token = "stop", token
        elif len(output) == params.max_tokens or position + 1 >= self._config.max_context:
            finish = "length"
        if finish is not None:
            del self._running[request.id]
            self._started.discard(request.id)
        logprobs = None
        if params.logprobs is not None:
            top = tuple((token + i, -0.5 - i) for i in range(params.logprobs))
            logprobs = (TokenLogprob(-0.5, top),)
        return Chunk(
            id=request.id,
            tokens=(token,),
            logprobs=logprobs,
            finish=finish,
            stop_token=stop_token,
            cached_tokens=cached,
            queue_ms=None if cached is None else 1.5,
        )

    def _embed(self, request: Request, pooling: Pooling) -> Chunk:
        cached = 0 if pooling.kind == "mean" else len(request.prompt) // 16 * 16
        self._cached += cached
        del self._running[request.id]
        return Chunk(
            id=request.id,
            finish="stop",
            cached_tokens=cached,
            queue_ms=1.5,
            embedding=embedding_of(request.prompt, pooling),
        )

    def _script(self, prompt: tuple[int, ...]) -> str | None:
        text = "".join(chr(31 + token) for token in prompt if 0 < token < 96) if self._config.scripts else ""
        return next((said for name, said in self._config.scripts.items() if f"@{name}@" in text), None)

    def _store(self, request: Request) -> int:
        """Puts the prompt's pages into the cache; returns how many tokens of it were there."""
        tokens = (*request.prompt, *request.output)
        before: int | str = request.namespace
        found = 0
        for at in range(0, len(tokens) - 15, 16):
            key = before, tokens[at : at + 16]
            if key in self._pages:
                found = at + 16
            else:
                self._pages[key] = len(self._pages)
                self._news.stored(self._pages[key], key[1], before)
            before = self._pages[key]
        return found

    def fetch(self, fetch: Fetch) -> None:
        """Pages of a fake are as quickly computed."""

    def kv_events(self) -> KVEvents | None:
        batch = self._news.take()
        if batch is not None and batch.sequence == self._config.lose_events:
            return None
        return batch

    def kv_snapshot(self) -> KVSnapshot:
        return self._news.snapshot()

    def step_times(self) -> tuple[StepTime, ...]:
        times, self._times = tuple(self._times), []
        return times

    def load(self) -> LoadSnapshot:
        return LoadSnapshot(
            running=len(self._running),
            waiting=len(self._waiting),
            pages_total=self._config.kv_pages,
            pages_free=self._config.kv_pages - len(self._running),
            steps=self._steps,
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            generated_tokens=self._generated,
            preemptions=0,
            kv_sequence=self._news.sequence,
        )

    def check_integrity(self) -> None:
        assert not self._running
        assert not self._started

    def close(self) -> None:
        self.closed = True


def _compute(cpu_s: float) -> None:
    """As the core does: without Python's lock (hashing more than a little lets go of it)."""
    ends = time.thread_time() + cpu_s
    block = bytes(1 << 20)
    while time.thread_time() < ends:
        hashlib.sha256(block)


def build_fake_engine(settings: EngineSettings) -> tuple[FakeEngine, Any]:
    """The worker's builder; ``settings.model`` is a `FakeConfig` in JSON."""
    config = msgspec.json.decode(settings.model, type=FakeConfig)
    time.sleep(config.load_s)
    if config.only_once:
        with open(config.only_once, "x"):
            pass
    if config.fail:
        raise ValueError(config.fail)
    info = SimpleNamespace(
        backend="fake",
        threads=settings.threads or 1,
        threads_why="a fake needs no more",
        isa="none",
        isa_why="there is nothing to compute",
        vocab_size=VOCAB,
        max_context=config.max_context,
        kv_pages=config.kv_pages,
        kv_format="bf16",
        page_bytes=1024,
        weight_bytes=1000,
        state_width=STATE_WIDTH,
        weights=(SimpleNamespace(format="q4", bytes=1000, lossless=True),),
    )
    return FakeEngine(settings, config), info
