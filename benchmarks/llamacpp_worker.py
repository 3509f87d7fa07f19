"""llama.cpp's side of peer_llamacpp.py: orders as JSON lines on standard input, answers on standard output.

Runs under a Python that has llama-cpp-python; imports nothing of Tenfold. It uses llama.cpp's C interface as
llama-bench does: whole batches through llama_decode, logits of the last token only, no sampling, the KV cache
cleared between repeats, llama.cpp's defaults wherever llama-bench leaves them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import llama_cpp


class Worker:
    """One model and one context."""

    def load(self, model: str, threads: int, context: int) -> dict[str, Any]:
        """Loads the GGUF file ``model``."""
        llama_cpp.llama_log_set(SILENT, None)
        llama_cpp.llama_backend_init()
        began = time.perf_counter()
        self._model = llama_cpp.llama_model_load_from_file(
            model.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {model}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError("llama.cpp cannot make a context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        system = llama_cpp.llama_print_system_info().decode()
        return {
            "version": llama_cpp.__version__,
            "system": " ".join(part.split(" = 1")[0] for part in system.split(" | ") if " = 1" in part),
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
        """Seconds for one batch over an empty cache."""
        llama_cpp.llama_memory_clear(self._memory, False)
        return self._time([_batch(ids)])

    def decode(self, ids: list[int], depth: int) -> float:
        """Seconds for the tokens after the first ``depth``, one by one, those in the cache."""
        llama_cpp.llama_memory_clear(self._memory, False)
        self._time([_batch(ids[:depth])])
        return self._time([_batch([token]) for token in ids[depth:]])

    def _time(self, batches: list[Any]) -> float:
        began = time.perf_counter()
        for _, batch in batches:
            if llama_cpp.llama_decode(self._context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            llama_cpp.llama_synchronize(self._context)
        return time.perf_counter() - began


def _batch(ids: list[int]) -> Any:
    """A batch, and before it the array that it points into, to be kept as long."""
    array = (llama_cpp.llama_token * len(ids))(*ids)
    return array, llama_cpp.llama_batch_get_one(array, len(ids))


def _ignore(level: int, text: bytes, data: Any) -> None:
    """The log goes nowhere."""


SILENT = llama_cpp.llama_log_callback(_ignore)  # the library keeps a pointer to it


def main() -> None:
    """Answers orders until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the library prints goes to standard error
    worker = Worker()
    for line in sys.stdin:
        fields = json.loads(line)
        try:
            answer = {"answer": getattr(worker, fields.pop("order"))(**fields)}
        except (ValueError, RuntimeError) as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
