"""The native CPU backend: programs of the core behind the seam of `tenfold.backends.base`."""

from __future__ import annotations

from typing import Any

import numpy as np

from tenfold import _native
from tenfold.backends.base import (
    CompileOptions,
    Floats,
    FormatName,
    Int32s,
    IsaName,
    Program,
    ProgramInfo,
    StepBatch,
    StepOutput,
    UnrollBatch,
    UnrollOutput,
)
from tenfold.backends.cores import choose_threads
from tenfold.backends.features import feature_columns
from tenfold.backends.lowering import Lowering, Weights
from tenfold.backends.unrolling import check_recurrent
from tenfold.checkpoint.base import Checkpoint
from tenfold.graph.graph import Graph
from tenfold.graph.passes import fuse
from tenfold.graph.recurrent import RecurrentGraph
from tenfold.graph.states import final_states

_NO_ROWS = np.zeros(0, np.int32)
_NO_MASKS = np.zeros((0, 0), np.uint32)


def choose_isa(requested: str) -> tuple[str, str]:
    """The ISA level to run and why. Raises ValueError if this machine lacks the requested one."""
    levels = _native.isa_levels()
    if requested == "auto":
        return levels[0], "best that this machine has"
    if requested not in levels:
        raise ValueError(f"isa (--isa): this machine cannot run {requested}; it can run {', '.join(levels)}")
    return requested, "asked for"


def resolve_kv_format(requested: str, weights: str) -> str:
    """What KV rows are held in: as asked for, else BF16, or F32 when the weights were asked for in F32."""
    if requested == "auto":
        return "f32" if weights == "f32" else "bf16"
    return requested


class NativeBackend:
    """Compiles graphs for the machine's own cores."""

    name = "native"

    def compile(self, graph: Graph, checkpoint: Checkpoint, options: CompileOptions) -> NativeProgram:
        """Packs the weights and reserves the KV pages; see `tenfold.backends.base.Backend`."""
        if options.kv_pages <= 0:
            raise ValueError("kv_pages must be positive")
        isa, isa_why = choose_isa(options.isa)
        threads, threads_why = choose_threads(options.threads)
        taps = feature_columns(graph, options.taps)
        states = final_states(graph)
        fused = fuse(graph, options.taps)
        kv_format = resolve_kv_format(options.kv_format, options.format)
        max_logit_rows = min(options.max_logit_rows, options.max_rows)
        core: Any = _native.Program.create(
            isa=isa,
            threads=threads,
            max_rows=options.max_rows,
            max_logit_rows=max_logit_rows,
            vocab=graph.vocab_size,
            kv_pages=options.kv_pages,
            kv_format=kv_format,
            kv=[(kv.heads, kv.head_dim) for kv in graph.kv],
            kv_bias=options.kv_bias,
        )
        weights = Weights(core, checkpoint, options.format)
        lowering = Lowering(core, fused, weights, taps=taps, states=states, fused=options.fused)
        core.finish(lowering.run())
        core.run_modular(not options.fused)
        info = ProgramInfo(
            backend=self.name,
            threads=threads,
            threads_why=threads_why,
            isa=isa,
            isa_why=isa_why,
            max_rows=options.max_rows,
            max_logit_rows=max_logit_rows,
            vocab_size=graph.vocab_size,
            max_context=graph.max_context,
            kv_pages=options.kv_pages,
            kv_format=kv_format,
            page_bytes=core.page_bytes(),
            weight_bytes=lowering.step_bytes,
            weights=tuple(weights.reports),
            state_width=0 if states is None else states.norm.width,
        )
        return NativeProgram(core, info)

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
    ) -> NativeRecurrent:
        """See `tenfold.backends.base.RecurrentBackend`."""
        team: Any = None
        if team_of is not None:
            if not isinstance(team_of, NativeProgram) or team_of._core is None:
                raise ValueError("team_of: must be a program of the native backend that is not closed")
            if threads not in (0, team_of.info.threads):
                raise ValueError(
                    f"threads: {threads} asked for, but the program of team_of has {team_of.info.threads}"
                )
            team, threads = team_of._core, team_of.info.threads
        ids = check_recurrent(graph, token_ids, vocab_size, max_sequences)
        core: Any = _native.Recurrent.create(
            isa=choose_isa(isa)[0],
            threads=choose_threads(threads)[0],
            max_sequences=max_sequences,
            vocab_size=vocab_size,
            token_ids=ids,
            team_of=team,
        )
        weights = Weights(core.program, checkpoint, format)
        ends = (core.end_first, core.finish)
        for step, state, end in zip((graph.first, graph.next), graph.state_output, ends, strict=True):
            lowering = Lowering(core.program, fuse(step, (state,)), weights, own=(state,))
            logits = lowering.run()
            end(logits, lowering.slots[state])
        return NativeRecurrent(core)


