"""How a server is configured, and what the configuration resolves to on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec

from tenfold.folders import make_private
from tenfold.protocol import EnginePlan, EngineSettings
from tenfold.router.policies import POLICIES, Policy

PAGE_ROWS = 16
"""Rows of a KV page: `backends.base.PAGE_ROWS`, not imported because numpy comes with it."""

ISAS = ("auto", "avx512", "avx2", "portable")
FORMATS = ("auto", "f32", "bf16", "q8", "q4")
_NAME = re.compile(r"(?=.*\S)[^\x00-\x1f\x7f-\x9f]{1,256}")
MAX_KV_PAGES = 1 << 26
"""The kernels' limit."""
MAX_KV_BYTES = 1 << 60
"""More than any machine has, and still a number that travels."""

KV_FORMATS = ("auto", "bf16", "f32", "q8")
SPECULATE = ("auto", "off")
TOOL_FORMATS = ("auto", "none", "hermes", "llama3", "mistral", "smollm2")
"""Those of `server.tool_formats`."""
REASONING_FORMATS = ("auto", "none", "think", "mistral")
"""Those of `server.reasoning`."""
LOG_FORMATS = ("text", "json")

LIMITS: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "threads": (0, 1024),
    "max_batch_tokens": (1, 1 << 16),
    "max_running": (1, 4096),
    "workers": (0, 256),
    "prefill": (0, 256),
    "decode": (0, 256),
    "max_queue": (0, 1 << 20),
    "max_body_bytes": (1024, 1 << 30),
    "stall_after_s": (0.1, 86400),
    "arrive_s": (0.1, 86400),
    "unread_s": (0.1, 86400),
    "drain_s": (0, 3600),
}
"""Lowest and highest value of each setting that is a number."""


