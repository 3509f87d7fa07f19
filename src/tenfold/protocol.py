"""What front, router, worker and engine say to each other. Token ids only: text belongs to the front.

Everything here is a msgspec struct and travels as msgpack. This file imports nothing of Tenfold.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]
WorkerRole = Literal["mixed", "prefill", "decode"]
"""What a worker is for: ``mixed``, prompts and answers; ``prefill``, prompts, whose pages and first token
others take over; ``decode``, answers. Any worker can do all of it, and does where nobody else is left."""
KVTransport = Literal["auto", "memory", "tcp", "nixl"]
"""How KV pages go from one worker to another; ``auto``: see `kv.choice`."""
PoolingKind = Literal["mean", "last"]


class Constraint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the text of an answer must match as a whole. The answer ends where it can only end."""

    kind: ConstraintKind
    text: str = ""
    """``json_schema``: the schema, as JSON. ``json_object``: nothing. ``regex``: the expression, in the
    syntax of Rust's regex crate. ``choice``: a JSON list of strings. ``grammar``: a Lark grammar in
    llguidance's dialect, or one in GBNF."""
    field: str = "constraint"
    """Of the client's request, as clients write it: what an error names."""


FLUSH_S = 4.0
"""How long a worker with a disk tier may write pages when it is told to end; its front waits for it."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens of a request are drawn and when it ends. The defaults are those of the OpenAI service, but
    for ``max_tokens``: None means up to the context's end."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    """None: the front draws one, so that the request can be resumed elsewhere."""
    stop: tuple[str, ...] = ()
    """Stop strings; the front's business, not the engine's."""
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's own end-of-sequence tokens."""
    max_tokens: int | None = None
    ignore_eos: bool = False
    """The model's own end-of-sequence tokens do not end the request (``stop_token_ids`` still do)."""
    logprobs: int | None = None
    """None: none. k: of the drawn token and the k most likely."""
    constraint: Constraint | None = None
    """None: any text."""


class Pooling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the final hidden states of a prompt become its embedding."""

    kind: PoolingKind
    """``mean``: of all its tokens; all of them are computed, whatever the cache has. ``last``: of its last
    token."""
    normalize: bool = True
    """To length 1."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the engine knows it."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    output: tuple[int, ...] = ()
    """Tokens generated already, when it is resumed: they count for max_tokens, penalties and positions."""
    eos_token_ids: tuple[int, ...] = ()
    prefill_only: bool = False
    """End after one token, and hand the pages of all tokens before it over: the last chunk has a
    ``handoff``."""
    handoff: dict[str, Any] | None = None
    """Of the chunk of another worker: its pages are taken from there instead of computed, if they come."""
    namespace: str = ""
    """Whose traffic it is: cached prompts, and what drafters learn, are shared within a namespace alone."""
    pooling: Pooling | None = None
    """Not None: the prompt's embedding is wanted, and no token; of ``params`` nothing counts then."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of a drawn token, and the most likely ones (highest first)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """News of one request: tokens, and at last exactly one finish reason. Nothing follows a finish reason.

    A token that ended the request (end of sequence, stop id) is in ``tokens`` and counts as generated.
    """

    id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    """The token that ended it, for finish ``stop``."""
    error: str | None = None
    """For finish ``error``: what went wrong and what to do."""
    error_field: str | None = None
    """For finish ``error``: the field of the request at fault, as clients write it; None: it is not the
    request's own fault."""
    cached_tokens: int | None = None
    """Prompt tokens that were not computed anew; in the first chunk."""
    beyond_memory: bool = False
    """For finish ``error``: its tokens fill all KV memory of this worker; one that has more may go on."""
    handoff: dict[str, Any] | None = None
    """Of a request that is ``prefill_only``: what another worker's `Request` must have to take over its
    pages. It comes when the request begins to run, and holds from then on; again in the last chunk, when all
    pages are there. None in the last chunk: they are not, or the answer ended with this token."""
    queue_ms: float | None = None
    """How long the request waited in the engine before its first step; in the first chunk."""
    embedding: bytes | None = None
    """Of a request with ``pooling``, in its only chunk, with finish ``stop``: float32, little-endian."""


class SpeculationCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What speculation did so far. ``committed_tokens / steps`` is the acceptance length."""

    steps: int
    """Steps of a sequence in which it decoded, with a draft or without."""
    committed_tokens: int
    """Tokens that came of them."""
    drafted_tokens: int
    """Guessed tokens that were verified."""
    accepted_tokens: int
    """How many of those stood."""
    idle: dict[str, int]
    """Why nothing was drafted in such a step, and how often."""
    faults: int
    """Calls of the speculator that failed; their drafts were dropped."""
    head_swaps: dict[str, int] = {}
    """What became of heads that were trained while serving, and how often; see `tenfold.live`."""


class ConstraintCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What constraints cost so far."""

    compiled: int
    """Constraints compiled: those seen before are not compiled again."""
    compile_ms: float
    masks: int
    """Sets of allowed tokens: one for each row that was drawn under a constraint."""
    mask_ms: float
    failures: int
    """Requests that ended with an error, as their constraint exceeded a limit on the way."""


class TierCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What the disk tier did so far, in this worker."""

    pages: int
    """Pages on disk that this worker knows of: the tier's, also what other workers wrote."""
    page_bytes: int
    size_bytes: int
    """Most bytes of all its files."""
    stored_pages: int
    dropped_pages: int
    """Pages that were not stored: evicted before it was their turn, or the disk refused them."""
    restored_pages: int
    restores: dict[str, int]
    """Prompts whose pages were found there, by what came of it: restored, partly (some did not come, or came
    late), failed, declined (computing is faster)."""
    corrupt: int
    """Reads that found something else than what had been written; its pages were computed."""
    errors: dict[str, int]
    """Faults of the disk, by ``read`` and ``write``."""


class TransferCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Pages that went from one worker to another."""

    exported_pages: int
    declined: int
    """Requests that could not be exported for want of room."""
    imported_pages: int
    imports: dict[str, int]
    """Requests that came with a handoff, by what came of it: imported, partly, failed, there already,
    abandoned (nobody waited for it any more)."""
    page_bytes: int = 0
    export_s: float = 0.0
    """Spent on writing pages for others."""
    import_s: float = 0.0
    """Spent on reading pages that were ready, checksums included."""
    fallbacks: dict[str, int] = {}
    """Imports that ended with something left to compute, by why: ``gone`` (their exporter died or gave up),
    ``late``, ``checksum``, ``foreign`` (of another model, configuration or prompt), ``broken``."""
    starts: int = 0
    """Requests that were admitted with all pages of a handoff, on one machine,"""
    start_s: float = 0.0
    """the seconds from their last page's being ready to that, together,"""
    start_max_s: float = 0.0
    """and the most of one."""


class LoadSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """How loaded an engine is."""

    running: int
    waiting: int
    pages_total: int
    pages_free: int
    """Pages that hold nothing that a running request needs: free ones and cached ones that may be evicted."""
    steps: int
    """Steps made since the start: forward progress."""
    prompt_tokens: int
    """Prompt tokens asked for, over all requests so far."""
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    speculation: SpeculationCounts | None = None
    """None: the engine has no speculator."""
    constraints: ConstraintCounts | None = None
    """None: the engine knows no constraints."""
    tier: TierCounts | None = None
    """None: there is no disk tier."""
    transfer: TransferCounts | None = None
    """None: the engine exports and imports nothing."""
    kv_sequence: int = 0
    """Number of the last `KVEvents` that were sent: by it a router notices that the newest were lost."""


class PagesStored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """Pages that a worker now holds, in the order of their chain."""

    names: tuple[int, ...]
    """As `tenfold.router.names` has them; 64 bits, unsigned."""
    parent: int | None = None
    """Name of the page before the first; None at the beginning of a prompt."""
    tokens: tuple[int, ...] = ()
    """Of all these pages, one after another; only with `EngineSettings.page_tokens`."""
    namespace: str = ""
    """Whose pages they are; only with `EngineSettings.page_tokens`."""