class NativeProgram:
    """A program of the core; see `tenfold.backends.base.Program`."""

    def __init__(self, core: Any, info: ProgramInfo) -> None:
        self._core = core
        self.info = info

    def step(self, batch: StepBatch) -> StepOutput:
        """Runs one step without the GIL."""
        s = batch.sampling
        tokens, logprobs, top_tokens, top_logprobs, logits, features, states = self._core.step(
            batch.tokens,
            batch.positions,
            batch.row_offsets,
            batch.cached_rows,
            batch.page_offsets,
            batch.pages,
            batch.logit_rows,
            s.temperature,
            s.top_k,
            s.top_p,
            s.min_p,
            s.repetition,
            s.presence,
            s.frequency,
            s.seed,
            s.position,
            s.history_offsets,
            s.history_tokens,
            s.history_counts,
            s.bias_offsets,
            s.bias_tokens,
            s.bias_values,
            np.full(len(s.position), -1, np.int32) if s.mask_rows is None else s.mask_rows,
            _NO_MASKS if s.masks is None else s.masks,
            s.logprobs,
            batch.want_logits,
            batch.want_features,
            _NO_ROWS if batch.state_rows is None else batch.state_rows,
        )
        return StepOutput(
            tokens=tokens,
            logprobs=logprobs,
            top_tokens=top_tokens,
            top_logprobs=top_logprobs,
            logits=logits,
            features=features,
            states=states,
        )

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copies the first lines of a page into another."""
        self._core.copy_rows(source, target, rows)

    def read_page(self, page: int) -> bytes:
        """A page's bytes."""
        data: bytes = self._core.read_page(page)
        return data

    def write_page(self, page: int, data: bytes) -> None:
        """Overwrites a page."""
        self._core.write_page(page, data)

    def view_page(self, page: int) -> memoryview:
        """A page's own bytes, not a copy; see `tenfold.backends.base.PageViews`."""
        view: memoryview = self._core.view_page(page).data
        return view

    def set_bias(self, page: int, layer: int, head: int, values: Floats) -> None:
        """What is added to the scores of a KV head's 16 lines of a page; see `CompileOptions.kv_bias`.

        Values are numbers below infinity; -inf hides a line. A line that a step writes has 0 again. Raises
        ValueError for a page, layer or head that is not there, and where the program has no biases.
        """
        self._core.set_bias(page, layer, head, np.ascontiguousarray(values, np.float32))

    def close(self) -> None:
        """Stops the threads and frees the memory."""
        self._core = None


class NativeRecurrent:
    """A recurrent program of the core; see `tenfold.backends.base.RecurrentProgram`."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def unroll(self, batch: UnrollBatch) -> UnrollOutput:
        """Drafts all tokens in one call without the GIL."""
        tokens, logprobs = self._core.unroll(
            batch.features,
            batch.tokens,
            batch.seed,
            batch.position,
            batch.temperature,
            batch.lengths,
            batch.floor,
        )
        return UnrollOutput(tokens=tokens, logprobs=logprobs)

    def close(self) -> None:
        """Frees the memory, and stops the threads unless they are another program's too."""
        self._core = None
