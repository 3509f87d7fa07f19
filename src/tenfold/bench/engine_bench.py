"""`tenfold bench`: what a model does on this machine, and how far from the memory's limit that is.

All figures are taken in turns, a little of each a round: what the machine does from second to second then
falls on all of them alike, and their ratios (the verify curve) can be trusted more than each.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tenfold import _native
from tenfold.backends.base import ProgramInfo, StepBatch
from tenfold.bench.engine_streams import run_streams
from tenfold.bench.figures import Figure, figure, table
from tenfold.bench.memory import peak_resident_bytes, read_bandwidth, resident_bytes
from tenfold.bench.prompts import windows
from tenfold.bench.stepping import FirstPages, OneSequence, compile_model, joined, pages_of
from tenfold.bench.version import version
from tenfold.checkpoint.locate import locate
from tenfold.config import ServeConfig, format_bytes
from tenfold.engine.engine import Engine
from tenfold.engine.limits import EngineConfig
from tenfold.progress import Progress
from tenfold.server.text import load_text

PREFILL_ROWS = 512
DEPTH = 256
DEEP = 4096
ROWS = (1, 2, 4, 8, 16)
STEPS_A_ROUND = 12
_DEEP, _TOGETHER = "decode_4096_tokens_per_s", "streams8_tokens_per_s"
STREAMS = (1, 8)
STREAM_TOKENS = 32
TOGETHER = 8
"""Sequences that are decoded in one step without an engine ..."""
TOGETHER_DEPTH = 128
"""... each with so many rows in the cache."""
TOTAL_S = 18.0
"""Rounds go on for this long, apart from loading, filling the cache and warming up ..."""
ROUNDS = (3, 40)
"""... but there are at least and at most so many."""


class EngineBench(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found."""

    model: str
    path: str
    version: str
    info: ProgramInfo
    rounds: int
    prefill_tokens_per_s: Figure
    step_ms: dict[int, Figure]
    """By rows of one sequence at depth 256, all with logits."""
    decode_4096_tokens_per_s: Figure | None
    """One sequence at that depth, its cache filled by prefill."""
    streams8_tokens_per_s: Figure | None
    """Eight sequences at depth 128 in one step, without an engine."""
    skipped: dict[str, str]
    """By name of a figure that is None: why."""
    engine: dict[int, Figure]
    """Decode tokens/s by concurrent requests."""
    read_bytes_per_s: float
    dot_products_per_s: float
    """Multiplications of two bytes out of registers that the threads can do: what no prefill of 8-bit or
    4-bit weights can exceed."""
    load_s: float
    load_rss_bytes: int
    peak_rss_bytes: int

    @property
    def decode_tokens_per_s(self) -> Figure:
        """One sequence: the inverse of the step of one row."""
        step = self.step_ms[1]
        return Figure(1e3 / step.median, 1e3 / step.p90, 1e3 / step.p10, step.count)

    @property
    def further(self) -> dict[str, Figure | None]:
        """The figures that not every model and setting allows."""
        return {
            _DEEP: self.decode_4096_tokens_per_s,
            _TOGETHER: self.streams8_tokens_per_s,
        }

    @property
    def fraction_of_bandwidth(self) -> float:
        """Of the bytes that could be read in a step's time, those that the weights take."""
        return self.info.weight_bytes * self.decode_tokens_per_s.median / self.read_bytes_per_s

    @property
    def fraction_of_dot_products(self) -> float | None:
        """Of the multiplications that could be made in a prefill's time, those of the layers' matrices; None
        where these are not multiplied as bytes."""
        layers = [
            weight for weight in self.info.weights if len(weight.shape) == 2 and ".layers." in weight.name
        ]
        if not layers or any(weight.format not in ("q8", "q4") for weight in layers):
            return None
        each = sum(weight.shape[0] * weight.shape[1] for weight in layers)
        return each * self.prefill_tokens_per_s.median / self.dot_products_per_s

    @property
    def formats(self) -> dict[str, int]:
        """Bytes of weights in memory by number format."""
        sizes: dict[str, int] = {}
        for weight in self.info.weights:
            sizes[weight.format] = sizes.get(weight.format, 0) + weight.bytes
        return sizes

    def to_json(self) -> dict[str, Any]:
        """For machines: medians, and the spread of each beside them."""
        prefill, decode, info = self.prefill_tokens_per_s, self.decode_tokens_per_s, self.info
        steps = {str(rows): found for rows, found in self.step_ms.items()}
        engine = {str(streams): found for streams, found in self.engine.items()}
        further = {name: found for name, found in self.further.items() if found}
        return {
            "model": self.model,
            "path": self.path,
            "version": self.version,
            "threads": info.threads,
            "isa": info.isa,
            "formats": self.formats,
            "weight_bytes": info.weight_bytes,
            "page_bytes": info.page_bytes,
            "kv_pages": info.kv_pages,
            "prefill_tokens_per_s": prefill.median,
            "decode_tokens_per_s": decode.median,
            **{name: found and found.median for name, found in self.further.items()},
            "skipped": self.skipped,
            "step_ms": {rows: found.median for rows, found in steps.items()},
            "engine": {streams: found.median for streams, found in engine.items()},
            "read_gb_per_s": self.read_bytes_per_s / 1e9,
            "fraction_of_bandwidth": self.fraction_of_bandwidth,
            "dot_products_per_s": self.dot_products_per_s,
            "fraction_of_dot_products": self.fraction_of_dot_products,
            "load_s": self.load_s,
            "load_rss_bytes": self.load_rss_bytes,
            "peak_rss_bytes": self.peak_rss_bytes,
            "repeats": {
                "rounds": self.rounds,
                "prefill_tokens_per_s": prefill.count,
                **{name: found.count for name, found in further.items()},
                "step_ms": {rows: found.count for rows, found in steps.items()},
                "engine": {streams: found.count for streams, found in engine.items()},
            },
            "spread": {
                "prefill_tokens_per_s": _spread(prefill),
                "decode_tokens_per_s": _spread(decode),
                **{name: _spread(found) for name, found in further.items()},
                "step_ms": {rows: _spread(found) for rows, found in steps.items()},
                "engine": {streams: _spread(found) for streams, found in engine.items()},
            },
        }

    def text(self) -> str:
        """For people."""
        info, one = self.info, self.step_ms[1].median
        deep, together = (
            found.text() if found else f"not measured: {self.skipped[name]}"
            for name, found in self.further.items()
        )
        share = self.fraction_of_dot_products
        prefill = (
            []
            if share is None
            else [
                f"Prefill multiplies at {share:.0%} of the {self.dot_products_per_s / 1e9:.0f} billion bytes "
                f"a second that {info.threads} threads multiply out of registers."
            ]
        )
        formats = " + ".join(f"{format_bytes(size)} {name}" for name, size in sorted(self.formats.items()))
        rows = [
            (f"prefill, {PREFILL_ROWS} tokens", self.prefill_tokens_per_s.text(0), "tokens/s"),
            (f"decode at depth {DEPTH}", self.decode_tokens_per_s.text(), "tokens/s"),
            (f"decode at depth {DEEP}", deep, "tokens/s"),
            (f"{TOGETHER} sequences at depth {TOGETHER_DEPTH}", together, "tokens/s"),
            *(
                (f"step of {rows} row{'s' * (rows > 1)}, V = {found.median / one:.2f}", found.text(2), "ms")
                for rows, found in self.step_ms.items()
            ),
            *(
                (f"engine, {streams} request{'s' * (streams > 1)}", found.text(), "tokens/s")
                for streams, found in self.engine.items()
            ),
        ]
        return "\n".join(
            (
                f"{self.model} with {formats}; tenfold {self.version}, {info.isa}, {info.threads} threads",
                "",
                table(("figure", "median (p10 to p90)", "unit"), rows),
                "",
                f"A decode step reads {format_bytes(info.weight_bytes)} of weights: "
                f"{self.fraction_of_bandwidth:.0%} of the {self.read_bytes_per_s / 1e9:.1f} GB/s that "
                f"{info.threads} threads can read here.",
                *prefill,
                f"Loaded in {self.load_s:.2f} s; resident memory grew by at most "
                f"{format_bytes(self.load_rss_bytes)}; peak {format_bytes(self.peak_rss_bytes)}.",
            )
        )


