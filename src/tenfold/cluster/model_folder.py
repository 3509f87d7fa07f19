"""A model's text side as a Hugging Face folder: what Dynamo's front reads, made from a GGUF file.

Dynamo's front tokenizes, fills in the chat template and turns tokens into text by itself, from
``tokenizer.json``, ``tokenizer_config.json``, ``config.json`` and ``generation_config.json``. Weights are not
in the folder. What is written gives the same tokens as `tenfold.checkpoint.tokenizer`, which is checked.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library
from tokenizers import decoders, processors

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.gguf_checkpoint import GGUFCheckpoint
from tenfold.checkpoint.open import check_path
from tenfold.checkpoint.tokenizer import Tokenizer
from tenfold.checkpoint.tokenizer_gguf import BytePairEncoder, read_gguf_tokenizer

_TEXT_FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    *("chat_template.jinja", "special_tokens_map.json"),
)
_SAMPLES = (
    "Hello, world! It's 12,345.67 o'clock.\n\n\tdef f(x):\n        return x**2  # \x00\x01\x04 caf\xe9\r\n",
    "  \u5317\u4eac \U0001f600 na\xefve \u03bb\u00a0x   ",
)


def write_model_folder(model: Path, folder: Path) -> int | None:
    """Writes the text side of ``model`` (a GGUF file, or a Hugging Face folder, whose files are copied) into
    ``folder``. Returns the token that stands for bytes without a token, which workers must drop; None: there
    is none. Raises CheckpointError for a model whose tokenizer cannot be written so."""
    check_path(str(model))
    folder.mkdir(parents=True, exist_ok=True)
    if model.is_dir():
        for name in _TEXT_FILES:
            if (model / name).exists():
                shutil.copyfile(model / name, folder / name)
        return None
    checkpoint = GGUFCheckpoint(str(model))
    try:
        metadata, config = checkpoint.metadata, checkpoint.config
    finally:
        checkpoint.close()
    parts = read_gguf_tokenizer(metadata)
    if not isinstance(parts.encoder, BytePairEncoder):
        raise CheckpointError(
            f"{model}: its tokenizer is SentencePiece's; a tokenizer.json cannot be made of that yet. Give "
            "the model's Hugging Face folder instead"
        )
    library, hole = parts.encoder.library(), parts.encoder.hole
    library.decoder = decoders.ByteLevel()
    around = [("prefix", parts.prefix), ("suffix", parts.suffix)]
    if any(tokens for _, tokens in around):
        names = {token: parts.pieces[token].decode() for _, tokens in around for token in tokens}
        before, after = ([names[token] for token in tokens] for _, tokens in around)
        library.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", "$B", *after],
            special_tokens=[(name, token) for token, name in names.items()],
        )
    library.save(str(folder / "tokenizer.json"))
    _check(Tokenizer(parts), folder, hole)
    ends = {"eos_token_id": list(parts.eos_token_ids)}
    if parts.bos_token_id is not None:
        ends["bos_token_id"] = parts.bos_token_id  # type: ignore[assignment]
    _write(folder / "config.json", {**config, **ends})
    _write(folder / "generation_config.json", ends)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(parts.prefix),
        "add_eos_token": bool(parts.suffix),
        **parts.named_tokens,
    }
    if templates := _templates(metadata):
        settings["chat_template"] = templates
    _write(folder / "tokenizer_config.json", settings)
    return hole


def _templates(metadata: dict[str, Any]) -> str | list[dict[str, str]] | None:
    key = "tokenizer.chat_template"
    named = {
        name[len(key) + 1 :] or "default": text
        for name, text in metadata.items()
        if name == key or name.startswith(key + ".")
    }
    if set(named) <= {"default"}:
        return named.get("default")
    return [{"name": name, "template": text} for name, text in named.items()]


def _check(ours: Tokenizer, folder: Path, hole: int | None) -> None:
    """Raises CheckpointError unless the file that was written gives our own tokens, and their text back."""
    written = Library.from_file(str(folder / "tokenizer.json"))
    names = "".join(ours.token_bytes(token).decode(errors="replace") for token in sorted(ours.special_ids))
    for text in (*_SAMPLES, names):
        for around in (False, True):
            expected = ours.encode(text, add_special_tokens=around)
            ids = [token for token in written.encode(text, add_special_tokens=around).ids if token != hole]
            if ids != expected or written.decode(ids, skip_special_tokens=False) != ours.decode(ids, False):
                raise CheckpointError(
                    f"{folder / 'tokenizer.json'}: the tokenizer of this model cannot be written for Dynamo: "
                    f"it gives other tokens for {text[:40]!r}; give the model's Hugging Face folder instead"
                )


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