class OptionError(ValueError):
    """A setting that cannot be: who gave it is to change it. ``fields`` are the settings that the message
    names as Python does; the command line puts its options there."""

    def __init__(self, problem: str, *fields: str) -> None:
        super().__init__(problem)
        self.fields = fields


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `tenfold serve` can be told. Raises OptionError naming a field that is out of range."""

    model: str
    """A model name, a folder or a GGUF file."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0: a free one."""
    served_name: str | None = None
    """The model's name in the API; None: ``model`` without its folder."""
    threads: int = 0
    """0: see `backends.cores.choose_threads`."""
    isa: str = "auto"
    format: str = "auto"
    kv_format: str = "auto"
    """What KV rows are held in; auto: bf16, or f32 when the weights are asked for in f32."""
    kv_memory_bytes: int | None = None
    """Memory for the KV cache; None: see `plan_kv`."""
    max_batch_tokens: int = 512
    """Most rows of a step."""
    max_running: int = 64
    """Most requests that are computed at once."""
    speculate: str = "auto"
    """auto: draft tokens where it was measured to pay, which changes no answer; off: never."""
    drafter: str | None = None
    """A folder that `tenfold train-drafter` wrote; None: drafts come from what was said before."""
    learn: bool = False
    """Keep recent answers in ``live`` in the drafter's folder, and train its head on them while serving."""
    kv_disk: str | None = None
    """Folder of the disk tier, in which KV pages outlive memory and restarts; None: there is none."""
    kv_disk_bytes: int | None = None
    """Most bytes of all files in it; None: a quarter of what is free there, up to 32 GiB."""
    tool_format: str = "auto"
    """How the model writes tool calls; auto: as its chat template shows."""
    reasoning_format: str = "auto"
    """How the model marks its reasoning; auto: as its chat template shows; none: reasoning is text."""
    workers: int = 1
    """Processes with an engine each; ``threads`` and ``max_running`` are of each, ``kv_memory_bytes`` is of
    all together."""
    prefill: int = 0
    """With ``decode`` instead of ``workers``: so many processes compute prompts, whose pages the ``decode``
    others take over; 0: every worker does both."""
    decode: int = 0
    routing: Policy = "cache-aware"
    """Which worker gets a request."""
    max_queue: int | None = None
    """Most requests that wait for their turn; beyond it a request is refused with 429. None: so many that one
    waits for a quarter of the time that a request takes."""
    max_body_bytes: int = 8 << 20
    stall_after_s: float = 30.0
    """Work without a step for this long makes ``/ready`` answer 503."""
    arrive_s: float = 60.0
    """Within this time a request must have arrived, its body included."""
    unread_s: float = 60.0
    """A client that takes nothing of its answer for this long is hung up on."""
    api_key_file: str | None = None
    """Keys that clients must send, one a line; None: nobody is asked for one."""
    admin_key_file: str | None = None
    """Keys that may load and unload models; None: nobody may."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the server."""
    log_format: str = "text"
    otlp_endpoint: str | None = None
    """URL of an OpenTelemetry collector that is sent a span for each request; None: nobody is."""
    drain_s: float = 5.0
    """How long a stopping server lets running requests go on."""
    accept_workers: str | None = None
    """HOST:PORT at which workers of other machines may join; None: nowhere."""
    secret_file: str | None = None
    """What they share with this server."""
    kv_events: str | None = None
    """ZeroMQ address at which the workers tell other routers of their pages: tcp://HOST:PORT, the port of the
    first; each further one has the next. None: nowhere."""
    kv_events_replay: str | None = None
    """The same, where events that were missed may be asked for."""

    def __post_init__(self) -> None:
        for field, (lowest, highest) in LIMITS.items():
            value = getattr(self, field)
            if value is not None and not lowest <= value <= highest:
                raise OptionError(f"{field} is {value}; it must be from {lowest} to {highest}", field)
        if not self.workers and self.accept_workers is None:
            raise OptionError(
                f"workers is 0; it must be from 1 to {LIMITS['workers'][1]}, or accept_workers must be "
                "given, for others that join",
                *("workers", "accept_workers"),
            )
        for field in ("kv_memory_bytes", "kv_disk_bytes"):
            size = getattr(self, field)
            if size is not None and not 1 <= size <= MAX_KV_BYTES:
                raise OptionError(f"{field} is {size}; it must be from 1 to {MAX_KV_BYTES} (1024 PiB)", field)
        if self.served_name is not None and not _NAME.fullmatch(self.served_name):
            raise OptionError(
                f"served_name is {self.served_name!r}; it must be 1 to 256 readable characters, or left out",
                "served_name",
            )
        if not _NAME.fullmatch(self.model_name):
            raise OptionError(
                f"model is {self.model!r}, which is no name for the API: it must be 1 to 256 readable "
                "characters; give another with served_name",
                *("model", "served_name"),
            )
        for field, choices in (
            ("isa", ISAS),
            ("format", FORMATS),
            ("kv_format", KV_FORMATS),
            ("speculate", SPECULATE),
            ("tool_format", TOOL_FORMATS),
            ("reasoning_format", REASONING_FORMATS),
            ("routing", POLICIES),
            ("log_format", LOG_FORMATS),
        ):
            if getattr(self, field) not in choices:
                raise OptionError(
                    f"{field} is {getattr(self, field)!r}; it must be one of {', '.join(choices)}", field
                )

        if self.kv_disk_bytes is not None and self.kv_disk is None:
            raise OptionError(
                "kv_disk_bytes is given without kv_disk; say which folder", "kv_disk_bytes", "kv_disk"
            )
        if self.drafter is not None and self.speculate == "off":
            raise OptionError(
                "drafter is given and speculate is off; leave one of them out", "drafter", "speculate"
            )
        if self.learn and self.drafter is None:
            raise OptionError(
                "learn is given without drafter; train one with `tenfold train-drafter` and give it",
                *("learn", "drafter"),
            )
        if bool(self.prefill) != bool(self.decode):
            raise OptionError(
                f"prefill is {self.prefill} and decode is {self.decode}; give 1 or more of each, or neither",
                *("prefill", "decode"),
            )
        if self.prefill and self.workers != 1:
            raise OptionError(
                f"workers is {self.workers} beside prefill and decode, which say how many there are; "
                "leave it out",
                *("workers", "prefill", "decode"),
            )
        if self.learn and self.prefill:
            raise OptionError(
                f"learn is given and prefill is {self.prefill}, but only a lone worker can learn; leave one "
                "of them out",
                *("learn", "prefill"),
            )
        if self.prefill and self.accept_workers is not None:
            raise OptionError(
                "accept_workers is given with prefill and decode, and workers that join have no role; leave "
                "one of them out",
                *("accept_workers", "prefill"),
            )
        if self.learn and self.workers != 1:
            raise OptionError(
                f"learn is given and workers is {self.workers}, but only one can learn; leave one of them "
                "out",
                *("learn", "workers"),
            )
        if self.learn and self.accept_workers is not None:
            raise OptionError(
                "learn is given with accept_workers, and only one worker can learn; leave one of them out",
                *("learn", "accept_workers"),
            )
        if (self.accept_workers is None) != (self.secret_file is None):
            given, missing = (
                ("secret_file", "accept_workers")
                if self.accept_workers is None
                else ("accept_workers", "secret_file")
            )
            raise OptionError(
                f"{given} is given without {missing}; workers that join need an address and a secret",
                *(given, missing),
            )
        if self.kv_events_replay is not None and self.kv_events is None:
            raise OptionError(
                "kv_events_replay is given without kv_events; say where", "kv_events_replay", "kv_events"
            )
        if self.kv_events is not None and not self.workers:
            raise OptionError(
                "kv_events is given and workers is 0; give it to each `tenfold worker`",
                *("kv_events", "workers"),
            )
        for field in ("kv_events", "kv_events_replay"):
            check_events_address(getattr(self, field), field, self.processes)

    @property
    def processes(self) -> int:
        """Workers of all roles."""
        return self.prefill + self.decode if self.prefill else self.workers

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.served_name or Path(self.model).name or Path(self.model).resolve().name

    def engine_settings(self, path: str, models: int = 1) -> EngineSettings:
        """The worker's part, with the model at ``path``; so many ``models`` are loaded at once."""
        return EngineSettings(
            model=path,
            threads=self.threads,
            isa=self.isa,
            format=self.format,
            kv_format=self.kv_format,
            kv_memory_bytes=self.kv_memory_bytes,
            max_batch_tokens=self.max_batch_tokens,
            max_running=self.max_running,
            speculate=self.speculate != "off",
            drafter=self.drafter,
            learn=self.learn,
            kv_disk=self.kv_disk,
            kv_disk_bytes=self.kv_disk_bytes,
            workers=self.processes,
            models=models,
            routed=self.processes != 1 or self.accept_workers is not None,
            prefill_workers=self.prefill,
            transfer=self.prefill > 0,
            kv_events=self.kv_events,
            kv_events_replay=self.kv_events_replay,
        )