def run(config: ServeConfig, as_json: bool) -> str:
    """Measures for about 30 seconds, longer where prefill is slow, and returns a table or one JSON object.

    Raises ValueError or OSError for a model or setting that cannot be used.
    """
    found = measure(config)
    return json.dumps(found.to_json()) if as_json else found.text()


def measure(config: ServeConfig, total_s: float = TOTAL_S) -> EngineBench:
    """The measurement behind `run`, over rounds of ``total_s`` seconds in all."""
    if config.kv_memory_bytes is not None:
        raise ValueError("kv_memory_bytes: the bench reserves what it needs and no more; leave it out")
    path = str(locate(config.model))
    # The raw steps have pages of their own, behind those that the engine hands out and caches.
    engine_pages = max(STREAMS) * pages_of(DEPTH + STREAM_TOKENS)
    deep_pages, short_pages = pages_of(DEEP + 1), pages_of(TOGETHER_DEPTH + 1)
    before = resident_bytes()
    began = time.perf_counter()
    program = compile_model(config, engine_pages + deep_pages + TOGETHER * short_pages)
    load_s = time.perf_counter() - began
    load_rss_bytes = max(0, peak_resident_bytes() - before)
    try:
        info = program.info
        bandwidth = read_bandwidth(info.threads)
        dot_products = _native.dot_product_peak(info.isa, info.threads)
        skipped = _skipped(info)
        prompts = windows(load_text(path).encode_prompt, DEEP // PREFILL_ROWS + 1, PREFILL_ROWS)
        deepest = PREFILL_ROWS if _DEEP in skipped else DEEP + 1
        sequence = OneSequence(program, engine_pages, list(itertools.chain(*prompts))[:deepest])
        first_page = engine_pages + deep_pages
        together = [
            OneSequence(program, first_page + number * short_pages, prompt[: TOGETHER_DEPTH + 1])
            for number, prompt in enumerate(prompts[:TOGETHER])
        ]
        engine = Engine(
            FirstPages(program, engine_pages),
            EngineConfig(max_batch_tokens=config.max_batch_tokens, max_running=config.max_running),
        )
        filling = sequence.prefill(min(deepest, DEEP))
        for one in together:
            filling += one.prefill(TOGETHER_DEPTH)
        steps = _single_steps(sequence, together, info, skipped)
        samples = _sample(sequence, steps, filling, engine, prompts, total_s)
        bandwidth = max(bandwidth, read_bandwidth(info.threads))
        dot_products = max(dot_products, _native.dot_product_peak(info.isa, info.threads))
    finally:
        program.close()
    return EngineBench(
        model=config.model_name,
        path=path,
        version=version(),
        info=info,
        rounds=len(samples["prefill"]),
        prefill_tokens_per_s=figure([PREFILL_ROWS / seconds for seconds in samples["prefill"]]),
        step_ms={
            rows: figure([1e3 * seconds for seconds in samples[f"step {rows}"]])
            for rows in ROWS
            if f"step {rows}" in samples
        },
        decode_4096_tokens_per_s=_tokens_per_s(samples, _DEEP, 1),
        streams8_tokens_per_s=_tokens_per_s(samples, _TOGETHER, TOGETHER),
        skipped=skipped,
        engine={streams: figure(samples[f"engine {streams}"]) for streams in STREAMS},
        read_bytes_per_s=bandwidth,
        dot_products_per_s=dot_products,
        load_s=load_s,
        load_rss_bytes=load_rss_bytes,
        peak_rss_bytes=peak_resident_bytes(),
    )


def _skipped(info: ProgramInfo) -> dict[str, str]:
    """Which of `EngineBench.further` cannot be measured, and why."""
    skipped: dict[str, str] = {}
    if info.max_context <= DEEP:
        skipped[_DEEP] = f"the model's context is {info.max_context} tokens"
    most = min(info.max_rows, info.max_logit_rows)
    if most < TOGETHER:
        skipped[_TOGETHER] = f"steps have at most {most} sequences here"
    return skipped


def _single_steps(
    sequence: OneSequence, together: list[OneSequence], info: ProgramInfo, skipped: dict[str, str]
) -> dict[str, StepBatch]:
    """The steps that are timed alone, by the names of their samples."""
    most = min(info.max_rows, info.max_logit_rows)
    steps = {f"step {rows}": sequence.batch(DEPTH, rows, wanted=rows) for rows in ROWS if rows <= most}
    if _DEEP not in skipped:
        steps[_DEEP] = sequence.batch(DEEP, 1, wanted=1)
    if _TOGETHER not in skipped:
        steps[_TOGETHER] = joined([one.batch(TOGETHER_DEPTH, 1, wanted=1) for one in together])
    return steps


def _sample(
    sequence: OneSequence,
    steps: dict[str, StepBatch],
    filling: list[StepBatch],
    engine: Engine,
    prompts: list[list[int]],
    total_s: float,
) -> dict[str, list[float]]:
    """Rounds of everything, after one to warm up: seconds of prefills and steps, tokens/s of the engine.

    ``filling`` computes the rows that ``steps`` find in the cache. They stay there: what is measured writes
    rows of the same sequences anew, with the same content.
    """
    prefill = sequence.prefill(PREFILL_ROWS)
    tasks: dict[str, Callable[[], list[float]]] = {"prefill": lambda: [sequence.time(prefill)]}
    for name, step in steps.items():
        tasks[name] = lambda step=step: [  # type: ignore[misc]
            sequence.time([step]) for _ in range(STEPS_A_ROUND)
        ]
    for streams in STREAMS:
        chosen = [prompt[:DEPTH] for prompt in prompts[:streams]]
        tasks[f"engine {streams}"] = lambda chosen=chosen: [  # type: ignore[misc]
            run_streams(engine, chosen, STREAM_TOKENS).tokens_per_s
        ]
    samples: dict[str, list[float]] = {name: [] for name in tasks}
    fewest, most = ROUNDS
    with Progress(len(filling), "steps", "filling the cache") as bar:
        for number, batch in enumerate(filling):
            bar.at(number)
            sequence.time([batch])
    with Progress(len(tasks), "measurements", "warming up") as bar:
        began = time.perf_counter()
        for number, (name, task) in enumerate(tasks.items()):
            bar.at(number, note=name)
            task()
        round_s = time.perf_counter() - began
    expected_s = max(total_s, fewest * round_s)
    with Progress(expected_s, "s", "measuring") as bar:
        began = time.perf_counter()
        for number in range(most):
            spent = time.perf_counter() - began
            if number >= fewest and spent >= total_s:
                break
            for name, task in tasks.items():
                bar.at(note=f"round {number + 1} of at least {fewest}, {name}")
                samples[name] += task()
                bar.at(min(expected_s, time.perf_counter() - began))
    return samples


def _tokens_per_s(samples: dict[str, list[float]], name: str, tokens: int) -> Figure | None:
    """Of steps that take these seconds and give ``tokens`` tokens each; None where it was not measured."""
    return figure([tokens / seconds for seconds in samples[name]]) if name in samples else None


def _spread(found: Figure) -> dict[str, float]:
    return {"p10": found.p10, "p90": found.p90}
