"""llama.cpp's answers in speculation_peer.py, by the server in the wheel xllamacpp, with a kind of its own
speculation that needs no second model."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

import xllamacpp
from pipe import serve


class Worker:
    """One server."""

    def load(self, model: str, threads: int, context: int, kind: str) -> dict[str, Any]:
        """Serves the GGUF file ``model``; ``kind``: as in ``common_speculative_type``."""
        parameters = xllamacpp.CommonParams()
        parameters.model.path = model
        parameters.n_parallel = 1
        parameters.n_ctx = context
        parameters.n_batch = parameters.n_ubatch = 512
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
        parameters.port = 0
        parameters.verbosity = 0
        named = getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind.upper()}")
        parameters.speculative.types = [named]
        self._server = xllamacpp.Server(parameters)
        return {"about": f"xllamacpp {xllamacpp.__version__} by its server, {kind}"}

    def answer(self, ids: list[int], tokens: int, temperature: float, ends: list[int]) -> dict[str, Any]:
        """Up to ``tokens`` tokens, and the seconds for those after the first. The server ends at the model's
        own end."""
        body = {
            "prompt": ids,
            "n_predict": tokens,
            "cache_prompt": True,
            "temperature": temperature,
            "samplers": ["temperature"],
            "return_tokens": True,
        }
        request = urllib.request.Request(
            self._server.listening_address + "/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        began = time.perf_counter()
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)
        timings = answer["timings"]
        seconds = timings["predicted_ms"] / 1e3
        if not 0 < seconds <= time.perf_counter() - began:
            raise RuntimeError(f"the server says that decoding took {seconds} s")
        return {"tokens": answer["tokens"], "seconds": seconds, "drafted": timings.get("draft_n", 0)}


if __name__ == "__main__":
    worker = Worker()
    serve({"load": worker.load, "answer": worker.answer})
