"""How commands fail: one rule for all of them."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from tenfold.cli import main


def all_commands(group: click.Group, *names: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """With the words by which each is called."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from all_commands(command, *names, name)
        else:
            yield (*names, name), command


WITH_JSON = [
    pytest.param(words, command, id=" ".join(words))
    for words, command in all_commands(main)
    if any("--json" in param.opts for param in command.params)
]


def run(*words: str) -> Result:
    return CliRunner().invoke(main, words, terminal_width=110)


def said(result: Result) -> str:
    """The message of the one JSON object on standard output; standard error has it too."""
    told = json.loads(result.stdout)
    assert list(told) == ["error"] and list(told["error"]) == ["message"]
    message = told["error"]["message"]
    assert " ".join(message.split()) in " ".join(result.stderr.split())
    return str(message)


def required(command: click.Command, folder: Path) -> list[str]:
    """Words for what must be given: a model that is not there, a file of traffic, a file to write."""
    traffic = folder / "traffic.jsonl"
    traffic.write_text("{}\n")
    words = []
    for param in command.params:
        if isinstance(param, click.Argument):
            choices = (
                param.type.choices if isinstance(param.type, click.Choice) else [str(folder / "no.gguf")]
            )
            words.append(choices[0])
        elif param.required:
            words += [param.opts[-1], str(traffic if param.name in ("traffic", "trace") else folder / "new")]
    return words


def test_there_are_commands_with_json() -> None:
    """The tests below are of all that there are."""
    assert len(WITH_JSON) >= 7


@pytest.mark.parametrize(("words", "command"), WITH_JSON)
def test_a_command_line_at_fault_is_said_as_json(words: tuple[str, ...], command: click.Command) -> None:
    """Exit code 2, as without --json."""
    result = run(*words, "--json", "--no-such-option")
    assert result.exit_code == 2 and "--no-such-option" in said(result)
    assert run(*words, "--no-such-option").stdout == ""
    assert run(*words, "--", "--json", "--no-such-option").stdout == "", "no option, behind --"


@pytest.mark.parametrize(("words", "command"), WITH_JSON)
def test_a_fault_elsewhere_is_said_as_json(
    words: tuple[str, ...], command: click.Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1: a model or a file that cannot be read."""

    def failing(*args: Any, **options: Any) -> None:
        raise OSError(errno.EIO, "Input/output error", "/some/file")

    monkeypatch.setattr(command, "callback", failing)
    result = run(*words, *required(command, tmp_path), "--json")
    assert result.exit_code == 1
    assert said(result) == "/some/file: Input/output error"


@pytest.mark.parametrize(
    "words",
    [
        ("train-drafter", "m", "-o", "d", "--traffic", "nope.jsonl"),
        ("replay", "m", "--traffic", "nope.jsonl"),
        ("simulate", "--trace", "nope.jsonl"),
        ("example-traffic", "-o", "nonexist/t.jsonl"),
        ("train-drafter", "m", "--traffic", "t.jsonl", "-o", "nonexist/d"),
        ("synth", "llama3-1b", "-o", "nonexist/m.gguf"),
    ],
)
def test_a_file_that_is_not_there_is_said_with_its_option(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded; no number of the system's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jsonl").write_text("{}\n")
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert any(
        f"'{option}'" in result.stderr or f"'{option}' /" in result.stderr or f"/ '{option}'" in result.stderr
        for option in ("--traffic", "--trace", "--output")
    ), result.stderr
    assert "nope.jsonl" in result.stderr or "nonexist" in result.stderr
    assert "Errno" not in result.output


def test_ctrl_c_of_a_training_is_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to do next, for people and for machines."""

    def stopped(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tenfold.optimize.train_drafter.train_drafter", stopped)
    (tmp_path / "t.jsonl").write_text("{}\n")
    out = str(tmp_path / "d")
    result = run("train-drafter", "m", "--traffic", str(tmp_path / "t.jsonl"), "-o", out, "--json")
    assert result.exit_code == 130
    assert said(result) == f"stopped; the same command goes on from what is in {out}"


def test_a_full_disk_leaves_nothing_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is known before, or happens on the way: what was there stays as it was."""
    path = tmp_path / "t.jsonl"
    path.write_text("mine")
    command = ("example-traffic", "-o", str(path), "--requests", "9", "--force")
    monkeypatch.setattr("tenfold.bench.stdlib_traffic.stdlib_traffic", lambda *_: [{"messages": []}] * 9)
    with monkeypatch.context() as full:
        full.setattr("tenfold.bench.disk_room.shutil.disk_usage", lambda _: type("Usage", (), {"free": 9}))
        result = run(*command)
    assert result.exit_code == 1 and f"{path}: " in result.stderr and "the disk has 9 B" in result.stderr

    def write_bytes(self: Path, data: bytes) -> int:
        self.open("wb").close()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", write_bytes)
        result = run(*command)
    assert (result.exit_code, result.stderr) == (1, f"Error: {path}: No space left on device\n")
    assert path.read_text() == "mine" and list(tmp_path.iterdir()) == [path]
    assert run(*command).exit_code == 0 and path.read_bytes().count(b"\n") == 9
