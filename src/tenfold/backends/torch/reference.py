"""The reference backend: every op as it is written down, in float64. Others are compared to it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from tenfold.backends.base import (
    PAGE_ROWS,
    CompileOptions,
    Floats,
    FormatName,
    Int32s,
    IsaName,
    Program,
    ProgramInfo,
    StepBatch,
    StepOutput,
    WeightReport,
)
from tenfold.backends.features import feature_columns
from tenfold.backends.sampling import sample
from tenfold.backends.torch import functions
from tenfold.backends.torch.batches import check_batch
from tenfold.backends.torch.recurrent import TorchRecurrent
from tenfold.backends.unrolling import check_recurrent
from tenfold.checkpoint.base import Checkpoint, CheckpointError
from tenfold.graph.graph import Graph
from tenfold.graph.ops import Attention, Embed, Input, Rope, SelectRows, WeightSpec
from tenfold.graph.recurrent import RecurrentGraph
from tenfold.graph.states import final_states
from tenfold.graph.validate import describe

Tensor = functions.Tensor


class TorchBackend:
    """Runs the unfused graph over dequantized weights.

    ``dtype`` is that of all weights, activations and KV rows. ``kv_bf16`` rounds K and V to bfloat16 as they
    are written, as the native backend stores them.
    """

    name = "torch"

    def __init__(self, dtype: Literal["float64", "float32"] = "float64", kv_bf16: bool = False) -> None:
        self._dtype = {"float64": torch.float64, "float32": torch.float32}[dtype]
        self._kv_bf16 = kv_bf16

    def compile(self, graph: Graph, checkpoint: Checkpoint, options: CompileOptions) -> TorchProgram:
        """Loads the weights in the formats that ``options.format`` asks for, then as floats.

        Raises CheckpointError for a missing weight or a shape that differs, ValueError for options that make
        no sense.
        """
        if options.kv_pages <= 0 or options.max_rows <= 0 or options.max_logit_rows <= 0:
            raise ValueError("kv_pages, max_rows and max_logit_rows must be positive")
        if options.isa not in ("auto", "portable"):
            raise ValueError(f"the torch backend has no isa {options.isa!r}; leave it at auto")
        feature_columns(graph, options.taps)  # that all of them exist
        if inputs := [op for op in graph.ops if isinstance(op, Input)]:
            raise ValueError(f"{describe(inputs[0])}: a step has no such value; only recurrent programs have")
        if options.threads:
            torch.set_num_threads(options.threads)  # torch has one team for the whole process
        weights: dict[str, Tensor] = {}
        reports: list[WeightReport] = []
        for spec in graph.weights.values():
            weight, report = _load(spec, checkpoint, options.format, self._dtype)
            weights[spec.name] = weight
            reports.append(report)
        pools = [
            torch.zeros((options.kv_pages, 2, PAGE_ROWS, kv.heads, kv.head_dim), dtype=self._dtype)
            for kv in graph.kv
        ]
        biases = [
            torch.zeros((options.kv_pages, PAGE_ROWS, kv.heads), dtype=self._dtype)
            for kv in graph.kv
            if options.kv_bias
        ]
        info = ProgramInfo(
            backend=self.name,
            threads=torch.get_num_threads(),
            threads_why="as asked for" if options.threads else "torch's own number",
            isa="portable",
            isa_why="torch chooses its own kernels",
            max_rows=options.max_rows,
            max_logit_rows=options.max_logit_rows,
            vocab_size=graph.vocab_size,
            max_context=graph.max_context,
            kv_pages=options.kv_pages,
            kv_format="bf16" if self._kv_bf16 else str(self._dtype).removeprefix("torch."),
            page_bytes=sum(pool[0].numel() * pool.element_size() for pool in [*pools, *biases]),
            weight_bytes=sum(report.bytes for report in reports),
            weights=tuple(reports),
            state_width=0 if (states := final_states(graph)) is None else states.norm.width,
        )
        return TorchProgram(graph, weights, pools, biases, info, self._kv_bf16, options.taps)

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
    ) -> TorchRecurrent:
        """See `tenfold.backends.base.RecurrentBackend`. In float64, whatever `dtype`; torch has one team for
        all, so ``team_of`` says nothing here."""
        if isa not in ("auto", "portable"):
            raise ValueError(f"the torch backend has no isa {isa!r}; leave it at auto")
        ids = check_recurrent(graph, token_ids, vocab_size, max_sequences)
        if threads:
            torch.set_num_threads(threads)
        specs = {**graph.first.weights, **graph.next.weights}
        weights = {name: _load(spec, checkpoint, format, torch.float64)[0] for name, spec in specs.items()}
        return TorchRecurrent(graph, weights, ids, vocab_size, max_sequences)


class TorchProgram:
    """A graph, its weights ``[out, in]``, and a pool ``[pages, K or V, 16, heads, head_dim]`` per layer; with
    biases, ``[pages, 16, heads]`` per layer too."""

    def __init__(
        self,
        graph: Graph,
        weights: dict[str, Tensor],
        pools: list[Tensor],
        biases: list[Tensor],
        info: ProgramInfo,
        kv_bf16: bool,
        taps: tuple[str, ...],
    ) -> None:
        self.info = info
        self._graph = graph
        self._weights = weights
        self._pools = pools
        self._biases = biases
        self._kv_bf16 = kv_bf16
        self._taps = taps

    def step(self, batch: StepBatch) -> StepOutput:
        """Runs one step. Raises ValueError for a batch that does not fit; nothing is written then."""
        if batch.want_features and not self._taps:
            raise ValueError("step: features are wanted, but the program was compiled without taps")
        if batch.state_rows is not None and not self.info.state_width:
            raise ValueError("step: states are wanted, but the program has none")
        values = self._values(batch)
        logits = values[self._graph.ops[-1].output].to(torch.float32).numpy()
        tokens, logprobs, top_tokens, top_logprobs = sample(logits, batch.sampling)
        return StepOutput(
            tokens=tokens,
            logprobs=logprobs,
            top_tokens=top_tokens,
            top_logprobs=top_logprobs,
            logits=logits if batch.want_logits else None,
            features=self._features(batch, values) if batch.want_features else None,
            states=None if batch.state_rows is None else self._states(batch.state_rows, values),
        )

    def logits(self, batch: StepBatch) -> Tensor:
        """As `step`, but returns logits ``[N, vocab]`` in the program's own precision and draws nothing."""
        return self._values(batch)[self._graph.ops[-1].output]

    def _values(self, batch: StepBatch) -> dict[str, Tensor]:
        lines = torch.from_numpy(check_batch(batch, self.info))
        values: dict[str, Tensor] = {}
        with torch.inference_mode():
            for op in self._graph.ops:
                values[op.output] = self._run(op, [values[name] for name in op.inputs], batch, lines)
        return values

    def _features(self, batch: StepBatch, values: dict[str, Tensor]) -> Floats:
        selected, wanted = self._graph.selected, torch.from_numpy(batch.logit_rows).long()
        parts = [values[name] if name in selected else values[name][wanted] for name in self._taps]
        features: Floats = torch.cat(parts, dim=1).to(torch.float32).numpy()
        return features

    def _states(self, rows: Int32s, values: dict[str, Tensor]) -> Floats:
        found = final_states(self._graph)
        assert found is not None, "the step was checked"
        source = values[found.source][torch.from_numpy(rows).long()]
        normed = functions.row_wise(found.norm, [source], [self._weights[found.norm.weight.name]])
        states: Floats = normed.to(torch.float32).numpy()
        return states

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copies the first ``rows`` lines of page ``source``, all layers, into page ``target``."""
        self._check_page(source)
        self._check_page(target)
        if not 0 <= rows <= PAGE_ROWS:
            raise ValueError(f"a page has {PAGE_ROWS} rows, not {rows}")
        for pool in self._pools:
            pool[target, :, :rows] = pool[source, :, :rows]
        for bias in self._biases:
            bias[target, :rows] = bias[source, :rows]

    def set_bias(self, page: int, layer: int, head: int, values: Floats) -> None:
        """What is added to the scores of a KV head's 16 lines of a page; see `CompileOptions.kv_bias`."""
        self._check_page(page)
        if not self._biases:
            raise ValueError("the program was compiled without kv_bias")
        self._biases[layer][page, :, head] = torch.from_numpy(values).to(self._biases[layer].dtype)

    def read_page(self, page: int) -> bytes:
        """The page's bytes: by layer, K then V, ``[16, heads, head_dim]``, in the program's precision; then
        biases, if there are any, by layer, ``[16, heads]``."""
        self._check_page(page)
        return b"".join(pool[page].numpy().tobytes() for pool in [*self._pools, *self._biases])

    def write_page(self, page: int, data: bytes) -> None:
        """Overwrites a page."""
        self._check_page(page)
        if len(data) != self.info.page_bytes:
            raise ValueError(f"a page has {self.info.page_bytes} bytes, not {len(data)}")
        offset = 0
        for pool in [*self._pools, *self._biases]:
            target = pool[page].numpy()
            part = np.frombuffer(data, dtype=target.dtype, count=target.size, offset=offset)
            target[...] = part.reshape(target.shape)
            offset += part.nbytes

    def close(self) -> None:
        """Frees the memory; the program must not be used afterwards."""
        self._weights.clear()
        self._pools.clear()
        self._biases.clear()

    def _check_page(self, page: int) -> None:
        if not 0 <= page < self.info.kv_pages:
            raise ValueError(f"page {page} is not in 0..{self.info.kv_pages - 1}")

    def _run(self, op: Any, inputs: list[Tensor], batch: StepBatch, lines: Tensor) -> Tensor:
        weights = [self._weights[spec.name] for spec in op.weights]
        match op:
            case Embed():
                return weights[0][torch.from_numpy(batch.tokens).long()] * op.scale
            case Rope():
                return functions.rotate(inputs[0], torch.from_numpy(batch.positions), op)
            case Attention():
                return self._attention(op, inputs, batch, lines)
            case SelectRows():
                return inputs[0][torch.from_numpy(batch.logit_rows).long()]
        return functions.row_wise(op, inputs, weights)

    def _attention(self, op: Attention, inputs: list[Tensor], batch: StepBatch, lines: Tensor) -> Tensor:
        pool = self._pools[op.kv.layer]
        q = inputs[0].reshape(len(lines), op.heads, op.kv.head_dim)
        for half, rows in enumerate(inputs[1:]):
            kept = rows.to(torch.bfloat16).to(rows.dtype) if self._kv_bf16 else rows
            shaped = kept.reshape(len(lines), op.kv.heads, op.kv.head_dim)
            pool[lines // PAGE_ROWS, half, lines % PAGE_ROWS] = shaped
        biases = self._biases[op.kv.layer] if self._biases else None
        if biases is not None:
            biases[lines // PAGE_ROWS, lines % PAGE_ROWS] = 0
        output = torch.empty_like(inputs[0])
        for s, cached in enumerate(batch.cached_rows.tolist()):
            rows = slice(int(batch.row_offsets[s]), int(batch.row_offsets[s + 1]))
            pages = batch.pages[batch.page_offsets[s] : batch.page_offsets[s + 1]]
            used = torch.from_numpy(pages).long()
            seen = cached + rows.stop - rows.start
            keys, values = pool[used].transpose(0, 1).reshape(2, -1, op.kv.heads, op.kv.head_dim)[:, :seen]
            bias = None if biases is None else biases[used].reshape(-1, op.kv.heads)[:seen]
            output[rows] = functions.attend(
                q[rows], keys, values, cached, op.scale, op.softcap, op.kv.window, bias
            )
        return output


def _load(
    spec: WeightSpec, checkpoint: Checkpoint, requested: str, dtype: Any
) -> tuple[Tensor, WeightReport]:
    """A weight as a float tensor of the spec's shape, and what was done with it."""
    info = checkpoint.tensors().get(spec.name)
    if info is None:
        raise CheckpointError(f"{checkpoint.path}: has no tensor {spec.name}, which the model needs")
    if info.shape != spec.shape:
        raise CheckpointError(
            f"{info.file}: tensor {spec.name} at byte {info.offset} is {info.shape}, "
            f"the model needs {spec.shape}"
        )
    placement = checkpoint.place(spec.name, requested)
    parts = [block.dequantize() for _, block in checkpoint.rows(spec.name, placement.layout)]
    weight = torch.from_numpy(np.concatenate(parts)).to(dtype).reshape(spec.shape)
    report = WeightReport(
        name=spec.name,
        shape=spec.shape,
        stored_type=info.stored_type,
        format=placement.layout.format.value,
        bytes=weight.numel() * weight.element_size(),
        lossless=placement.lossless,
        why=placement.why,
    )
    return weight, report
