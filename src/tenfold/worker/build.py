"""From settings to an engine: the only place where the worker meets checkpoints, models and backends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from tenfold.backends.base import CompileOptions, Program, ProgramInfo
from tenfold.backends.cores import choose_threads
from tenfold.backends.native import NativeBackend, resolve_kv_format
from tenfold.checkpoint.base import Checkpoint
from tenfold.checkpoint.fingerprint import fingerprint
from tenfold.checkpoint.locate import locate
from tenfold.checkpoint.open import open_checkpoint
from tenfold.checkpoint.tokenizer import load_tokenizer
from tenfold.config import PAGE_ROWS, available_memory, check_kv_memory, format_bytes, plan_kv, total_memory
from tenfold.constraints.compiler import Compiler
from tenfold.engine.engine import Engine
from tenfold.engine.limits import EngineConfig
from tenfold.graph.graph import Graph
from tenfold.kv.choice import transfer_between_machines
from tenfold.kv.disk import DiskTier, default_disk_bytes, least_disk_bytes
from tenfold.kv.identity import page_identity
from tenfold.kv.imports import Transfer
from tenfold.kv.news import PageNews
from tenfold.kv.wire_news import WireNews
from tenfold.models.registry import build_graph
from tenfold.protocol import EngineSettings
from tenfold.speculate.base import Speculator
from tenfold.speculate.build import SpeculationSettings, build_speculator, drafter_taps
from tenfold.worker.kv_events import KVEventPublisher
from tenfold.worker.secret import load_secret

MIN_LOGIT_ROWS = 128
"""Rows with logits that a step may have, at least: room for drafts beside the sequences that run. Each takes
four bytes for every token of the vocabulary."""

EXPORT_SHARE = 4
"""Pages that wait for their importers may take this part of the KV memory once more, or a full context."""


class Target(NamedTuple):
    """A model that was compiled, and what was made for it while its checkpoint was open."""

    engine: Engine
    program: Program
    graph: Graph
    taps: tuple[str, ...]
    speculator: Speculator | None


def kv_page_bytes(graph: Graph, kv_format: str, kv_bias: bool = False) -> int:
    """Bytes of a page in ``bf16``, ``f32`` or ``q8`` (a scale per row and head): K and V of all layers, and a
    bias per row and KV head if asked for."""
    element, extra = {"bf16": (2, 0), "f32": (4, 0), "q8": (1, 4)}[kv_format]
    bias = 4 if kv_bias else 0
    return sum(kv.heads * (2 * (kv.head_dim * element + extra) + bias) for kv in graph.kv) * PAGE_ROWS


def build_engine(settings: EngineSettings) -> tuple[Engine, ProgramInfo]:
    """Opens the model, compiles it for this machine and makes an engine of it.

    The checkpoint is closed again; the engine owns the program. Raises ValueError (as CheckpointError
    is) for a model or settings that cannot be served, FileNotFoundError for a model that is not there.
    """
    if settings.learn:
        from tenfold.live.build import build_learning

        path, drafter = locate(settings.model), Path(settings.drafter or "")
        target = build_target(
            settings,
            drafter_taps,
            lambda program, graph, checkpoint: build_learning(program, graph, checkpoint, path, drafter),
        )
    elif settings.speculate:
        speculation = SpeculationSettings(
            drafter=None if settings.drafter is None else Path(settings.drafter)
        )
        target = build_target(
            settings,
            speculation.taps,
            lambda program, graph, checkpoint: build_speculator(program, graph, checkpoint, speculation),
        )
    else:
        target = build_target(settings)
    info = target.program.info
    return target.engine, msgspec.structs.replace(info, threads_why=own_threads(settings)[1])


def own_threads(settings: EngineSettings) -> tuple[int, str]:
    """Threads of this worker, and why so many: as asked for, else its share of the cores.

    Models do not share cores out among themselves: a model that is alone at work is to have them all, and a
    team goes on with fewer threads while others keep the cores busy (``native/team.h``).
    """
    threads, why = choose_threads(settings.threads)
    if not settings.threads and settings.models > 1:
        why = f"{why}; each model has them all"
    if settings.threads or settings.workers == 1:
        return threads, why
    return max(1, threads // settings.workers), f"{threads} ({why}), divided among {settings.workers} workers"


def build_target(
    settings: EngineSettings,
    taps: Callable[[Graph, Checkpoint], tuple[str, ...]] = lambda *model: (),
    speculator: Callable[[Program, Graph, Checkpoint], Speculator | None] = lambda *model: None,
) -> Target:
    """`build_engine` with a speculator: ``taps`` says what its program shall hand back, ``speculator`` makes
    it. Raises also what those raise."""
    path = locate(settings.model)
    checkpoint = open_checkpoint(path)
    try:
        graph = build_graph(checkpoint.config)
        check_kv_memory(settings.kv_memory_bytes, total_memory())
        asked = settings.kv_memory_bytes
        pages = plan_kv(
            None if asked is None else asked // settings.workers,
            available_memory() // settings.workers // settings.models,
            kv_page_bytes(graph, resolve_kv_format(settings.kv_format, settings.format)),
            graph.max_context,
            settings.max_running,
        )
        tapped = taps(graph, checkpoint)
        program = NativeBackend().compile(
            graph,
            checkpoint,
            CompileOptions(
                threads=own_threads(settings)[0],
                isa=settings.isa,  # type: ignore[arg-type]  # the backend names what it does not know
                format=settings.format,  # type: ignore[arg-type]
                kv_format=settings.kv_format,  # type: ignore[arg-type]
                max_rows=settings.max_batch_tokens,
                max_logit_rows=max(settings.max_running, MIN_LOGIT_ROWS),
                kv_pages=pages,
                taps=tapped,
            ),
        )
        made = speculator(program, graph, checkpoint)
        matchers = Compiler(lambda: load_tokenizer(path), program.info.vocab_size)
    finally:
        checkpoint.close()
    config = EngineConfig(max_batch_tokens=settings.max_batch_tokens, max_running=settings.max_running)
    disk = transfer = None
    if settings.kv_disk is not None or settings.transfer:
        info = program.info
        identity = page_identity(fingerprint(path), info)
        if settings.kv_disk is not None:
            disk = open_tier(settings, info, identity)
        if settings.transfer:
            pages = max(info.kv_pages // EXPORT_SHARE, info.max_context // PAGE_ROWS + 2)
            most_bytes = pages * info.page_bytes
            transfer = open_transfer(settings, identity, info.page_bytes, most_bytes)
    news: PageNews | None = None
    if settings.kv_events is not None:
        news = WireNews(KVEventPublisher(settings.kv_events, settings.kv_events_replay, settings.rank))
    elif settings.page_tokens:
        news = PageNews(tokens=True)
    engine = Engine(
        program, config, made, matchers, disk=disk, transfer=transfer, routed=settings.routed, news=news
    )
    return Target(engine, program, graph, tapped, made)


def open_transfer(settings: EngineSettings, identity: str, page_bytes: int, most_bytes: int) -> Transfer:
    """How pages go to other workers and come from them. Raises ValueError, OSError."""
    host = settings.transfer_address
    if host is None:
        return Transfer.on_this_machine(identity, page_bytes, most_bytes)
    secret = load_secret(settings.transfer_secret or "")
    return transfer_between_machines(settings.kv_transport, identity, page_bytes, most_bytes, secret, host)


def open_tier(settings: EngineSettings, info: ProgramInfo, identity: str) -> DiskTier:
    """The disk tier of a program. Raises ValueError for a size that is too small, or a disk that is full."""
    assert settings.kv_disk is not None
    root = Path(settings.kv_disk)
    size = settings.kv_disk_bytes
    if size is None:
        size = default_disk_bytes(root)
    least = least_disk_bytes(info.page_bytes, info.max_context)
    if size < least:
        needs = f"the least that is of use for this model is {format_bytes(least)}"
        if settings.kv_disk_bytes is None:
            raise ValueError(
                f"kv_disk (--kv-disk): there is too little room in {root}: a quarter of what is free there "
                f"is {format_bytes(size)}, and {needs}; free some, or say how much with --kv-disk-size"
            )
        raise ValueError(f"kv_disk_bytes (--kv-disk-size) is {format_bytes(size)}; {needs}")
    return DiskTier(root, identity, info.page_bytes, size)
