"""A Hugging Face folder as a Checkpoint: config.json and safetensors, single or sharded."""

from __future__ import annotations

import os
from typing import Any

from tenfold.checkpoint.base import CheckpointError, TensorInfo
from tenfold.checkpoint.hf_config import architecture_of, normalised
from tenfold.checkpoint.json_files import read_json
from tenfold.checkpoint.safetensors import SafetensorsFile
from tenfold.checkpoint.stored import StoredWeight, StoredWeights

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_BARE = ("embed_tokens.", "layers.", "norm.")
"""How names begin where a model was saved without its output head, as embedding models are."""


class FolderCheckpoint(StoredWeights):
    """See `tenfold.checkpoint.base.Checkpoint`."""

    def __init__(self, path: str) -> None:
        """Raises CheckpointError for a folder that is incomplete, damaged or needs what is not supported."""
        self.path = path
        config_path = os.path.join(path, "config.json")
        config = read_json(config_path)
        self.architecture = architecture_of(config, config_path)
        self.config: dict[str, Any] = normalised(config, config_path)
        self._files: list[SafetensorsFile] = []
        try:
            if os.path.exists(os.path.join(path, _SINGLE)):
                self._weights = self._open_file(_SINGLE)
            elif os.path.exists(os.path.join(path, _INDEX)):
                self._weights = self._open_shards()
            else:
                raise CheckpointError(f"{path}: no {_SINGLE} and no {_INDEX}; no other files are read")
            untied = "lm_head.weight" in self._weights
            if not self.config.setdefault("tie_word_embeddings", not untied) and not untied:
                raise CheckpointError(f"{path}: lm_head.weight is missing, and tie_word_embeddings is false")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmaps the files."""
        for file in self._files:
            file.close()

    def _open_file(self, name: str) -> dict[str, StoredWeight]:
        file = SafetensorsFile(os.path.join(self.path, name))
        self._files.append(file)
        weights: dict[str, StoredWeight] = {}
        for stored_name, tensor in file.tensors.items():
            name = _canonical_name(stored_name)
            if name in weights:
                raise CheckpointError(
                    f"{file.path}: tensor {stored_name!r:.80} (byte {tensor.offset}) is there twice, with "
                    "model. before its name and without"
                )
            info = TensorInfo(name, tensor.shape, tensor.kind.name, tensor.size, file.path, tensor.offset)
            weights[name] = StoredWeight(info, tensor.kind, file.mapped)
        return weights

    def _open_shards(self) -> dict[str, StoredWeight]:
        index_path = os.path.join(self.path, _INDEX)
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index_path}: weight_map is missing")
        for name, shard in weight_map.items():
            # Only the name is checked: the files of a hub's cache are links to elsewhere.
            if not isinstance(shard, str) or not shard.endswith(".safetensors") or set(shard) & set("/\\:\0"):
                raise CheckpointError(
                    f"{index_path}: tensor {name!r:.80} is said to be in {shard!r:.80}, which is not the "
                    "name of a .safetensors file of this folder"
                )
        weights: dict[str, StoredWeight] = {}
        for shard in sorted(set(weight_map.values())):
            for name, weight in self._open_file(shard).items():
                if name in weights:
                    raise CheckpointError(
                        f"{weight.info.file}: tensor {name!r:.80} (byte {weight.info.offset}) is also in "
                        f"{weights[name].info.file}"
                    )
                weights[name] = weight
        for name, shard in weight_map.items():
            name = _canonical_name(name)
            if name not in weights or os.path.basename(weights[name].info.file) != shard:
                raise CheckpointError(f"{index_path}: tensor {name!r:.80} is not in {shard}")
        return weights


def _canonical_name(name: str) -> str:
    return f"model.{name}" if name.startswith(_BARE) else name
