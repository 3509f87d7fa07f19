"""What a model says of its pooling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.folder import FolderCheckpoint
from tenfold.checkpoint.gguf_checkpoint import GGUFCheckpoint
from tenfold.checkpoint.pooling import UNSAID, folder_pooling, gguf_pooling
from tenfold.formats.matrix import Format, Layout
from tenfold.models.registry import build_graph
from tests.checkpoint.test_gguf_checkpoint import read
from tests.helpers.model_files import random_weights, tiny_config, write_folder, write_gguf_model

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def pooling(path: str = "1_Pooling") -> dict[str, Any]:
    return {"idx": 1, "name": "1", "path": path, "type": "sentence_transformers.models.Pooling"}


def folder(path: Path, modules: Any, config: dict[str, Any] | None, where: str = "1_Pooling") -> Path:
    path.mkdir(exist_ok=True)
    if modules is not None:
        (path / "modules.json").write_text(json.dumps(modules))
    if config is not None:
        (path / where).mkdir()
        (path / where / "config.json").write_text(json.dumps(config))
    return path


def modes(**on: bool) -> dict[str, Any]:
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    return {"word_embedding_dimension": 64} | {f"pooling_mode_{name}": on.get(name, False) for name in names}


@pytest.mark.parametrize(
    ("config", "kind", "why"),
    [
        (modes(mean_tokens=True), "mean", "its 1_Pooling/config.json says so"),
        (modes(lasttoken=True), "last", "its 1_Pooling/config.json says so"),
        ({"pooling_mode": "mean"}, "mean", "says so"),
        ({"pooling_mode": ["lasttoken"]}, "last", "says so"),
        (modes(cls_token=True), None, "asks for pooling_mode_cls_token, which is not supported"),
        (modes(mean_tokens=True, max_tokens=True), None, "pooling_mode_mean_tokens, pooling_mode_max_tokens"),
        (modes(), None, "asks for no mode"),
        ({"pooling_mode": "weightedmean"}, None, "asks for weightedmean"),
    ],
)
@pytest.mark.parametrize("listed", [True, False])
def test_sentence_transformers_pooling(
    tmp_path: Path, config: dict[str, Any], kind: str | None, why: str, listed: bool
) -> None:
    """As modules.json names its place, or at the usual one: mean and last are had, and what else a model was
    trained with is told and not replaced."""
    rule = folder_pooling(folder(tmp_path, [TRANSFORMER, pooling(), NORMALIZE] if listed else None, config))
    assert rule.kind == kind and why in rule.why


def test_what_stands_behind_the_model_is_not_passed_over(tmp_path: Path) -> None:
    """A dense layer behind the pooling changes the vector, so there is no default then; a pooling elsewhere
    is found; a model that says nothing has the mean."""
    rule = folder_pooling(folder(tmp_path / "a", [TRANSFORMER, pooling(), DENSE], modes(mean_tokens=True)))
    assert rule.kind is None and "module Dense" in rule.why
    moved = folder(tmp_path / "b", [TRANSFORMER, pooling("p")], modes(lasttoken=True), "p")
    assert folder_pooling(moved).kind == "last"
    assert folder_pooling(folder(tmp_path / "c", [TRANSFORMER], None)) == UNSAID
    assert folder_pooling(folder(tmp_path / "d", None, None)) == UNSAID
    assert UNSAID.kind == "mean"


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        ("{", "cannot be read"),
        ('{"a": 1}', "not a list of modules"),
        ("[5]", "not a list of modules"),
        (json.dumps([pooling("../elsewhere")]), "leads out of the folder"),
    ],
)
def test_damaged_modules_are_named(tmp_path: Path, modules: str, says: str) -> None:
    """With the file that is damaged."""
    (tmp_path / "modules.json").write_text(modules)
    with pytest.raises(CheckpointError, match=rf"modules\.json: .*{says}"):
        folder_pooling(tmp_path)


@pytest.mark.parametrize(
    ("value", "kind", "why"),
    [
        (None, "mean", "says nothing"),
        (0, "mean", "says nothing"),
        (1, "mean", "qwen3.pooling_type says so"),
        (3, "last", "qwen3.pooling_type says so"),
        (2, None, "is cls, which is not supported"),
        (4, None, "is rank"),
        (9, None, "is 9"),
        ("last", None, "is 'last'"),
    ],
)
def test_gguf_pooling(value: Any, kind: str | None, why: str) -> None:
    """llama.cpp's numbers."""
    metadata = {"general.architecture": "qwen3"} | ({} if value is None else {"qwen3.pooling_type": value})
    rule = gguf_pooling(metadata)
    assert rule.kind == kind and why in rule.why


def test_a_gguf_file_that_says_it_is_opened(tmp_path: Path) -> None:
    """The key is no unknown feature, and changes nothing else of the model."""
    config = tiny_config("qwen3")
    weights = random_weights(config)
    plain = GGUFCheckpoint(str(write_gguf_model(tmp_path / "a.gguf", config, weights)))
    said = {"qwen3.pooling_type": 3}
    saying = GGUFCheckpoint(str(write_gguf_model(tmp_path / "b.gguf", config, weights, metadata=said)))
    assert saying.config == plain.config
    assert gguf_pooling(saying.metadata).kind == "last"
    plain.close()
    saying.close()


@pytest.mark.parametrize("shards", [1, 3])
def test_a_model_saved_without_its_output_head_is_read(tmp_path: Path, shards: int) -> None:
    """Embedding models are often saved as the bare decoder, whose names have no ``model.`` before them: the
    same weights, by the same names as everywhere; a file with both is refused."""
    config = {**tiny_config("qwen3"), "tie_word_embeddings": True}
    weights = {name: one for name, one in random_weights(config).items() if name != "lm_head.weight"}
    bare = {name.removeprefix("model."): one for name, one in weights.items()}
    checkpoint = FolderCheckpoint(str(write_folder(tmp_path / "m", config, bare, "F32", shards)))
    assert set(build_graph(checkpoint.config).weights) == set(checkpoint.tensors()) == set(weights)
    for name, values in weights.items():
        assert checkpoint.tensors()[name].name == name
        np.testing.assert_array_equal(
            read(checkpoint, name, Layout(Format.F32), 16).reshape(values.shape), values
        )
    checkpoint.close()
    both = {**bare, "model.norm.weight": weights["model.norm.weight"]}
    with pytest.raises(CheckpointError, match=r"norm\.weight.*there twice"):
        FolderCheckpoint(str(write_folder(tmp_path / "n", config, both)))
