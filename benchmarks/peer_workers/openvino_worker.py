"""OpenVINO GenAI's side of peers.py: its continuous batching pipeline, step by step.

OpenVINO reads the GGUF file itself. Steps include scheduling and drawing the most likely token. Its prefix
cache keeps the prompts that are decoded from, so that they are computed once.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai
from pipe import serve


class Worker:
    """One pipeline."""

    def load(self, model: str, threads: int) -> dict[str, Any]:
        """Loads the GGUF file ``model``."""
        began = time.perf_counter()
        schedule = openvino_genai.SchedulerConfig()
        schedule.enable_prefix_caching = True
        schedule.max_num_batched_tokens = 512
        schedule.cache_size = 2  # GB
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, schedule, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self._requests = 0
        return {
            "about": f"OpenVINO GenAI {openvino_genai.__version__}, continuous batching",
            "load_s": time.perf_counter() - began,
        }

    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text`` with what the model wants around it."""
        ids: list[int] = self._pipeline.get_tokenizer().encode(text).input_ids.data[0].tolist()
        return ids

    def prefill(self, ids: list[int]) -> float:
        """Seconds for as many tokens over an empty cache. The first is another each time: nothing of the
        rest is found in the prefix cache then."""
        request = self._add([1000 + self._requests, *ids[1:]], 1)  # a handle that is let go ends its request
        seconds = self._run_out()
        if _read(request) != 1:
            raise RuntimeError("the prompt was not computed")
        return seconds

    def decode(self, ids: list[int], depth: int) -> float:
        """Seconds for as many tokens as come after the first ``depth``, one by one, those in the cache."""
        request = self._add(ids[:depth], 1 + len(ids) - depth)
        while not request.can_read():
            self._pipeline.step()
        return self._run_out()

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        """Tokens/s of a request for each prompt of up to ``tokens`` tokens, from when all have their
        first."""
        requests = [self._add(prompt, tokens) for prompt in prompts]
        counts = [0] * len(prompts)
        while not all(counts):
            self._pipeline.step()
            for at, request in enumerate(requests):
                counts[at] += _read(request)
        left = len(prompts) * tokens - sum(counts)
        return {"tokens_per_s": left / self._run_out()}

    def _add(self, ids: list[int], tokens: int) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        self._requests += 1
        return self._pipeline.add_request(self._requests, openvino.Tensor(np.array([ids], np.int64)), config)

    def _run_out(self) -> float:
        """Seconds until no request has anything left to do."""
        began = time.perf_counter()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return time.perf_counter() - began


def _read(request: Any) -> int:
    """How many tokens there are to read; they are read."""
    count = 0
    while request.can_read():
        count += sum(len(output.generated_ids) for output in request.read().values())
    return count


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