class PagesRemoved(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    """Pages that a worker gave up."""

    names: tuple[int, ...]


class PagesCleared(msgspec.Struct, frozen=True, array_like=True, tag="cleared"):
    """A worker gave up all its pages."""


KVEvent = PagesStored | PagesRemoved | PagesCleared


class KVEvents(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a worker's pages in one step, in order. Sequence numbers start at 1 with the worker and
    have no gaps: a gap seen is a message lost."""

    sequence: int
    events: tuple[KVEvent, ...]


class KVSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All pages that a worker holds, after the events up to ``sequence``: the answer to a request to
    resync."""

    sequence: int
    names: tuple[int, ...]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs in order to build its engine."""

    model: str
    """Path of the model on this machine, or a name that ``checkpoint.locate`` knows."""
    threads: int = 0
    """0: one per core that the worker may use, and no more than its CPU quota."""
    isa: str = "auto"
    format: str = "auto"
    kv_format: str = "auto"
    kv_memory_bytes: int | None = None
    """None: chosen from free memory, see ``config.plan_kv``."""
    max_batch_tokens: int = 512
    max_running: int = 64
    speculate: bool = False
    """Draft tokens where that pays: the same answers, sooner."""
    drafter: str | None = None
    """Path of a folder that `tenfold train-drafter` wrote; None: what needs no training."""
    learn: bool = False
    """Keep recent answers in the drafter's folder, and train its head on them."""
    kv_disk: str | None = None
    """Folder of the disk tier; None: there is none."""
    kv_disk_bytes: int | None = None
    """Most bytes of all files in it; None: chosen from what is free there."""
    transfer: bool = False
    """Export and import pages: see `Request.prefill_only` and `Request.handoff`."""
    role: WorkerRole = "mixed"
    """Of this worker."""
    prefill_workers: int = 0
    """Of the ``workers``, so many are for prefill and the others for decode; 0: all are mixed."""
    transfer_address: str | None = None
    """Address of this machine at which workers of other machines fetch pages over TCP; None: through memory
    alone."""
    transfer_secret: str | None = None
    """File with the secret that they have too."""
    kv_transport: KVTransport = "auto"
    """How pages come from them. Without an address it is memory."""
    workers: int = 1
    """So many workers share this machine: cores (unless ``threads`` says how many) and KV memory (also
    ``kv_memory_bytes``) are divided among them."""
    models: int = 1
    """So many models are loaded at once on this machine: the KV memory that is chosen from free memory is
    divided among them; cores are not, see `worker.build.own_threads`."""
    routed: bool = False
    """A router is to be told of pages (`KVEvents`) and of how long steps take (`StepTime`)."""
    page_tokens: bool = False
    """It is told the tokens of pages too, for a router that names pages itself."""
    kv_events: str | None = None
    """ZeroMQ address, tcp://HOST:PORT, at which other routers are told of pages; the port is that of rank 0,
    and each further rank has the next. None: they are not."""
    kv_events_replay: str | None = None
    """The same, where they may ask for what they missed."""
    rank: int = 0
    """Of this worker among those of its front."""


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the settings resolved to in the worker."""

    backend: str
    threads: int
    threads_why: str
    isa: str
    isa_why: str
    vocab_size: int
    max_context: int
    kv_pages: int
    kv_format: str
    page_bytes: int
    weight_bytes: int
    """Packed weights read by a step of one row."""
    format_bytes: dict[str, int]
    """Bytes of weights in memory by number format."""
    lossy_weights: int
    """Weights that were rounded anew when they were loaded."""
    weights: int
    max_batch_tokens: int
    max_running: int
    load_ms: float
    kv_disk_bytes: int = 0
    """Most bytes of the disk tier; 0: there is none."""
    role: WorkerRole = "mixed"
    state_width: int = 0
    """Elements of an embedding; 0: there are none."""


class ToWorker(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what a front says to a worker."""


class Start(ToWorker, frozen=True, kw_only=True):
    """The first message: build the engine."""

    settings: EngineSettings


class Generate(ToWorker, frozen=True, kw_only=True):
    """Take up a request."""

    request: Request
    acknowledge: bool = False
    """Say so before anything else is done with it, by a chunk without tokens: if the worker dies then, the
    request was there."""


class Fetch(ToWorker, frozen=True, kw_only=True):
    """Bring the pages of a prompt that is being prefilled elsewhere into the cache, as they become ready: the
    request's ``handoff`` says where. When all are there, and beside them the token that was drawn behind the
    prompt, the worker goes on with the request at once. `Generate` follows, with the same id and that token:
    then it says nothing new, else the request waits for its pages without holding up others. Or an `Abort`
    follows."""

    request: Request


class Abort(ToWorker, frozen=True, kw_only=True):
    """Forget a request (or a `Fetch`); its news are of no interest. An unknown id is no error: it may have
    just ended."""

    id: str
    keep: int | None = None
    """The request had its end, seen in its text (a stop string): so many generated tokens are its answer, and
    may be learnt from. None: it was given up."""


class Resync(ToWorker, frozen=True, kw_only=True):
    """Tell all pages that there are: answered by `Pages`, at once."""


class Shutdown(ToWorker, frozen=True, kw_only=True):
    """End the process now."""


class Welcome(ToWorker, frozen=True, kw_only=True):
    """To a worker that asked to `Join`: it may, and is to say `Ready` when its engine is built."""

    name: str
    """What it is called here."""


class TurnedAway(ToWorker, frozen=True, kw_only=True):
    """To a worker that asked to join: it may not, and need not try again."""

    reason: str


class FromWorker(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what a worker says to its front."""


class Ready(FromWorker, frozen=True, kw_only=True):
    """The engine is built: requests are welcome."""

    plan: EnginePlan
    warm: bool = False
    """The engine has been here before: it may hold pages, and its counts go on."""


class Join(FromWorker, frozen=True, kw_only=True):
    """The first words of a worker that was started elsewhere: who it is. All but ``name`` and ``instance``
    must be as the front has it, or answers would depend on where they are computed."""

    name: str
    instance: str
    """Of the process: tells one that comes back from another of the same name."""
    version: str
    code: str
    """See `tenfold.worker.version`."""
    model: str
    """The files' `tenfold.checkpoint.fingerprint`."""
    format: str
    kv_format: str
    """Both as asked for on the command line."""


class Alive(FromWorker, frozen=True, kw_only=True):
    """A sign of life of a worker that joined, once a second whatever its engine does: the front cannot look
    at its process."""

    cpu_seconds: float
    """That the process has used."""


class Leaving(FromWorker, frozen=True, kw_only=True):
    """A worker that joined was asked to end: it wants no new requests, and `Shutdown` when it has none."""


class StepTime(msgspec.Struct, frozen=True, array_like=True):
    """How long one step took."""

    prompt_rows: int
    """Rows of prompts: of sequences with more than one pending token."""
    decode_rows: int
    """Sequences that decoded."""
    context_rows: int
    """Cache rows that those had, all together."""
    tokens: int
    """That those drew: more than ``decode_rows`` where drafts stood."""
    seconds: float


class Chunks(FromWorker, frozen=True, kw_only=True):
    """All news of one step. ``load`` rides along at most every 100 ms, when the engine falls idle, and every
    second while it is: a worker is never silent but in a long step."""

    chunks: tuple[Chunk, ...] = ()
    load: LoadSnapshot | None = None
    events: KVEvents | None = None
    """What became of pages up to this message; to be taken up before ``load``."""
    steps: tuple[StepTime, ...] = ()
    """Times of some of the latest steps; with ``load`` alone."""


class Pages(FromWorker, frozen=True, kw_only=True):
    """The answer to `Resync`."""

    snapshot: KVSnapshot


class Refused(FromWorker, frozen=True, kw_only=True):
    """The engine does not accept a request; it is the request's fault, unless it is ``beyond_memory``.
    Terminal for it."""

    id: str
    error: str
    field: str
    """Of the request, as clients write it: what the error is about."""
    beyond_memory: bool = False
    """It has more tokens than this worker's KV memory holds; one that has more may take it."""


class Failed(FromWorker, frozen=True, kw_only=True):
    """The worker's last words: it cannot start, or its engine broke."""

    error: str


WorkerMessage = Ready | Chunks | Pages | Refused | Failed
JoinedMessage = WorkerMessage | Join | Alive | Leaving
"""Of a worker that joined."""
FrontMessage = Start | Generate | Fetch | Abort | Resync | Shutdown | Welcome | TurnedAway
