"""What a user names, or a model folder has, may be no file at all: that is an error, never a wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tenfold.checkpoint.base import CheckpointError
from tenfold.checkpoint.chat_template import ChatTemplate
from tenfold.checkpoint.json_files import read_json
from tenfold.checkpoint.open import open_checkpoint
from tenfold.checkpoint.tokenizer_folder import read_folder_tokenizer, read_json_object
from tests.helpers.model_files import random_weights, tiny_config, write_folder

READERS: list[tuple[str, Callable[[Path], object]]] = [
    ("m.gguf", lambda folder: open_checkpoint(folder / "m.gguf")),
    ("config.json", open_checkpoint),
    ("model.safetensors", open_checkpoint),
    ("model.safetensors.index.json", lambda folder: read_json(str(folder / "model.safetensors.index.json"))),
    ("tokenizer.json", read_folder_tokenizer),
    ("tokenizer_config.json", lambda folder: read_json_object(folder / "tokenizer_config.json")),
    ("chat_template.jinja", lambda folder: ChatTemplate.from_folder(folder, {})),
]


@pytest.mark.parametrize(("name", "read"), READERS, ids=[name for name, _ in READERS])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_folder_in_the_place_of_a_file_is_refused_at_once(
    tmp_path: Path, name: str, read: Callable[[Path], object], make: Callable[[Path], None]
) -> None:
    """For every file that is read; the message names it."""
    config = tiny_config("llama")
    folder = write_folder(tmp_path / "m", config, random_weights(config))
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    if (name, make) == ("m.gguf", os.mkdir):
        (folder / name / "config.json").touch()  # else it is refused as what it is: a folder
    found: list[BaseException | None] = []

    def run() -> None:
        try:
            read(folder)
        except BaseException as error:
            found.append(error)
        else:
            found.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert found, "it waits"
    assert isinstance(found[0], CheckpointError)
    assert name in str(found[0])


@pytest.mark.skipif(not os.path.exists("/proc/version"), reason="needs /proc")
def test_a_file_that_the_system_makes_up_is_not_called_empty() -> None:
    """It has something in it, and no size that would tell."""
    with pytest.raises(CheckpointError, match=r"/proc/version: not a file on a disk.*a model is"):
        open_checkpoint(Path("/proc/version"))
