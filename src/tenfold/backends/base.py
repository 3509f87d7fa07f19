"""The seam between what is computed and what computes it: ``compile(graph, checkpoint, options) ->
Program``."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tenfold.checkpoint.base import Checkpoint
from tenfold.graph.graph import Graph
from tenfold.graph.recurrent import RecurrentGraph

PAGE_ROWS = 16
"""Rows of a KV page, everywhere."""

MOST_DRAFTS = 1024
"""Most tokens that a recurrent program drafts in one call."""

Int32s = npt.NDArray[np.int32]
UInt32s = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]
IsaName = Literal["auto", "avx512", "avx2", "portable"]
FormatName = Literal["auto", "f32", "bf16", "q8", "q4"]


class CompileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend needs to know besides the graph and its weights."""

    threads: int = 0
    """0: one per core that this process may use."""
    isa: IsaName = "auto"
    format: FormatName = "auto"
    max_rows: int = 512
    """Most rows of a step."""
    max_logit_rows: int = 64
    """Most rows of a step whose logits are wanted."""
    kv_pages: int = 0
    """KV pages to reserve; must be positive."""
    kv_format: Literal["auto", "bf16", "f32", "q8"] = "auto"
    """What KV rows are held in. ``q8``: int8 with a scale per row and head. ``auto``: bf16, or f32 with f32
    weights."""
    kv_bias: bool = False
    """Pages have a float per row and KV head that is added to the scores before the softmax: 0 where a step
    wrote the row, else what ``set_bias`` of the program said. For rows that stand for several."""
    taps: tuple[str, ...] = ()
    """Values of the graph (of all rows, or of the wanted ones) that steps can hand back for wanted rows."""
    fused: bool = True
    """False: every op on its own, as a call of its own. The same answers, slower: for measuring what fusing
    gains."""


class SamplingBatch(msgspec.Struct, frozen=True, kw_only=True):
    """How the token after each wanted row is drawn: a struct of arrays with one entry ``n`` per wanted row.

    The order is: bias, penalties, mask, temperature, top_k, top_p, min_p, then argmax of ``logit /
    temperature + Gumbel(seed, position, token)`` over what is left. Temperature 0 is plain argmax of the
    penalised logits of the tokens that the mask leaves; ties go to the lowest id.
    """

    temperature: Floats
    top_k: Int32s
    """0: off."""
    top_p: Floats
    """1: off."""
    min_p: Floats
    """0: off."""
    repetition: Floats
    """1: off. Tokens of prompt or output: positive logits are divided by it, negative multiplied."""
    presence: Floats
    frequency: Floats
    """Over output tokens only."""
    seed: npt.NDArray[np.uint64]
    position: npt.NDArray[np.int64]
    """Index in the sequence of the token to be drawn (prompt tokens count): the counter of the noise."""
    history_offsets: Int32s
    """[n + 1] into the two below: distinct tokens of prompt and output, only for rows with a penalty."""
    history_tokens: Int32s
    history_counts: Int32s
    """Times in the output; 0 for a token of the prompt alone."""
    bias_offsets: Int32s
    """[n + 1] into the two below."""
    bias_tokens: Int32s
    bias_values: Floats
    """Added to the logit; -inf forbids."""
    logprobs: Int32s
    """-1: none. k >= 0: log-probability of the drawn token and the k most likely, of the model's own
    distribution (raw logits, before bias, penalties, mask and temperature)."""
    mask_rows: Int32s | None = None
    """[n] the row of ``masks`` that says which tokens may be drawn; -1: all. None: -1 for every row."""
    masks: UInt32s | None = None
    """[M, (vocab + 31) // 32]: bit ``t % 32`` of word ``t // 32`` is set where token ``t`` may be drawn. A
    token that may not is as one with a logit of -inf, whatever its bias."""


class StepBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One step: R rows of S sequences, N of them with logits wanted. All arrays are contiguous."""

    tokens: Int32s
    """[R]"""
    positions: Int32s
    """[R] rotary positions."""
    row_offsets: Int32s
    """[S + 1]: sequence s has rows ``row_offsets[s] : row_offsets[s + 1]``."""
    cached_rows: Int32s
    """[S]: KV rows the sequence had before this step. Its i-th row of the step goes to cache row
    ``cached_rows[s] + i``, that is to page ``// 16``, line ``% 16``, and attends to every cache row up to its
    own."""
    page_offsets: Int32s
    """[S + 1] into ``pages``."""
    pages: Int32s
    """Page tables, one sequence after another; long enough for the rows of this step."""
    logit_rows: Int32s
    """[N] ascending indices of rows."""
    sampling: SamplingBatch
    """N entries."""
    want_logits: bool = False
    """Also hand back the raw logits."""
    want_features: bool = False
    """Also hand back the values that the program was compiled with as ``taps``."""
    state_rows: Int32s | None = None
    """[M] ascending indices of rows whose final hidden states are wanted, with logits or without. None: of no
    row; ``ProgramInfo.state_width`` must not be 0 else."""


class StepOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a step found, for its N wanted rows."""

    tokens: Int32s
    """[N] drawn tokens; -1 where no logit is a number above -inf."""
    logprobs: Floats
    """[N] log-probability of the drawn token (0 where not asked for)."""
    top_tokens: Int32s
    """[N, K] with K the most that any row asked for; -1 beyond a row's own."""
    top_logprobs: Floats
    """[N, K]"""
    logits: Floats | None = None
    """[N, vocab]"""
    features: Floats | None = None
    """[N, sum of the taps' widths], the taps side by side in their order."""
    states: Floats | None = None
    """[M, state_width] final hidden states: behind the last norm, before the output matrix."""


