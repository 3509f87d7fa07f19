"""llama.cpp's side of peers.py, under a Python that has llama-cpp-python.

It uses llama.cpp's C interface as llama-bench does: whole batches through llama_decode, logits of the last
token alone (of all where drafts are checked), no sampling, llama.cpp's defaults wherever llama-bench leaves
them. A context for each depth keeps its prompt from turn to turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import llama_cpp
from pipe import serve

BATCH = 512
ROOM = 128
"""Rows of a context beyond its prompt."""


class Context:
    """A context of ``sequences`` sequences of up to ``tokens`` rows each. Lives as long as the process."""

    def __init__(self, model: Any, threads: int, tokens: int, sequences: int = 1, outputs: int = 1) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = tokens * sequences
        params.n_seq_max = sequences
        params.n_batch = params.n_ubatch = BATCH
        params.n_outputs_max_per_seq = outputs
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise ValueError("llama.cpp cannot make a context")
        self._memory = llama_cpp.llama_get_memory(self._context)

    def batch(self, rows: Sequence[tuple[int, int, int]], wanted: int) -> Any:
        """A batch of rows (token, position, sequence), with logits of the last ``wanted``."""
        batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for at, (token, position, sequence) in enumerate(rows):
            batch.token[at] = token
            batch.pos[at] = position
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = sequence
            batch.logits[at] = at >= len(rows) - wanted
        return batch

    def prompt(self, ids: Sequence[int], sequence: int = 0) -> list[Any]:
        """Batches that compute ``ids`` from position 0 on."""
        rows = [(token, position, sequence) for position, token in enumerate(ids)]
        return [self.batch(rows[at : at + BATCH], 1) for at in range(0, len(rows), BATCH)]

    def forget(self, rows: int) -> None:
        """Drops what every sequence has beyond its first ``rows`` rows."""
        if not llama_cpp.llama_memory_seq_rm(self._memory, -1, rows, -1):
            raise RuntimeError("llama_memory_seq_rm failed")

    def time(self, batches: Sequence[Any]) -> float:
        """Seconds that the batches take; they are freed."""
        began = time.perf_counter()
        for batch in batches:
            if llama_cpp.llama_decode(self._context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            llama_cpp.llama_synchronize(self._context)
        seconds = time.perf_counter() - began
        for batch in batches:
            llama_cpp.llama_batch_free(batch)
        return seconds


class Worker:
    """One model, and its contexts by what they hold."""

    def load(self, model: str, threads: int) -> dict[str, Any]:
        """Loads the GGUF file ``model``."""
        llama_cpp.llama_log_set(SILENT, None)
        llama_cpp.llama_backend_init()
        began = time.perf_counter()
        self._model = llama_cpp.llama_model_load_from_file(
            model.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {model}")
        self._threads = threads
        self._empty: Context | None = None
        self._deep: dict[tuple[int, ...], Context] = {}
        self._streams: dict[tuple[tuple[int, ...], ...], Context] = {}
        system = llama_cpp.llama_print_system_info().decode()
        flags = " ".join(part.split(" = 1")[0] for part in system.split(" | ") if " = 1" in part)
        return {
            "about": f"llama-cpp-python {llama_cpp.__version__}, {flags}",
            "load_s": time.perf_counter() - began,
        }

    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text`` with what the model wants around it."""
        data = text.encode()
        ids = (llama_cpp.llama_token * (len(data) + 8))()
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        count = llama_cpp.llama_tokenize(vocab, data, len(data), ids, len(ids), True, True)
        return list(ids[:count])

    def prefill(self, ids: list[int]) -> float:
        """Seconds for these tokens over an empty cache."""
        if self._empty is None:
            self._empty = Context(self._model, self._threads, len(ids))
        self._empty.forget(0)
        return self._empty.time(self._empty.prompt(ids))

    def decode(self, ids: list[int], depth: int) -> float:
        """Seconds for the tokens after the first ``depth``, one by one, those in the cache."""
        context = self._at(ids[:depth])
        return context.time(
            [context.batch([(token, depth + at, 0)], 1) for at, token in enumerate(ids[depth:])]
        )

    def verify(self, ids: list[int], depth: int, rows: int, steps: int) -> list[float]:
        """Seconds of each of ``steps`` steps of ``rows`` rows after the first ``depth``, all with logits."""
        found = []
        for _ in range(steps):
            context = self._at(ids[:depth])
            draft = [(ids[at], at, 0) for at in range(depth, depth + rows)]
            found.append(context.time([context.batch(draft, rows)]))
        return found

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        """Tokens/s of a sequence for each prompt, decoded together: ``tokens`` each, of which the first is
        the prompt's and not counted."""
        key = tuple(map(tuple, prompts))
        depth = len(prompts[0])
        if key not in self._streams:
            context = Context(self._model, self._threads, depth + ROOM, len(prompts))
            for sequence, prompt in enumerate(prompts):
                context.time(context.prompt(prompt, sequence))
            self._streams[key] = context
        context = self._streams[key]
        context.forget(depth)
        batches = [
            context.batch([(ids[at], depth + at, n) for n, ids in enumerate(prompts)], len(prompts))
            for at in range(tokens - 1)
        ]
        return {"tokens_per_s": len(prompts) * (tokens - 1) / context.time(batches)}

    def _at(self, prompt: list[int]) -> Context:
        """A context that holds ``prompt`` and nothing else."""
        key = tuple(prompt)
        if key not in self._deep:
            context = Context(self._model, self._threads, len(prompt) + ROOM, outputs=ROOM)
            context.time(context.prompt(prompt))
            self._deep[key] = context
        self._deep[key].forget(len(prompt))
        return self._deep[key]


def _ignore(level: int, text: bytes, data: Any) -> None:
    """The log goes nowhere."""


SILENT = llama_cpp.llama_log_callback(_ignore)  # the library keeps a pointer to it


if __name__ == "__main__":
    worker = Worker()
    serve(
        {
            "load": worker.load,
            "tokenize": worker.tokenize,
            "prefill": worker.prefill,
            "decode": worker.decode,
            "verify": worker.verify,
            "streams": worker.streams,
        }
    )
