"""Tiny models that can be served: random weights, a tokenizer of bytes, a chat template."""

from __future__ import annotations

from pathlib import Path

from tenfold.checkpoint.tokenizer_base import byte_level_alphabet
from tests.helpers.model_files import random_weights, tiny_config, write_gguf_model

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def write_tiny(path: Path, seed: int, family: str = "llama") -> str:
    """A GGUF file; another ``seed`` gives another model. Returns its path."""
    tokens = [*byte_level_alphabet(), "<|begin|>", "<|end|>"]
    config = tiny_config(family, vocab_size=len(tokens))
    tokenizer = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.chat_template": TEMPLATE,
    }
    return str(write_gguf_model(path, config, random_weights(config, seed), metadata=tokenizer))
