"""Several models on the command line of `tenfold serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tenfold.cli import main
from tenfold.config import ServeConfig, total_memory


def run(*args: str) -> Any:
    return CliRunner().invoke(main, args)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["a/m.gguf", "b/m.gguf"], "two models are called m.gguf: a/m.gguf and b/m.gguf"),
        (["x=a/m.gguf", "x=b/m.gguf"], "two models are called x"),
        (["a", "b", "--name", "x"], "write NAME=MODEL for each"),
        (["x=a", "--name", "y"], "x=a has a name, and so has --name"),
        (["a", "b", "--drafter", "d"], "--drafter is for one model"),
        (["a", "b", "--drafter", "d", "--learn"], "is for one model"),
        (
            ["a", "b", "--workers", "0"],
            "--workers is 0; it must be from 1 to 256, or --accept-workers must be given",
        ),
    ],
)
def test_what_cannot_be_is_a_wrong_command_line(args: list[str], says: str) -> None:
    """Exit code 2 and what to write instead, before anything is looked for."""
    result = run("serve", *args)
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())


def test_each_model_gets_its_name_and_all_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NAME=MODEL names one, the others are called after their files; a path that is there stays one, equals
    sign or not."""
    for name in ("m.gguf", "a=b.gguf"):
        (tmp_path / name).touch()
    (tmp_path / "x=y").mkdir()
    (tmp_path / "x=y" / "n.gguf").touch()
    found: list[tuple[ServeConfig, str]] = []

    def serve(config: ServeConfig, path: str, load_text: Any, ready: Any, others: Any) -> None:
        found.extend([(config, path), *others])

    monkeypatch.setattr("tenfold.server.serve.serve", serve)
    monkeypatch.chdir(tmp_path)
    models = ["one=m.gguf", "m.gguf", "a=b.gguf", "two=x=y/n.gguf", "x=y/n.gguf"]
    result = run("serve", *models, "--threads", "3", "--kv-memory", "1GiB", "--max-queue", "7")
    assert result.exit_code == 0, result.output
    assert [(config.model_name, path) for config, path in found] == [
        ("one", "m.gguf"),
        ("m.gguf", "m.gguf"),
        ("a=b.gguf", "a=b.gguf"),
        ("two", "x=y/n.gguf"),
        ("n.gguf", "x=y/n.gguf"),
    ]
    for config, _ in found:
        assert (config.threads, config.kv_memory_bytes, config.max_queue) == (3, 1 << 30, 7)


def test_more_than_the_machine_has_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    """The sum of what all models want, each one's part, and what to do about it."""
    from tests.helpers.tiny_served import write_tiny

    path = write_tiny(tmp_path / "tiny.gguf", 1)
    each = str(total_memory() * 6 // 10)
    result = run("serve", f"a={path}", f"b={path}", "--port", "0", "--kv-memory", each)
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "of memory are wanted (a: " in said and "; b: " in said
    assert "smaller --kv-memory" in said and "--format q8 or q4" in said


def test_workers_of_one_model_are_counted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may be small and its processes many."""
    from tenfold.server import models
    from tests.helpers.tiny_served import write_tiny

    monkeypatch.setattr(models, "total_memory", lambda: 4 << 30)
    path = write_tiny(tmp_path / "tiny.gguf", 1)
    result = run("serve", path, "--port", "0", "--workers", "64")
    assert result.exit_code == 1
    assert "+ 64 workers of 64.0 MiB" in result.output and "fewer --workers" in " ".join(
        result.output.split()
    )