def check_events_address(address: str | None, field: str, workers: int) -> None:
    """Raises OptionError for an address at which ``workers`` workers cannot tell of their pages."""
    if address is None:
        return
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not (address.startswith("tcp://") and host and port.isascii() and port.isdigit()):
        raise OptionError(f"{field} is {address!r}; write it like tcp://127.0.0.1:5557", field)
    if not 1 <= int(port) <= 65536 - max(workers, 1):
        raise OptionError(
            f"{field} has port {port}; {max(workers, 1)} workers need ports from 1 to 65535 there", field
        )


def available_memory() -> int:
    """Bytes that could still be taken without swapping: the machine's, or the control group's if less."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))


def total_memory() -> int:
    """Bytes that this process could ever have: the machine's, or the control group's limit if less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    except (OSError, ValueError):  # no control groups, or "max"
        return total


def check_kv_memory(requested_bytes: int | None, total_bytes: int) -> None:
    """Raises ValueError for a KV cache that is larger than all memory. (What is free now is no measure: it
    changes, and a worker that starts again must not fail where the first one did not.)"""
    if requested_bytes is not None and requested_bytes > total_bytes:
        raise OptionError(
            f"kv_memory_bytes (--kv-memory) is {format_bytes(requested_bytes)}, but this machine or its "
            f"control group has {format_bytes(total_bytes)} in all; ask for less, or leave it out",
            "kv_memory_bytes",
        )


