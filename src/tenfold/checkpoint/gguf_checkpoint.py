"""A GGUF file as a Checkpoint: canonical names, row order and norms."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tenfold.checkpoint.base import CheckpointError, TensorInfo
from tenfold.checkpoint.gguf import GGUFFile, GGUFTensor
from tenfold.checkpoint.gguf_config import architecture_of, config_from_gguf
from tenfold.checkpoint.gguf_names import canonical_name
from tenfold.checkpoint.stored import StoredWeight, StoredWeights
from tenfold.formats.matrix import Format, Layout

_ROPE_FACTORS = "rope_freqs.weight"
_ROTARY = ("self_attn.q_proj", "self_attn.k_proj")


class GGUFCheckpoint(StoredWeights):
    """See `tenfold.checkpoint.base.Checkpoint`. ``metadata`` has the file's own keys.

    Undone are: the interleaved rows of q and k in architecture ``llama``, and Gemma's norms stored as 1 + w.
    """

    def __init__(self, path: str) -> None:
        """Raises CheckpointError for a file that is damaged or needs something that is not supported."""
        self.path = path
        self._file = GGUFFile(path)
        try:
            self.metadata: dict[str, Any] = self._file.metadata
            self.architecture = architecture_of(self.metadata, path)
            if self.metadata.get("split.count", 1) not in (0, 1):
                raise CheckpointError(
                    f"{path}: the model is split into {self.metadata['split.count']!r:.20} files, which "
                    "is not supported; join them with llama-gguf-split --merge"
                )
            tensors = dict(self._file.tensors)
            factors = self._rope_factors(tensors.pop(_ROPE_FACTORS, None))
            canonical = {self._canonical_name(tensor): tensor for tensor in tensors.values()}
            shapes = {name: tensor.shape for name, tensor in canonical.items()}
            self.config: dict[str, Any] = config_from_gguf(self.metadata, shapes, factors, path)
            self._weights = {name: self._weight(name, tensor) for name, tensor in canonical.items()}
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Unmaps the file."""
        self._file.close()

    def _canonical_name(self, tensor: GGUFTensor) -> str:
        name = canonical_name(tensor.name, self.architecture)
        if name is None:
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name!r:.80} (byte {tensor.offset}) belongs to a feature that "
                f"is not supported in architecture {self.architecture}"
            )
        vector = name.endswith(("norm.weight", ".bias"))
        if len(tensor.shape) != (1 if vector else 2):
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name!r:.80} (byte {tensor.offset}) has shape {tensor.shape}, "
                f"not that of a {'vector' if vector else 'matrix'}"
            )
        return name

    def _weight(self, name: str, tensor: GGUFTensor) -> StoredWeight:
        info = TensorInfo(name, tensor.shape, tensor.kind.name, tensor.size, self.path, tensor.offset)
        head_dim, excess = 0, 0.0
        if self.architecture == "llama" and any(part in name for part in _ROTARY):
            head_dim = self.config["head_dim"]
            heads = self.config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            if tensor.shape[0] != heads * head_dim:
                raise CheckpointError(
                    f"{self.path}: tensor {tensor.name!r} (byte {tensor.offset}) has {tensor.shape[0]} rows, "
                    f"not {heads} heads of {head_dim}"
                )
        elif self.architecture == "gemma3" and name.endswith("norm.weight"):
            excess = 1.0
        return StoredWeight(info, tensor.kind, self._file.mapped, head_dim, excess)

    def _rope_factors(self, tensor: GGUFTensor | None) -> npt.NDArray[np.float32] | None:
        if tensor is None:
            return None
        if len(tensor.shape) != 1:
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name!r} (byte {tensor.offset}) is not a vector"
            )
        info = TensorInfo(tensor.name, tensor.shape, tensor.kind.name, tensor.size, self.path, tensor.offset)
        ((_, values),) = StoredWeight(info, tensor.kind, self._file.mapped).rows(Layout(Format.F32))
        factors: npt.NDArray[np.float32] = values.dequantize()[0]
        return factors
