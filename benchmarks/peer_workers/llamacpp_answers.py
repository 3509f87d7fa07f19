"""llama.cpp's answers in speculation_peer.py, under a Python that has llama-cpp-python: plain, or with that
package's prompt lookup."""

from __future__ import annotations

import time
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from pipe import serve


class Worker:
    """One model with one context, which keeps the last prompt."""

    def load(self, model: str, threads: int, context: int, lookup: int = 0) -> dict[str, Any]:
        """Loads the GGUF file ``model``; ``lookup``: tokens of a draft, 0 for none."""
        self._model = llama_cpp.Llama(
            model,
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            n_batch=512,
            n_ubatch=512,
            logits_all=lookup > 0,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None,
            verbose=False,
        )
        return {"about": f"llama-cpp-python {llama_cpp.__version__}, lookup of {lookup} tokens"}

    def answer(self, ids: list[int], tokens: int, temperature: float, ends: list[int]) -> dict[str, Any]:
        """Up to ``tokens`` tokens, and the seconds for those after the first."""
        found: list[int] = []
        began = 0.0
        for token in self._model.generate(ids, top_k=0, top_p=1.0, min_p=0.0, temp=temperature):
            if not found:
                began = time.perf_counter()
            found.append(token)
            if token in ends or len(found) == tokens:
                break
        return {"tokens": found, "seconds": time.perf_counter() - began}


if __name__ == "__main__":
    worker = Worker()
    serve({"load": worker.load, "answer": worker.answer})
