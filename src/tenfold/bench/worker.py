"""Tenfold's side of a comparison, as a `Peer`: ``python -m tenfold.bench.worker``."""

from __future__ import annotations

import sys
import time
from typing import Any

import msgspec

from tenfold.bench.engine_streams import run_streams
from tenfold.bench.memory import peak_resident_bytes, private_bytes, resident_bytes
from tenfold.bench.peers import Peer, answer_orders
from tenfold.bench.stepping import FirstPages, OneSequence, compile_model, pages_of
from tenfold.checkpoint.locate import locate
from tenfold.config import ServeConfig
from tenfold.engine.engine import Engine
from tenfold.engine.limits import EngineConfig
from tenfold.server.text import load_text


def start_worker(
    config: ServeConfig, *, raw_tokens: int = 0, engine_tokens: int = 0
) -> tuple[Peer, dict[str, Any]]:
    """A worker that has loaded the model, with KV pages for so many tokens of raw steps and of streams, and
    what it says of it; see `Worker.load`. Raises PeerError."""
    peer = Peer("tenfold", [sys.executable, "-m", "tenfold.bench.worker"])
    try:
        about: dict[str, Any] = peer.ask(
            "load", config=msgspec.to_builtins(config), raw_tokens=raw_tokens, engine_tokens=engine_tokens
        )
    except BaseException:
        peer.close()
        raise
    return peer, about


class Worker:
    """One model, its program, raw steps of it, and an engine over it on pages of its own."""

    def load(self, config: dict[str, Any], raw_tokens: int, engine_tokens: int) -> dict[str, Any]:
        """Compiles the model; what came of it, what a step of one row reads of it (``weight_bytes``), and
        what it took: resident memory at the peak, the file included, and private memory afterwards."""
        settings = msgspec.convert(config, ServeConfig)
        before, private_before = resident_bytes(), private_bytes()
        began = time.perf_counter()
        engine_pages = pages_of(engine_tokens)
        program = compile_model(settings, engine_pages + pages_of(raw_tokens))
        load_s = time.perf_counter() - began
        peak, private = peak_resident_bytes(), private_bytes()
        self._program = program
        self._free_page = engine_pages
        self._sequences: dict[int, tuple[list[int], OneSequence]] = {}
        if engine_pages:
            self._engine = Engine(
                FirstPages(program, engine_pages),
                EngineConfig(max_batch_tokens=settings.max_batch_tokens, max_running=settings.max_running),
            )
        self._path = str(locate(settings.model))
        info = program.info
        return {
            "threads": info.threads,
            "isa": info.isa,
            "max_context": info.max_context,
            "weight_bytes": info.weight_bytes,
            "packed_bytes": sum(weight.bytes for weight in info.weights),
            "load_s": load_s,
            "peak_growth_bytes": peak - before,
            "kept_growth_bytes": private - private_before,
        }

    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text`` with what the model wants around it."""
        return load_text(self._path).encode_prompt(text)

    def prefill(self, ids: list[int]) -> float:
        """Seconds for these tokens over an empty cache."""
        sequence = self._at(ids, 0)
        return sequence.time(sequence.prefill(len(ids)))

    def decode(self, ids: list[int], depth: int) -> float:
        """Seconds for the tokens after the first ``depth``, one by one, those in the cache."""
        sequence = self._at(ids, depth)
        return sequence.time(sequence.decode(depth, len(ids) - depth))

    def verify(self, ids: list[int], depth: int, rows: int, steps: int) -> list[float]:
        """Seconds of each of ``steps`` steps of ``rows`` rows after the first ``depth``, all with logits."""
        sequence = self._at(ids, depth)
        batches = [sequence.batch(depth, rows, wanted=rows)]
        return [sequence.time(batches) for _ in range(steps)]

    def _at(self, ids: list[int], depth: int) -> OneSequence:
        """A sequence that holds the first ``depth`` of ``ids``. There is one for each depth, on pages of its
        own, so that what it holds is computed once; other tokens than before take more pages."""
        kept, sequence = self._sequences.get(depth, ([], None))
        if sequence is None or kept != ids:
            sequence = OneSequence(self._program, self._free_page, ids)
            self._free_page += pages_of(len(ids))
            if self._free_page > self._program.info.kv_pages:
                raise ValueError(f"the raw steps asked for so far need {self._free_page} pages of KV cache")
            self._sequences[depth] = ids, sequence
            sequence.time(sequence.prefill(depth))
        return sequence

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """See `run_streams`."""
        plain: dict[str, Any] = msgspec.to_builtins(run_streams(self._engine, prompts, tokens))
        return plain


def main() -> None:
    """Answers orders until standard input ends."""
    worker = Worker()
    answer_orders(
        {
            "load": worker.load,
            "tokenize": worker.tokenize,
            "prefill": worker.prefill,
            "decode": worker.decode,
            "verify": worker.verify,
            "streams": worker.streams,
        }
    )


if __name__ == "__main__":
    main()
