"""The entry of a worker process: build the engine, say Ready, run the loop."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from tenfold.log_format import log_to_stderr
from tenfold.protocol import EnginePlan, EngineSettings, Failed, Ready, Start
from tenfold.worker.framing import Channel
from tenfold.worker.loop import ServedEngine, WorkerLoop

Builder = Callable[[EngineSettings], "tuple[ServedEngine, Any]"]
"""Builds an engine and its ProgramInfo. Raises ValueError or OSError for what the user can mend."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Asks Linux to kill this process when the thread that spawned it ends, even in the middle of a step.

    Elsewhere the end of the socket must do: the loop notices it at the next step.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before we asked
            os._exit(1)


def plan_of(settings: EngineSettings, info: Any, load_ms: float, kv_disk_bytes: int = 0) -> EnginePlan:
    """What the front shall know of a compiled program (a `backends.base.ProgramInfo`)."""
    format_bytes: dict[str, int] = {}
    for weight in info.weights:
        format_bytes[weight.format] = format_bytes.get(weight.format, 0) + weight.bytes
    return EnginePlan(
        backend=info.backend,
        threads=info.threads,
        threads_why=info.threads_why,
        isa=info.isa,
        isa_why=info.isa_why,
        vocab_size=info.vocab_size,
        max_context=info.max_context,
        kv_pages=info.kv_pages,
        kv_format=info.kv_format,
        page_bytes=info.page_bytes,
        weight_bytes=info.weight_bytes,
        format_bytes=format_bytes,
        lossy_weights=sum(not weight.lossless for weight in info.weights),
        weights=len(info.weights),
        max_batch_tokens=settings.max_batch_tokens,
        max_running=settings.max_running,
        load_ms=load_ms,
        kv_disk_bytes=kv_disk_bytes,
        role=settings.role,
        state_width=info.state_width,
    )


def main(fd: int, parent: int, builder_name: str) -> int:
    """Serves the front at the other end of socket ``fd``; returns the exit code.

    ``builder_name`` is ``module:function``, see `Builder`.
    """
    die_with_parent(parent)
    log_to_stderr("%(asctime)s worker: %(message)s")
    channel = Channel(socket.socket(fileno=fd))
    try:
        (start,) = channel.wait()
        if not isinstance(start, Start):
            raise RuntimeError(f"expected Start, got {type(start).__name__}")
        began = time.monotonic()
        try:
            module, _, function = builder_name.partition(":")
            build: Builder = getattr(importlib.import_module(module), function)
            engine, info = build(start.settings)
        except (ValueError, OSError) as error:
            channel.send(Failed(error=str(error)))
            return 1
        # What lives now lives for good: later collections need not look at it.
        gc.collect()
        gc.freeze()
        tier = engine.load().tier
        load_ms = (time.monotonic() - began) * 1e3
        channel.send(
            Ready(plan=plan_of(start.settings, info, load_ms, 0 if tier is None else tier.size_bytes))
        )
        WorkerLoop(engine, channel).run()
        engine.close()
    except EOFError:
        return 0  # the front is gone, and with it everyone who wanted something
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(EOFError):
            channel.send(Failed(error=f"{type(error).__name__}: {error}"))
        return 1
    finally:
        gc.unfreeze()  # so that Python can take everything down, and no library complains of what is left
    return 0
