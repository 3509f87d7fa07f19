from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.tokenizer import Tokenizer as OurTokenizer


def written(folder: Path, made: Tokenizer, **files: Any) -> Path:
    made.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def as_hugging_face_has_it(metadata: dict[str, Any], *words: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """The tokenizer.json that a byte-level GGUF vocabulary was made from."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    normal = {text: token for token, text in enumerate(tokens) if types[token] == 1}
    tokenizer = Tokenizer(models.BPE(vocab=normal, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(words))
    tokenizer.decoder = decoders.ByteLevel()
    for text, kind in zip(tokens, types, strict=True):
        if kind == 3:
            tokenizer.add_special_tokens([AddedToken(text, normalized=False)])
        elif kind == 4:
            tokenizer.add_tokens([AddedToken(text, normalized=False)])
    return tokenizer


QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def qwen(metadata: dict[str, Any]) -> Tokenizer:
    words = pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated")
    return as_hugging_face_has_it(metadata, words, pre_tokenizers.ByteLevel(False, use_regex=False))


def test_a_folder_and_a_gguf_file_of_one_model_agree(
    tmp_path: Path, byte_level_metadata: dict[str, Any], strings: list[str]
) -> None:
    """The same model has the same tokens whichever way it was stored; but for the long s, which a Hugging
    Face expression takes for an s and llama.cpp does not."""
    folder = written(tmp_path, qwen(byte_level_metadata))
    ours, gguf = OurTokenizer.from_folder(folder), OurTokenizer.from_gguf_metadata(byte_level_metadata)
    assert ours.vocab_size == gguf.vocab_size
    assert ours.special_ids == gguf.special_ids
    for token in range(gguf.vocab_size):
        assert ours.token_bytes(token) == gguf.token_bytes(token)
    for text in strings:
        for parse_special in (True, False):
            if "\N{LATIN SMALL LETTER LONG S}" not in text:
                expected = gguf.encode(text, add_special_tokens=False, parse_special=parse_special)
                found = ours.encode(text, add_special_tokens=False, parse_special=parse_special)
                assert found == expected


def test_smollm_s_expressions_are_hugging_face_s_pre_tokenizers(
    tmp_path: Path, byte_level_metadata: dict[str, Any], strings: list[str]
) -> None:
    """SmolLM2 was trained with single digits, then GPT-2's words; its GGUF file only names that."""
    metadata = {**byte_level_metadata, "tokenizer.ggml.pre": "smollm"}
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)
    ours = OurTokenizer.from_folder(written(tmp_path, as_hugging_face_has_it(metadata, digits, words)))
    gguf = OurTokenizer.from_gguf_metadata(metadata)
    for text in strings:
        assert ours.encode(text, add_special_tokens=False) == gguf.encode(text, add_special_tokens=False)


def test_a_folder_reads_as_transformers_reads_it(
    tmp_path: Path, byte_level_metadata: dict[str, Any], strings: list[str]
) -> None:
    """Ids, surroundings and text are transformers' own."""
    transformers = pytest.importorskip("transformers")
    tokenizer = qwen(byte_level_metadata)
    tokenizer.normalizer = normalizers.NFC()
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"},
        "clean_up_tokenization_spaces": False,
    }
    folder = written(tmp_path, tokenizer, tokenizer_config=config)
    ours, peer = OurTokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.adds_bos
    assert (ours.bos_token_id, ours.eos_token_ids) == (peer.bos_token_id, (peer.eos_token_id,))
    for text in strings:
        ids = ours.encode(text, add_special_tokens=True)
        assert ids == peer.encode(text)
        assert ours.decode(ids) == peer.decode(ids, skip_special_tokens=True)


def test_sentence_piece_folders(tmp_path: Path) -> None:
    """Byte tokens are bytes, and SentencePiece's space is a space: in words and in white-space tokens."""
    vocab = {"<unk>": 0, "<0x0A>": 1, "▁": 2, "a": 3, "▁a": 4}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens([AddedToken("▁▁", normalized=False)])
    ours = OurTokenizer.from_folder(written(tmp_path, tokenizer))
    assert [ours.token_bytes(token) for token in range(1, 6)] == [b"\n", b" ", b"a", b" a", b"  "]
    assert ours.decode(ours.encode("a a\n", add_special_tokens=False)) == "a a\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, ["<|im_end|>"]),
        ({"generation_config": {"eos_token_id": [4001, 4003]}}, [4001, 4003]),
        ({"generation_config": {"eos_token_id": 4003}, "config": {"eos_token_id": 1}}, [4003]),
        ({"generation_config": {}, "config": {"eos_token_id": 7}}, [7]),
        (
            {"tokenizer_config": {"eos_token": "<|im_end|>"}, "generation_config": {"eos_token_id": [5]}},
            ["<|im_end|>", 5],
        ),
    ],
)
def test_end_tokens_come_from_every_file_that_names_them(
    tmp_path: Path, byte_level_metadata: dict[str, Any], files: dict[str, Any], expected: list[Any]
) -> None:
    """An answer ends where its model says; generation_config.json counts before config.json."""
    tokenizer = qwen(byte_level_metadata)
    ids = tuple(tokenizer.token_to_id(token) if isinstance(token, str) else token for token in expected)
    assert OurTokenizer.from_folder(written(tmp_path, tokenizer, **files)).eos_token_ids == ids


@pytest.mark.parametrize("wanted", [True, False])
def test_add_bos_token_in_the_configuration_counts(
    tmp_path: Path, byte_level_metadata: dict[str, Any], wanted: bool
) -> None:
    """tokenizer_config.json may switch bos on or off, whatever tokenizer.json does."""
    tokenizer = qwen(byte_level_metadata)
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    if not wanted:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
        )
    config = {"bos_token": "<|begin_of_text|>", "add_bos_token": wanted}
    ours = OurTokenizer.from_folder(written(tmp_path, tokenizer, tokenizer_config=config))
    assert ours.adds_bos is wanted
    assert (ours.encode("a", add_special_tokens=True)[0] == bos) is wanted


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer": None}, "tokenizer.json is missing"),
        ({"tokenizer": {"model": 3}}, "tokenizer.json: "),
        ({"tokenizer_config": {"eos_token": "<nosuch>"}}, "tokenizer_config.json: eos_token '<nosuch>'"),
        ({"tokenizer_config": []}, "not a JSON object"),
        ({"generation_config": {"eos_token_id": "x"}}, "generation_config.json: eos_token_id"),
    ],
)
def test_a_broken_folder_is_refused_by_file(
    tmp_path: Path, byte_level_metadata: dict[str, Any], files: dict[str, Any], said: str
) -> None:
    """The error names the file to mend."""
    written(
        tmp_path,
        qwen(byte_level_metadata),
        **{name: value for name, value in files.items() if value is not None},
    )
    if files.get("tokenizer", 0) is None:
        (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=said):
        OurTokenizer.from_folder(tmp_path)


def test_a_decoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    """WordPiece and the like have no bytes per token: streaming them would be a guess."""
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="WordPiece"):
        OurTokenizer.from_folder(written(tmp_path, tokenizer))
