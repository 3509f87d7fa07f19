"""Decode throughput of an engine in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from tenfold.protocol import Chunk, Request, SamplingParams
from tenfold.worker.loop import EngineLike


class StreamsResult(msgspec.Struct, frozen=True):
    """What became of some requests that were computed together."""

    tokens_per_s: float
    """From the first token of any to the last of all; the first of each is not counted, for it is the
    prompt's."""
    outputs: list[list[int]]


def run_streams(engine: EngineLike, prompts: Sequence[Sequence[int]], tokens: int) -> StreamsResult:
    """Runs one greedy request of ``tokens`` tokens for each prompt, all at once.

    Raises RuntimeError when one ends early or fails, ValueError when the engine refuses it.
    """
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0)
    outputs: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        engine.add(Request(id=str(number), prompt=tuple(prompt), params=params))
        outputs[str(number)] = []
    first = last = 0.0
    while engine.has_work:
        chunks: list[Chunk] = engine.step()
        if not chunks:
            continue
        last = time.perf_counter()
        first = first or last
        for chunk in chunks:
            if chunk.finish not in (None, "length"):
                raise RuntimeError(f"a request ended with {chunk.finish}: {chunk.error}")
            outputs[chunk.id].extend(chunk.tokens)
    whole = list(outputs.values())
    return StreamsResult((sum(map(len, whole)) - len(whole)) / (last - first), whole)
