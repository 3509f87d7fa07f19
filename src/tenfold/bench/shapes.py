"""The shapes of known models, for files with random weights. Light, for the command line's help needs it."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

SynthFormat = Literal["q4_0", "q4_1", "q4_k", "q6_k", "q8_0", "bf16", "f32"]
SYNTH_FORMATS: tuple[SynthFormat, ...] = get_args(SynthFormat)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's published configuration says of its size. Rotary scalings are left out."""

    architecture: Literal["llama", "qwen2", "qwen3", "gemma3"]
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    """The output matrix is the embedding."""
    context: int
    rope_theta: float
    rms_epsilon: float
    window: int = 0
    """Of Gemma's sliding layers."""

    @property
    def parameters(self) -> int:
        """Weights in all, each matrix once, norms and biases included."""
        return sum(rows * cols for rows, cols in self.matrices().values()) + sum(self.vectors().values())

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows (outputs) and columns of each, by GGUF's name, in the order of the file."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found = {"token_embd": (self.vocab, self.hidden)}
        if not self.tied:
            found["output"] = (self.vocab, self.hidden)
        for layer in range(self.layers):
            parts = {
                "attn_q": (q, self.hidden),
                "attn_k": (kv, self.hidden),
                "attn_v": (kv, self.hidden),
                "attn_output": (self.hidden, q),
                "ffn_gate": (self.ffn, self.hidden),
                "ffn_up": (self.ffn, self.hidden),
                "ffn_down": (self.hidden, self.ffn),
            }
            found |= {f"blk.{layer}.{part}": sides for part, sides in parts.items()}
        return {f"{name}.weight": sides for name, sides in found.items()}

    def vectors(self) -> dict[str, int]:
        """Elements of each norm and bias, by GGUF's name."""
        parts = {"attn_norm.weight": self.hidden, "ffn_norm.weight": self.hidden}
        if self.architecture in ("qwen3", "gemma3"):
            parts |= {"attn_q_norm.weight": self.head_dim, "attn_k_norm.weight": self.head_dim}
        if self.architecture == "gemma3":
            parts |= {"post_attention_norm.weight": self.hidden, "post_ffw_norm.weight": self.hidden}
        if self.architecture == "qwen2":
            parts |= {"attn_q.bias": self.heads * self.head_dim}
            parts |= dict.fromkeys(("attn_k.bias", "attn_v.bias"), self.kv_heads * self.head_dim)
        found = {f"blk.{layer}.{part}": size for layer in range(self.layers) for part, size in parts.items()}
        return {"output_norm.weight": self.hidden, **found}


SHAPES = {
    "tiny": Shape(
        architecture="llama", hidden=256, layers=2, heads=4, kv_heads=2, head_dim=64, ffn=512, vocab=49152,
        tied=True, context=8192, rope_theta=1e5, rms_epsilon=1e-5,
    ),
    "smollm2-135m": Shape(
        architecture="llama", hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocab=49152,
        tied=True, context=8192, rope_theta=1e5, rms_epsilon=1e-5,
    ),
    "gemma3-270m": Shape(
        architecture="gemma3", hidden=640, layers=18, heads=4, kv_heads=1, head_dim=256, ffn=2048,
        vocab=262144, tied=True, context=32768, rope_theta=1e6, rms_epsilon=1e-6, window=512,
    ),
    "qwen2.5-0.5b": Shape(
        architecture="qwen2", hidden=896, layers=24, heads=14, kv_heads=2, head_dim=64, ffn=4864,
        vocab=151936, tied=True, context=32768, rope_theta=1e6, rms_epsilon=1e-6,
    ),
    "qwen3-0.6b": Shape(
        architecture="qwen3", hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, ffn=3072,
        vocab=151936, tied=True, context=40960, rope_theta=1e6, rms_epsilon=1e-6,
    ),
    "llama-1b": Shape(
        architecture="llama", hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192,
        vocab=128256, tied=True, context=131072, rope_theta=5e5, rms_epsilon=1e-5,
    ),
    "llama-8b": Shape(
        architecture="llama", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336,
        vocab=128256, tied=False, context=131072, rope_theta=5e5, rms_epsilon=1e-5,
    ),
}  # fmt: skip
"""By the name that `tenfold synth` takes, smallest first."""
