"""How far the native backend is from the float64 oracle and from transformers, on real English text.

    python benchmarks/accuracy.py smollm2                     # KL and greedy agreement of the served formats
    python benchmarks/accuracy.py smollm2 --transformers      # largest difference of F32 logits

The text is Python's own manual (`pydoc_data.topics`), which every installation has. Needs torch, and
transformers for the second form. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
from typing import Any

import numpy as np
import torch

from tenfold.backends.base import CompileOptions, Program, StepBatch
from tenfold.backends.native import NativeBackend
from tenfold.backends.steps import greedy
from tenfold.backends.torch.reference import TorchBackend
from tenfold.checkpoint.base import Checkpoint
from tenfold.checkpoint.locate import locate
from tenfold.checkpoint.open import open_checkpoint
from tenfold.checkpoint.tokenizer import Tokenizer
from tenfold.models.registry import build_graph

WINDOW = 512


def logits_of(program: Program, tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits after each token of one sequence, in chunks of 64 rows."""
    out = []
    pages = np.arange(-(-len(tokens) // 16), dtype=np.int32)
    for at in range(0, len(tokens), 64):
        part = np.array(tokens[at : at + 64], np.int32)
        rows = np.arange(len(part), dtype=np.int32)
        batch = StepBatch(
            tokens=part,
            positions=rows + np.int32(at),
            row_offsets=np.array([0, len(part)], np.int32),
            cached_rows=np.array([at], np.int32),
            page_offsets=np.array([0, len(pages)], np.int32),
            pages=pages,
            logit_rows=rows,
            sampling=greedy(len(part)),
            want_logits=True,
        )
        logits = program.step(batch).logits
        assert logits is not None
        out.append(logits)
    return np.concatenate(out)


def windows(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """``count`` stretches of the manual, from different topics."""
    topics = [t for _, t in sorted(pydoc_data.topics.topics.items()) if len(t) > 4000]
    texts = [tokenizer.encode(t, add_special_tokens=False)[:WINDOW] for t in topics]
    return [t for t in texts if len(t) == WINDOW][:count]


def compare(oracle: Program, native: Program, texts: list[list[int]]) -> dict[str, float]:
    """Mean and 99th percentile KL(oracle || native) in nats, and how often both argmaxes agree."""
    divergences, agree = [], []
    for tokens in texts:
        p = torch.from_numpy(logits_of(oracle, tokens)).double().log_softmax(-1)
        q = torch.from_numpy(logits_of(native, tokens)).double().log_softmax(-1)
        divergences.append((p.exp() * (p - q)).sum(-1))
        agree.append((p.argmax(-1) == q.argmax(-1)).double())
    kl = torch.cat(divergences)
    return {
        "positions": len(kl),
        "mean_kl": float(kl.mean()),
        "p99_kl": float(kl.quantile(0.99)),
        "greedy_agreement": float(torch.cat(agree).mean()),
    }


def transformers_model(checkpoint: Checkpoint) -> Any:
    """The checkpoint's dequantized weights in transformers, float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keep = {k: v for k, v in checkpoint.config.items() if v is not None and k != "architectures"}
    config = AutoConfig.for_model(**keep)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    state = {}
    for name in checkpoint.tensors():
        layout = checkpoint.place(name, "f32").layout
        blocks = [b.dequantize() for _, b in checkpoint.rows(name, layout)]
        shape = checkpoint.tensors()[name].shape
        state[name] = torch.from_numpy(np.concatenate(blocks).reshape(shape).copy())
    missing, unexpected = model.load_state_dict(state, strict=False)
    model.tie_weights()
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model


def main() -> None:
    """Runs one of the two comparisons."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--formats", default="auto", help="comma-separated: auto, q8, q4, bf16, f32")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--windows", type=int, default=0, help="stretches of 512 tokens (default 8, or 4)")
    args = parser.parse_args()
    path = locate(args.model)
    checkpoint = open_checkpoint(path)
    metadata = getattr(checkpoint, "metadata", None)
    tokenizer = Tokenizer.from_folder(path) if metadata is None else Tokenizer.from_gguf_metadata(metadata)
    graph = build_graph(checkpoint.config)
    texts = windows(tokenizer, args.windows or (4 if args.transformers else 8))

    def options(fmt: Any) -> CompileOptions:
        return CompileOptions(kv_pages=WINDOW // 16, max_rows=64, max_logit_rows=64, format=fmt)

    if args.transformers:
        native = NativeBackend().compile(graph, checkpoint, options("f32"))
        model = transformers_model(checkpoint)
        worst = 0.0
        for tokens in texts:
            with torch.no_grad():
                theirs = model(torch.tensor([tokens])).logits[0]
            ours = torch.from_numpy(logits_of(native, tokens))
            worst = max(worst, float((ours - theirs).abs().max()))
        print(json.dumps({"positions": len(texts) * WINDOW, "max_abs_difference": worst}))
        return
    for fmt in args.formats.split(","):
        # The oracle computes the same stored weights exactly: what is measured is the arithmetic.
        oracle = TorchBackend().compile(graph, checkpoint, options(fmt))
        native = NativeBackend().compile(graph, checkpoint, options(fmt))
        print(
            json.dumps({"format": fmt, "isa": native.info.isa, **compare(oracle, native, texts)}), flush=True
        )


if __name__ == "__main__":
    main()
