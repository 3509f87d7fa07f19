"""How a model pools hidden states into an embedding, if it says so.

A folder says so in the way of sentence-transformers: ``modules.json`` lists what stands behind the model, of
which one is the pooling, with a ``config.json`` of its own. A GGUF file has llama.cpp's ``pooling_type``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.json_files import MAX_JSON_BYTES, read_json
from tenfold.checkpoint.regular import open_regular

PoolingKind = Literal["mean", "last"]

_MODES: dict[str, PoolingKind] = {
    "mean": "mean",
    "last": "last",
    "lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_HARMLESS = ("Transformer", "Pooling", "Normalize")
_GGUF_TYPES = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}


@dataclass(frozen=True)
class PoolingRule:
    """What a model's embedding is made of unless a request says otherwise."""

    kind: PoolingKind | None
    """None: of something else than is there, so a request must say which it wants instead."""
    why: str


UNSAID = PoolingRule("mean", "the model says nothing of pooling")
"""As sentence-transformers takes a model that was not made for embeddings. Of such a model the mean tells
more than the last token, whose state is about the next word."""


def folder_pooling(folder: str | Path) -> PoolingRule:
    """The rule of a model folder. Raises CheckpointError for files that cannot be read."""
    folder = Path(folder)
    path = folder / "1_Pooling" / "config.json"
    if (folder / "modules.json").exists():
        modules = _modules(folder / "modules.json")
        for kind, _ in modules:
            if kind not in _HARMLESS:
                return PoolingRule(
                    None, f"its modules.json has a module {kind:.60} behind the model, which is not supported"
                )
        paths = [where for kind, where in modules if kind == "Pooling"]
        if len(paths) != 1:
            return UNSAID
        path = folder / paths[0] / "config.json"
        # Only the names are checked: the files of a hub's cache are links to elsewhere.
        if ".." in Path(paths[0]).parts or Path(paths[0]).is_absolute():
            raise CheckpointError(f"{folder / 'modules.json'}: path {paths[0]!r:.80} leads out of the folder")
    if not path.exists():
        return UNSAID
    config = read_json(str(path))
    modes = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    if (mode := config.get("pooling_mode")) is not None:
        modes = [str(one) for one in mode] if isinstance(mode, list) else [str(mode)]
    name = path.relative_to(folder)
    if len(modes) == 1 and modes[0] in _MODES:
        return PoolingRule(_MODES[modes[0]], f"its {name} says so")
    said = ", ".join(modes)[:120] or "no mode"
    return PoolingRule(None, f"its {name} asks for {said}, which is not supported")


def gguf_pooling(metadata: Mapping[str, Any]) -> PoolingRule:
    """The rule of a GGUF file."""
    key = f"{metadata.get('general.architecture')}.pooling_type"
    value = metadata.get(key)
    name = _GGUF_TYPES.get(value) if isinstance(value, int) else None
    if value is None or name == "none":
        return UNSAID
    if name in _MODES:
        return PoolingRule(_MODES[name], f"its {key} says so")
    return PoolingRule(None, f"its {key} is {name or repr(value)[:40]}, which is not supported")


def _modules(path: Path) -> list[tuple[str, str]]:
    """Name of the class and path of each module. The file is a list, where others of a model are objects."""
    try:
        with open_regular(str(path)) as file:
            data = json.loads(file.read(MAX_JSON_BYTES))
    except (OSError, RecursionError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error!s:.200})") from error
    if not isinstance(data, list) or not all(isinstance(module, dict) for module in data):
        raise CheckpointError(f"{path}: not a list of modules")
    return [(str(module.get("type")).rpartition(".")[2], str(module.get("path", ""))) for module in data]
