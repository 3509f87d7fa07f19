"""A tokenizer from a model folder as Hugging Face lays it out. tokenizer.json decides; the other files add to
it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.regular import open_regular, read_regular
from tenfold.checkpoint.tokenizer_base import (
    SPACE,
    TokenizerParts,
    byte_fallback_value,
    byte_level_alphabet,
    byte_level_piece,
)

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def library_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The library's ids for a text, other threads running meanwhile.

    Only its batches let go of Python's lock in every version. The fast ones leave out where in the text each
    token lies, which nobody asks for here and which takes half the time of a long text.
    """
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoding.ids
    return ids


class LibraryEncoder:
    """An encoder by the tokenizers library."""

    def __init__(self, with_special: Tokenizer, without_special: Tokenizer) -> None:
        self._with_special = with_special
        self._without_special = without_special

    def encode(self, text: str, parse_special: bool) -> list[int]:
        tokenizer = self._with_special if parse_special else self._without_special
        return library_ids(tokenizer, text)


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file. Raises CheckpointError, naming the file."""
    if not path.exists():
        return {}
    data = read_regular(path)
    try:
        value = json.loads(data)
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def token_name(value: Any) -> str | None:
    """The text of a special token in tokenizer_config.json: a string, or an object with its ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_folder_tokenizer(folder: Path) -> TokenizerParts:
    """The tokenizer in ``folder``. Raises CheckpointError, naming the file."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(
            f"{path} is missing; a folder with only tokenizer.model or vocab.json needs converting by"
            " transformers' AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    open_regular(path).close()  # the library opens it by itself, whatever it is
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more particular
        raise CheckpointError(f"{path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_json_object(folder / "tokenizer_config.json")
    named = {name: text for name in _NAMES if (text := token_name(config.get(name))) is not None}

    # The same tokenizer, but blind to special tokens in a text. Model, normalizer and rules are shared, not
    # copied.
    blind = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        blind.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        blind.pre_tokenizer = tokenizer.pre_tokenizer
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    for _, token in added:
        (blind.add_special_tokens if token.special else blind.add_tokens)([token])
    blind.encode_special_tokens = True
    for expected, token in added:
        if blind.token_to_id(token.content) != expected:
            raise CheckpointError(f"{path}: added_tokens: {token.content!r} has id {expected}, out of order")

    bos = _id_of(tokenizer, named.get("bos_token"), folder, "bos_token")
    eos = _id_of(tokenizer, named.get("eos_token"), folder, "eos_token")
    prefix, suffix = _surroundings(tokenizer, path)
    for key, token_id in (("add_bos_token", bos), ("add_eos_token", eos)):
        wanted = config.get(key)
        if not isinstance(wanted, bool) or token_id is None:
            continue
        around = prefix if key == "add_bos_token" else suffix
        if wanted != (token_id in around):
            changed = (*around, token_id) if wanted else tuple(t for t in around if t != token_id)
            prefix, suffix = (changed, suffix) if key == "add_bos_token" else (prefix, changed)
    return TokenizerParts(
        encoder=LibraryEncoder(tokenizer, blind),
        pieces=_pieces(tokenizer, path),
        special_ids=frozenset(token_id for token_id, token in added if token.special),
        prefix=prefix,
        suffix=suffix,
        bos_token_id=bos,
        eos_token_ids=_end_tokens(folder, eos, tokenizer.get_vocab_size()),
        named_tokens=named,
    )


def _id_of(tokenizer: Tokenizer, text: str | None, folder: Path, key: str) -> int | None:
    if text is None:
        return None
    token: int | None = tokenizer.token_to_id(text)
    if token is None:
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: {key} {text!r} is not in tokenizer.json")
    return token


def _surroundings(tokenizer: Tokenizer, path: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that the tokenizer puts before and after a text, found by asking it."""
    inner = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return tuple(whole[:start]), tuple(whole[start + len(inner) :])
    raise CheckpointError(f"{path}: post_processor changes the tokens of a text, which is not supported")


def _pieces(tokenizer: Tokenizer, path: Path) -> list[bytes]:
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    size = max(vocab.values(), default=-1) + 1
    if size > 4 * len(vocab) + 1024:
        raise CheckpointError(f"{path}: token ids up to {size - 1} for {len(vocab)} tokens")
    added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    kinds = set(_decoder_kinds(json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}))
    alphabet = byte_level_alphabet()
    pieces = [b""] * size
    if "ByteLevel" in kinds:
        for text, token in vocab.items():
            pieces[token] = byte_level_piece(text, alphabet)
    elif kinds & {"Metaspace", "ByteFallback"}:
        for text, token in vocab.items():
            byte = byte_fallback_value(text) if "ByteFallback" in kinds else None
            pieces[token] = text.replace(SPACE, " ").encode("utf-8") if byte is None else bytes((byte,))
    else:
        raise CheckpointError(
            f"{path}: decoder {sorted(kinds) or None} is not supported; ByteLevel and SentencePiece's"
            " (Metaspace, ByteFallback) are"
        )
    for token, text in added.items():
        # Gemma names its white-space tokens by SentencePiece's space.
        pieces[token] = (text if "ByteLevel" in kinds else text.replace(SPACE, " ")).encode("utf-8")
    return pieces


def _decoder_kinds(decoder: dict[str, Any]) -> Iterator[str]:
    if "type" in decoder:
        yield str(decoder["type"])
    for part in decoder.get("decoders", ()):
        yield from _decoder_kinds(part)


def _end_tokens(folder: Path, eos: int | None, count: int) -> tuple[int, ...]:
    """eos of tokenizer_config.json, then generation_config.json's, or where that names none config.json's."""
    found: list[int] = [] if eos is None else [eos]
    for file in ("generation_config.json", "config.json"):
        value = read_json_object(folder / file).get("eos_token_id")
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        for token in values:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise CheckpointError(
                    f"{folder / file}: eos_token_id {value!r} is not a token id or a list of them"
                )
        found += values
        break
    return tuple(dict.fromkeys(found))
