"""Transformers' side of peers.py: forward passes with its own cache, eager, on the CPU; no drawing of tokens.

The weights are a folder with the file's dequantized weights. Prompts stay in caches from turn to turn.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from pipe import serve


class Worker:
    """One model, and its caches by prompt."""

    def load(self, model: str, threads: int, dtype: str) -> dict[str, Any]:
        """Loads the folder ``model``; ``dtype`` is that of weights and computation."""
        began = time.perf_counter()
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._model.eval()
        self._caches: dict[str, Any] = {}
        return {
            "about": f"transformers {transformers.__version__}, torch {torch.__version__}, {dtype}",
            "load_s": time.perf_counter() - began,
        }

    def prefill(self, ids: list[int]) -> float:
        """Seconds for these tokens over an empty cache."""
        return self._time(transformers.DynamicCache(), [torch.tensor([ids])])

    def decode(self, ids: list[int], depth: int) -> float:
        """Seconds for the tokens after the first ``depth``, one by one, those in the cache."""
        cache = self._at(torch.tensor([ids[:depth]]))
        return self._time(cache, [torch.tensor([[token]]) for token in ids[depth:]])

    def verify(self, ids: list[int], depth: int, rows: int, steps: int) -> list[float]:
        """Seconds of each of ``steps`` steps of ``rows`` rows after the first ``depth``, all with logits."""
        draft = torch.tensor([ids[depth : depth + rows]])
        return [self._time(self._at(torch.tensor([ids[:depth]])), [draft], wanted=rows) for _ in range(steps)]

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        """Tokens/s of a sequence for each prompt, decoded together: ``tokens`` each, of which the first is
        the prompt's and not counted."""
        whole = torch.tensor(prompts)
        steps = [whole[:, at : at + 1] for at in range(tokens - 1)]
        seconds = self._time(self._at(whole), steps)
        return {"tokens_per_s": len(prompts) * (tokens - 1) / seconds}

    def _at(self, prompt: torch.Tensor) -> Any:
        """A cache that holds ``prompt`` and nothing else."""
        key = str(prompt.tolist())
        if key not in self._caches:
            cache = transformers.DynamicCache()
            self._time(cache, [prompt])
            self._caches[key] = cache
        cache = self._caches[key]
        if (beyond := cache.get_seq_length() - prompt.shape[1]) > 0:
            cache.crop(-beyond)
        return cache

    def _time(self, cache: Any, steps: list[torch.Tensor], wanted: int = 1) -> float:
        began = time.perf_counter()
        for ids in steps:
            self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=wanted)
        return time.perf_counter() - began


if __name__ == "__main__":
    worker = Worker()
    serve(
        {
            "load": worker.load,
            "prefill": worker.prefill,
            "decode": worker.decode,
            "verify": worker.verify,
            "streams": worker.streams,
        }
    )