def check_kv_disk(folder: str | None) -> None:
    """Makes the folder of the disk tier if it is not there. Raises OptionError for one that cannot be
    written. (When a server starts, and not later: a disk that fails then costs the cache, nothing else.)"""
    if folder is None:
        return
    path = Path(folder)
    try:
        make_private(path)
        why = "" if os.access(path, os.W_OK | os.X_OK) else "it cannot be written"
    except OSError as error:
        why = "it is no folder" if path.exists() else error.strerror or str(error)
    if not folder or why:
        raise OptionError(
            f"kv_disk (--kv-disk) is {folder!r}: {why or 'it is empty'}; give a folder that can be written, "
            "or leave it out",
            "kv_disk",
        )


def plan_kv(
    requested_bytes: int | None, available_bytes: int, page_bytes: int, max_context: int, max_running: int
) -> int:
    """How many KV pages to reserve, at most `MAX_KV_PAGES`.

    What was asked for; else a quarter of the available memory, but never more than ``max_running`` full
    contexts can use nor less than one full context. Raises ValueError when what was asked for is less than a
    page or more than can be used.
    """
    context_pages = -(-max_context // PAGE_ROWS)
    if requested_bytes is not None:
        pages = requested_bytes // page_bytes
        if pages < 1:
            raise ValueError(
                f"kv_memory_bytes (--kv-memory) is {requested_bytes}; a page of {PAGE_ROWS} tokens takes "
                f"{page_bytes}"
            )
        if pages > MAX_KV_PAGES:
            raise ValueError(
                f"kv_memory_bytes (--kv-memory) is {requested_bytes}, {pages} pages of {PAGE_ROWS} tokens; "
                f"at most {MAX_KV_PAGES} can be used, {MAX_KV_PAGES * page_bytes} bytes"
            )
        return pages
    share = available_bytes // 4 // page_bytes
    return max(context_pages, min(share, max_running * context_pages, MAX_KV_PAGES))


def explain_kv(
    pages: int,
    requested_bytes: int | None,
    max_context: int,
    max_running: int,
    workers: int = 1,
    models: int = 1,
) -> str:
    """Why `plan_kv` chose ``pages``, for people."""
    context_pages = -(-max_context // PAGE_ROWS)
    if requested_bytes is not None:
        return "as asked for" if workers == 1 else f"as asked for, divided among {workers} workers"
    if pages == context_pages:
        return "one full context, the least that is useful"
    if pages == max_running * context_pages:
        return f"{max_running} full contexts, the most that --max-running can use"
    share = "a quarter of the memory that was free"
    parts = [f"{count} {what}" for count, what in ((models, "models"), (workers, "workers")) if count > 1]
    return f"{share}, divided among {' and '.join(parts)}" if parts else share


class PlanLine(msgspec.Struct, frozen=True):
    """One resolved setting: its value, for people, and why it is so."""

    name: str
    value: str
    why: str


class ResolvedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a configuration resolved to."""

    config: ServeConfig
    path: str
    """Where the model was found."""
    engine: EnginePlan
    chat: tuple[PlanLine, ...] = ()
    """How chats are read, and embeddings made: see `server.chat_setup` and `server.embeddings`."""
    models: int = 1
    """Loaded at once with this one."""

    def lines(self) -> list[PlanLine]:
        """The plan for people."""
        config, engine = self.config, self.engine
        formats = " + ".join(
            f"{format_bytes(size)} {name}" for name, size in sorted(engine.format_bytes.items())
        )
        kv_tokens = engine.kv_pages * PAGE_ROWS
        kv_size = format_bytes(engine.kv_pages * engine.page_bytes)
        return [
            PlanLine("model", config.model_name, self.path),
            PlanLine(
                "weights",
                formats,
                f"{engine.lossy_weights} of {engine.weights} weights were rounded anew"
                if engine.lossy_weights
                else "every weight as it is in the file",
            ),
            PlanLine("isa", engine.isa, engine.isa_why),
            PlanLine(
                "workers",
                f"{config.prefill} prefill + {config.decode} decode"
                if config.prefill
                else str(config.workers),
                f"{config.routing} routing; threads, kv cache and running are of each"
                if config.processes > 1
                else "one process with an engine"
                if config.workers
                else "none of this server's own",
            ),
            *(
                ()
                if config.accept_workers is None
                else (
                    PlanLine(
                        "join",
                        config.accept_workers,
                        "workers of other machines, with the secret; authenticated, not encrypted",
                    ),
                )
            ),
            *(
                ()
                if config.kv_events is None
                else (PlanLine("kv events", config.kv_events, "of the first worker; not authenticated"),)
            ),
            PlanLine("threads", str(engine.threads), engine.threads_why),
            PlanLine("context", f"{engine.max_context} tokens", "what the model was made for"),
            PlanLine(
                "kv cache",
                f"{kv_size} of {engine.kv_format}, {kv_tokens} tokens",
                explain_kv(
                    engine.kv_pages,
                    config.kv_memory_bytes,
                    engine.max_context,
                    engine.max_running,
                    config.processes or 1,
                    self.models,
                ),
            ),
            PlanLine(
                "kv disk",
                "off"
                if config.kv_disk is None
                else f"{format_bytes(engine.kv_disk_bytes)}, {config.kv_disk}",
                "prompts in the cache are lost at a restart; --kv-disk DIR keeps them"
                if config.kv_disk is None
                else "as asked for"
                if config.kv_disk_bytes is not None
                else "a quarter of what is free there, up to 32 GiB",
            ),
            PlanLine("step", f"{engine.max_batch_tokens} tokens", "--max-batch-tokens"),
            PlanLine("running", f"{engine.max_running} requests", "--max-running"),
            PlanLine(
                "speculation",
                "off" if config.speculate == "off" else config.drafter or "from earlier text",
                f"learns from its answers, which are kept in {config.drafter}/live"
                if config.learn
                else "as asked for"
                if config.speculate == "off" or config.drafter
                else "no drafter given; used where it pays, never changes an answer",
            ),
            *self.chat,
            PlanLine(
                "queue",
                "a quarter of those running" if config.max_queue is None else f"{config.max_queue} requests",
                "beyond it 429 with Retry-After; --max-queue N for another limit"
                if config.max_queue is None
                else "--max-queue; beyond it 429 with Retry-After",
            ),
        ]

    def text(self) -> str:
        """The plan as a table."""
        lines = self.lines()
        names = max(len(line.name) for line in lines)
        values = max(len(line.value) for line in lines)
        return "\n".join(f"  {line.name:{names}}  {line.value:{values}}  {line.why}" for line in lines)

    def to_json(self) -> dict[str, Any]:
        """The plan for machines."""
        return {
            "config": msgspec.to_builtins(self.config),
            "path": self.path,
            "engine": msgspec.to_builtins(self.engine),
            "lines": msgspec.to_builtins(self.lines()),
        }


class ServerPlan(msgspec.Struct, frozen=True):
    """What the configurations of all models resolved to, in the order they were given in."""

    models: tuple[ResolvedPlan, ...]

    def text(self) -> str:
        """A table for each model."""
        return "\n\n".join(plan.text() for plan in self.models)

    def to_json(self) -> dict[str, Any]:
        """That of the one model; of several, a list of theirs."""
        plans = [plan.to_json() for plan in self.models]
        return plans[0] if len(plans) == 1 else {"models": plans}


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(value: str) -> int:
    """Bytes, with a binary unit: 512MiB, 1.5G. Raises ValueError."""
    text = value.strip().upper().removesuffix("B").removesuffix("I")
    unit = text[-1:] if text[-1:] in "KMGT" else ""
    try:
        return int(float(text.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError):
        raise ValueError(
            f"{value!r} is not a size; write it like 512MiB or 2GiB. Units are KiB, MiB, GiB and TiB "
            "(or K, M, G and T, meaning the same); a number alone is bytes"
        ) from None


def format_bytes(size: int) -> str:
    """Bytes for people."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.1f} {unit}"
    return f"{size} B"
