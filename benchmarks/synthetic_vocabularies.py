"""Small vocabularies in the form of GGUF metadata, trained on `varied_strings`: for kinds of tokenizer that
no model at hand has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from varied_strings import SPECIAL_TEXTS, varied_strings

CONTROL = ["<|begin_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
USER_DEFINED = ["<tool_call>", "</tool_call>", "def f("]


def _trained(tokenizer: Tokenizer, alphabet: list[str]) -> tuple[list[str], list[list[str]]]:
    """Tokens in order of id, and merges. Special texts are left out of the corpus, as in a model's
    training."""
    corpus = [text for text in varied_strings(6000, 99) if not any(name in text for name in SPECIAL_TEXTS)]
    trainer = trainers.BpeTrainer(
        vocab_size=4000, limit_alphabet=600, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(
        [text.replace(" ", "▁") for text in corpus] if not alphabet else corpus, trainer
    )
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].__getitem__), model["merges"]


def byte_level(pre: str) -> dict[str, Any]:
    """A byte-level vocabulary for the pre-tokenizer that GGUF calls ``pre``.

    Words for its training are cut wider than any pre-tokenizer would, so that merges cross its cuts and a cut
    that is not made shows in the ids.
    """
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r"\s*\S+|\s+"), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokens, merges = _trained(tokenizer, pre_tokenizers.ByteLevel.alphabet())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *CONTROL, *USER_DEFINED],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3] * len(CONTROL) + [4] * len(USER_DEFINED),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
    }


def sentence_piece(space_prefix: bool) -> dict[str, Any]:
    """A SentencePiece vocabulary with byte tokens, in Llama 2's manner; scores fall with the order of
    merging."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁]*"), "isolated")
    tokens, _ = _trained(tokenizer, [])
    words = [token for token in tokens if len(token) > 1] + [token for token in tokens if len(token) == 1]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *bytes_, *words, "<tool_call>"],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words) + [4],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(words))] + [0.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


def read_gguf_metadata(path: str | Path) -> dict[str, Any]:
    """Keys and values of the tokenizer in a GGUF file."""
    fields = gguf.GGUFReader(path).fields.items()
    return {key: field.contents() for key, field in fields if key.startswith("tokenizer.")}


def write_gguf(metadata: dict[str, Any], path: str | Path) -> None:
    """A GGUF file with a vocabulary and no weights."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
