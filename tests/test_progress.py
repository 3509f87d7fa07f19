"""Progress on standard error."""

from __future__ import annotations

import time

import pytest

from tenfold.progress import Progress
from tests.helpers.server_process import wait_for


def test_without_a_terminal_there_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    """Also while a single step goes on: who reads a log sees that it lives, and how far it is."""
    said: list[str] = []

    def more(what: str) -> bool:
        said.extend(capsys.readouterr().err.splitlines())
        return any(what in line for line in said)

    with Progress(900, "answers", "answering", every_s=0.01) as progress:
        wait_for(lambda: more("answering: 0 of 900 answers, 0 s"))
        progress.at(3, note="70 new tokens")
        wait_for(lambda: more("answering: 3 of 900 answers, 70 new tokens, 0 s"))
        progress.at(900, phase="writing", note="")
        wait_for(lambda: more("writing: 900 of 900 answers, 0 s"))
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == "", "it goes on when the work is over"


def test_long_times_are_told_in_minutes() -> None:
    """Nobody counts 754 seconds."""
    progress = Progress(4, "steps", "filling")
    progress._began -= 754
    assert progress.line() == "filling: 0 of 4 steps, 12 min 34 s"
