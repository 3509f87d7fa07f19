"""vLLM's side of peers.py: its engine in this process, step by step, on the CPU.

The weights are a folder with the file's dequantized weights in BF16. Steps include scheduling and drawing the
most likely token. Its prefix cache keeps the prompts that are decoded from, so that they are computed once.
"""

from __future__ import annotations

import os
import time
from typing import Any

from pipe import serve


class Worker:
    """One engine."""

    def load(self, model: str, threads: int, context: int) -> dict[str, Any]:
        """Loads the folder ``model``, for sequences of up to ``context`` tokens."""
        # Read when vLLM is imported, and the only way to say these things.
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE="2",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_LOGGING_LEVEL="ERROR",
            OMP_NUM_THREADS=str(threads),
        )
        import vllm

        began = time.perf_counter()
        self._vllm = vllm
        self._llm = vllm.LLM(
            model=model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=context,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            enable_prefix_caching=True,
        )
        self._engine = self._llm.llm_engine
        self._requests = 0
        return {"about": f"vLLM {vllm.__version__}, bfloat16", "load_s": time.perf_counter() - began}

    def prefill(self, ids: list[int]) -> float:
        """Seconds for as many tokens over an empty cache. The first is another each time: nothing of the
        rest is found in the prefix cache then."""
        return self._run([[1000 + self._requests, *ids[1:]]], 1)[0]

    def decode(self, ids: list[int], depth: int) -> float:
        """Seconds for as many tokens as come after the first ``depth``, one by one, those in the cache."""
        return self._run([ids[:depth]], 1 + len(ids) - depth)[1]

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        """Tokens/s of a request for each prompt of up to ``tokens`` tokens, from when all have their
        first."""
        _, seconds, left = self._run(prompts, tokens)
        return {"tokens_per_s": left / seconds}

    def _run(self, prompts: list[list[int]], tokens: int) -> tuple[float, float, int]:
        """Seconds until all have their first token, seconds from there on, and tokens in the latter."""
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        counts: dict[str, int] = {}
        for prompt in prompts:
            self._requests += 1
            counts[str(self._requests)] = 0
            self._engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, params)
        began = time.perf_counter()
        while not all(counts.values()):
            for output in self._engine.step():
                counts[output.request_id] = len(output.outputs[0].token_ids)
        first = time.perf_counter()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return first - began, time.perf_counter() - first, len(prompts) * tokens - sum(counts.values())


if __name__ == "__main__":
    worker = Worker()
    serve(
        {"load": worker.load, "prefill": worker.prefill, "decode": worker.decode, "streams": worker.streams}
    )
