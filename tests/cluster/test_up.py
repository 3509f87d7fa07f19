"""What `tenfold cluster up` does before, and where, nothing runs: no process is started here."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tenfold.cli import clustering, main
from tenfold.cluster import up
from tenfold.cluster.folder import lock_folder
from tenfold.cluster.ports import free_ports
from tenfold.cluster.processes import NeverUp
from tenfold.protocol import EngineSettings


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """With a model, and without Dynamo. Temporary folders are in ``temporary``."""
    (tmp_path / "model.gguf").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(up, "check_version", lambda: None)
    return ["cluster", "up", str(tmp_path / "model.gguf")]


def temporary(tmp_path: Path) -> list[str]:
    return os.listdir(tmp_path / "temporary")


def test_a_port_that_is_taken(command: list[str], tmp_path: Path) -> None:
    """Promise: an error at once that names the option, and no folder is left."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        got = CliRunner().invoke(main, [*command, "--port", str(port)])
    assert got.exit_code == 1 and f"port {port} of 127.0.0.1 is in use" in got.output
    assert "--port" in got.output and temporary(tmp_path) == []


def test_a_folder_that_another_cluster_has(command: list[str], tmp_path: Path) -> None:
    """Promise: an error at once that names the option and who has it, and nothing there is touched."""
    folder = tmp_path / "shared"
    with lock_folder(folder):
        port = str(free_ports("127.0.0.1", 1)[0])
        got = CliRunner().invoke(main, [*command, "--port", port, "--dir", str(folder)])
        assert got.exit_code == 1, got.output
        assert f"{folder} is used by another cluster (process {os.getpid()})" in got.output
        assert "--dir" in got.output and os.listdir(folder) == ["lock"]
    lock_folder(folder).close()


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_starts(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    hidden: bool,
) -> None:
    """Promise: it ends as it does later, without an error, and leaves nothing; also where an import that was
    interrupted raises something else."""

    def interrupted(*config: Any) -> None:
        assert len(temporary(tmp_path)) == 1
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            if hidden:
                raise AttributeError("partially initialized module") from None
            raise

    before = signal.getsignal(number)
    monkeypatch.setattr(up, "Cluster", interrupted)
    got = CliRunner().invoke(main, command)
    assert (got.exit_code, temporary(tmp_path)) == (0, []), got.output
    assert signal.getsignal(number) == before


def test_logs_that_say_why_stay(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: where a process was never up, the temporary folder is left, with its log."""

    def never_up(*config: Any) -> None:
        raise NeverUp("the front ended 3 times")

    monkeypatch.setattr(up, "Cluster", never_up)
    got = CliRunner().invoke(main, command)
    assert got.exit_code == 1 and "the front ended 3 times" in got.output
    assert len(temporary(tmp_path)) == 1


def test_paths_are_the_same_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a relative path means what it means to who gave it: workers change their folder."""
    monkeypatch.chdir(tmp_path)
    given = EngineSettings(model="a.gguf", drafter="b", kv_disk="c")
    settings = clustering.cluster_settings(given, "mixed", "127.0.0.1", None, None)
    paths = [settings.model, settings.drafter, settings.kv_disk]
    assert paths == [str(tmp_path / name) for name in ("a.gguf", "b", "c")]