class WeightReport(msgspec.Struct, frozen=True):
    """What was done with one weight, for ``inspect`` and the resolved plan."""

    name: str
    shape: tuple[int, ...]
    stored_type: str
    format: str
    bytes: int
    lossless: bool
    why: str


class ProgramInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a program resolved to."""

    backend: str
    threads: int
    threads_why: str
    isa: str
    isa_why: str
    max_rows: int
    max_logit_rows: int
    vocab_size: int
    max_context: int
    kv_pages: int
    kv_format: str
    page_bytes: int
    weight_bytes: int
    """Packed weights read by a step of one row."""
    weights: tuple[WeightReport, ...]
    state_width: int = 0
    """Width of the final hidden states that steps can hand back; 0: they cannot."""


class Program(Protocol):
    """A compiled graph with its weights and its KV pages."""

    info: ProgramInfo

    def step(self, batch: StepBatch) -> StepOutput:
        """Runs one step. Raises ValueError for a batch that does not fit; nothing is written then."""
        ...

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copies the first ``rows`` lines of page ``source``, all layers, into page ``target``."""
        ...

    def read_page(self, page: int) -> bytes:
        """The page's bytes (`ProgramInfo.page_bytes`)."""
        ...

    def write_page(self, page: int, data: bytes) -> None:
        """Overwrites a page."""
        ...

    def close(self) -> None:
        """Stops the threads and frees the memory; the program must not be used afterwards."""
        ...


class PageViews(Protocol):
    """A program whose pages can be read and written where they lie."""

    def view_page(self, page: int) -> memoryview:
        """The page's own bytes (`ProgramInfo.page_bytes`), not a copy. They outlive `Program.close`."""
        ...


class UnrollBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What a recurrent program drafts for: S sequences, each from its features and its newest token."""

    features: Floats
    """[S, feature_width]"""
    tokens: Int32s
    """[S] newest token of each, of the target's vocabulary."""
    seed: npt.NDArray[np.uint64]
    position: npt.NDArray[np.int64]
    """[S] index in the sequence of the first token to be drafted: the counter of the noise."""
    temperature: Floats
    """[S] 0: the most likely token."""
    lengths: Int32s
    """[S] tokens to draft, 1 to `MOST_DRAFTS`."""
    floor: Floats
    """[S] a sequence drafts no further once the product of its drafts' probabilities is below this."""


class UnrollOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts. K is the longest of the lengths."""

    tokens: Int32s
    """[S, K] tokens of the target's vocabulary; -1 beyond a sequence's own, which ends early at its floor and
    where no logit is a number above -inf."""
    logprobs: Floats
    """[S, K] of each, in the drafter's distribution at its temperature (at 1 where that is 0)."""


class RecurrentProgram(Protocol):
    """A compiled `tenfold.graph.recurrent.RecurrentGraph`."""

    def unroll(self, batch: UnrollBatch) -> UnrollOutput:
        """Drafts token after token, each drawn as the target would draw it: the argmax over the drafter's
        rows of ``logit / temperature + Gumbel(seed, position, token_ids[row])``. Raises ValueError."""
        ...

    def close(self) -> None:
        """Frees the memory."""
        ...


class Backend(Protocol):
    """Compiles graphs."""

    name: str

    def compile(self, graph: Graph, checkpoint: Checkpoint, options: CompileOptions) -> Program:
        """Packs the weights and reserves the KV pages. Raises CheckpointError or ValueError."""
        ...


class RecurrentBackend(Backend, Protocol):
    """Compiles recurrent graphs too."""

    def compile_recurrent(
        self,
        graph: RecurrentGraph,
        checkpoint: Checkpoint,
        *,
        token_ids: Int32s,
        vocab_size: int,
        max_sequences: int,
        threads: int = 0,
        isa: IsaName = "auto",
        format: FormatName = "auto",
        team_of: Program | None = None,
    ) -> RecurrentProgram:
        """Packs the weights that the two graphs name, each once.

        ``token_ids`` ``[rows of the output matrix]`` are the target's ids of the rows, each once, in a
        vocabulary of ``vocab_size``; embeddings have a row for each token of that vocabulary. ``threads``,
        ``isa`` and ``format`` are as in `CompileOptions`. With ``team_of`` the program computes on the
        threads of that one, and is refused a call while it steps. Raises CheckpointError or ValueError.
        """
        ...
