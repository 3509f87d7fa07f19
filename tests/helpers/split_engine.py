"""Real engines that hand pages to each other in real processes, over a program whose tokens depend on every
row that it reads, and with faults on demand."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tenfold.backends.base import StepBatch, StepOutput
from tenfold.engine.engine import Engine
from tenfold.engine.limits import EngineConfig
from tenfold.kv import region as region_module
from tenfold.kv.imports import Transfer
from tenfold.kv.region import Region
from tenfold.protocol import Chunk, EngineSettings, Request
from tests.helpers.fake_program import FakeProgram
from tests.helpers.fake_text import FakeTokenizer, piece_of

BUILDER = "tests.helpers.split_engine:build_split_engine"
WEIGHT_BYTES = 30_000_000
"""Of a model whose prompt tokens are guessed to take a millisecond each, as those of `SlowProgram` do."""


class SplitFake(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Given as JSON in the place of the model's path. Faults with a ``marker`` happen once."""

    row_s: float = 0.001
    marker: str = ""
    """A file that is made when the fault has happened."""
    die_at_page: int = 0
    """A prefill worker kills itself when so many pages of a region are ready."""
    die_after_handover: bool = False
    """A decode worker kills itself when it is told to go on with a request."""
    corrupt_page: int | None = None
    """This page of each region is spoilt after its checksum was made."""
    lose_handoffs: bool = False
    """What prefill workers say of their pages never arrives."""
    no_room: bool = False
    """Nothing is exported."""
    kv_pages: int = 512


class SlowProgram(FakeProgram):
    """Takes its time for each row, asleep: real processes, few cores."""

    def __init__(self, fake: SplitFake) -> None:
        super().__init__(kv_pages=fake.kv_pages, vocab_size=128, max_context=1024, max_rows=128)
        self._row_s = fake.row_s
        self.info = msgspec.structs.replace(self.info, weight_bytes=WEIGHT_BYTES)

    def step(self, batch: StepBatch) -> StepOutput:
        """Runs one step."""
        time.sleep(self._row_s * len(batch.tokens))
        return super().step(batch)


class FaultyEngine(Engine):
    """An engine whose handovers go wrong."""

    fake: SplitFake
    role: str

    def add(self, request: Request) -> None:
        """As Engine's."""
        if self.fake.die_after_handover and self.role == "decode" and request.handoff is not None:
            _die_once(self.fake)
        super().add(request)

    def step(self) -> list[Chunk]:
        """As Engine's."""
        chunks = super().step()
        if self.fake.lose_handoffs:
            chunks = [msgspec.structs.replace(chunk, handoff=None) for chunk in chunks]
        return chunks


def _die_once(fake: SplitFake) -> None:
    if not Path(fake.marker).exists():
        Path(fake.marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def _spoil_regions(fake: SplitFake) -> None:
    """This process's regions have the fault that was asked for."""
    add, write_all = Region.add, vars(region_module)["write_all"]
    spoil: list[int] = []

    def written(file: int, pages: Sequence[memoryview], at: int) -> None:
        write_all(file, pages, at)
        while spoil:
            os.pwrite(file, b"spoilt", spoil.pop())

    def spoilt(region: Region, pages: Sequence[memoryview]) -> None:
        at = fake.corrupt_page
        if at is not None and region.ready <= at < region.ready + len(pages):
            spoil.append(region.at + region.contents.page_at(at))
        add(region, pages)
        if fake.die_at_page and region.ready >= fake.die_at_page:
            time.sleep(0.05)  # what is ready is being read
            _die_once(fake)

    vars(region_module)["write_all"] = written
    type.__setattr__(Region, "add", spoilt)


def build_split_engine(settings: EngineSettings) -> tuple[Engine, Any]:
    """The worker's builder; ``settings.model`` is a `SplitFake` in JSON."""
    fake = msgspec.json.decode(settings.model, type=SplitFake)
    program = SlowProgram(fake)
    _spoil_regions(fake)
    info = program.info
    room = 0 if fake.no_room else fake.kv_pages * info.page_bytes + (1 << 20)
    transfer = Transfer.on_this_machine("same", info.page_bytes, room) if settings.transfer else None
    engine = FaultyEngine(
        program, EngineConfig(max_batch_tokens=64), transfer=transfer, routed=settings.routed
    )
    engine.fake, engine.role = fake, settings.role
    return engine, info


def text_alone(request: Request) -> str:
    """The text of a request that one engine computes, alone."""
    engine = Engine(SlowProgram(SplitFake(row_s=0.0)), EngineConfig(max_batch_tokens=64))
    engine.add(request)
    tokens: list[int] = []
    while engine.has_work:
        for chunk in engine.step():
            tokens += chunk.tokens
    engine.close()
    return "".join(map(piece_of, tokens))


def ids_of(prompt: str) -> tuple[int, ...]:
    """Tokens of a prompt in these servers."""
    return tuple(FakeTokenizer().encode(prompt, add_special_tokens=True, parse_special=True))


def letters(seed: int, count: int) -> str:
    """A prompt of so many tokens."""
    draw = np.random.default_rng(seed).integers(97, 122, count)
    return bytes(draw.astype(np.uint8)).decode()
