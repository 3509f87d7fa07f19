"""The side of xllamacpp, llama.cpp's server in a wheel that is built for AVX2, in peers.py.

The wheel gives no steps, only a server in the process; the figures are the server's own timings of its
requests, drawing the most likely token included. It keeps prompts in slots of their own from turn to turn.
"""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xllamacpp
from pipe import serve

STREAM_SLOTS = 8
PREFILL_SLOT = STREAM_SLOTS
DEPTH_SLOTS = 2


class Worker:
    """One server."""

    def load(self, model: str, threads: int, context: int) -> dict[str, Any]:
        """Serves the GGUF file ``model``, with sequences of up to ``context`` tokens."""
        began = time.perf_counter()
        parameters = xllamacpp.CommonParams()
        parameters.model.path = model
        parameters.n_parallel = PREFILL_SLOT + 1 + DEPTH_SLOTS
        parameters.n_ctx = context * parameters.n_parallel
        parameters.kv_unified = False  # else a step of one sequence looks through the rows of all
        parameters.cache_ram_mib = 0  # prompts stay in their slots; nothing is copied aside
        parameters.n_batch = parameters.n_ubatch = 512
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
        parameters.port = 0
        parameters.verbosity = 0
        self._server = xllamacpp.Server(parameters)
        self._slots: dict[int, int] = {}
        system = xllamacpp.get_system_info()
        flags = " ".join(part.split(" = 1")[0].strip() for part in system.split("|") if " = 1" in part)
        return {
            "about": f"xllamacpp {xllamacpp.__version__} by its server, {flags}",
            "load_s": time.perf_counter() - began,
        }

    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text`` with what the model wants around it."""
        ids: list[int] = self._post("/tokenize", content=text, add_special=True)["tokens"]
        return ids

    def prefill(self, ids: list[int]) -> float:
        """Seconds for these tokens over an empty cache."""
        timings = self._complete(ids, 1, PREFILL_SLOT, cached=False)
        if timings["prompt_n"] != len(ids):
            raise RuntimeError(f"{timings['prompt_n']} tokens were computed, not {len(ids)}")
        return float(timings["prompt_ms"]) / 1e3

    def decode(self, ids: list[int], depth: int) -> float:
        """Seconds for as many tokens as come after the first ``depth``, one by one, those in the cache."""
        slot = self._slots.setdefault(depth, PREFILL_SLOT + 1 + len(self._slots))
        # The first token is the prompt's: its time is the prompt's too.
        timings = self._complete(ids[:depth], 1 + len(ids) - depth, slot, cached=True)
        return float(timings["predicted_ms"]) / 1e3

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        """Tokens/s of a request for each prompt, decoded together: ``tokens`` each, of which the first is
        the prompt's and not counted."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(
                pool.map(lambda at: self._complete(prompts[at], tokens, at, cached=True), range(len(prompts)))
            )
        seconds = max(timings["predicted_ms"] for timings in found) / 1e3
        return {"tokens_per_s": len(prompts) * (tokens - 1) / seconds}

    def _complete(self, prompt: list[int], tokens: int, slot: int, cached: bool) -> dict[str, Any]:
        """The server's timings of a greedy answer of ``tokens`` tokens."""
        answer = self._post(
            "/completion",
            prompt=prompt,
            n_predict=tokens,
            id_slot=slot,
            cache_prompt=cached,
            temperature=0,
            samplers=["temperature"],
            ignore_eos=True,
        )
        timings: dict[str, Any] = answer["timings"]
        if timings["predicted_n"] != tokens:
            raise RuntimeError(f"the server gave {timings['predicted_n']} tokens, not {tokens}")
        return timings

    def _post(self, path: str, **fields: Any) -> Any:
        request = urllib.request.Request(
            self._server.listening_address + path,
            json.dumps(fields).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            return json.load(response)


if __name__ == "__main__":
    worker = Worker()
    serve(
        {
            "load": worker.load,
            "tokenize": worker.tokenize,
            "prefill": worker.prefill,
            "decode": worker.decode,
            "streams": worker.streams,
        }
    )
