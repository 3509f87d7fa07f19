"""Traffic made of Python's own library."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tenfold.bench.stdlib_traffic import stdlib_functions, stdlib_traffic
from tenfold.cli import main
from tenfold.traffic.reading import read_traffic
from tenfold.traffic.splits import split
from tests.helpers.fake_engine import VOCAB
from tests.helpers.fake_text import load_fake_text

SOURCE = '''
import os

def outer(a, b=1, *, c: int = 2):
    """Adds up.

    Returns the sum.
    """
    total = a + b
    total += c
    return total

class Thing:
    def method(self):
        """Does nothing much."""
        x = 1
        return x

    def bare(self):
        return 1

def only_documented():
    """There is no code here.

    None at all.
    """

os.environ["TENFOLD_TEST_WAS_RUN"] = "1"
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "mod.py").write_text(SOURCE)
    (tmp_path / "twin.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "binary.py").write_bytes(b"\xff\x00")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_mod.py").write_text(SOURCE.replace("total", "other"))
    return tmp_path


def test_functions_are_found_without_running_anything(library: Path) -> None:
    """Documented ones with code, each source once; what cannot be read is passed over."""
    method, outer = stdlib_functions(library)
    assert (outer.name, method.name) == ("mod.outer", "mod.Thing.method")
    assert outer.signature == "mod.outer(a, b=1, *, c: int=2)"
    assert outer.source == (
        "def outer(a, b=1, *, c: int = 2):\n    total = a + b\n    total += c\n    return total"
    )
    assert method.source == "def method(self):\n    x = 1\n    return x"
    assert method.documentation == "Does nothing much."
    assert "TENFOLD_TEST_WAS_RUN" not in os.environ
    with pytest.raises(ValueError, match="no Python source"):
        stdlib_functions(library / "nowhere")


def test_lines_are_the_same_each_time_and_differ_by_seed(library: Path) -> None:
    """Three requests a function, in one conversation; half of the conversations are greedy."""
    lines = list(stdlib_traffic(100, library=library))
    assert lines == list(stdlib_traffic(100, library=library))
    assert len(lines) == 6
    assert [line["class"] for line in lines[:3]] == ["document", "explain", "extract"]
    assert len({line["conversation"] for line in lines[:3]}) == 1
    assert {line["temperature"] for line in lines} == {0, 0.7}
    orders = {tuple(one["conversation"] for one in stdlib_traffic(6, seed, library)) for seed in range(9)}
    assert len(orders) == 2


def test_the_command_writes_what_the_other_commands_read(tmp_path: Path) -> None:
    """From this Python's own library, and every class has a part in every part of the split."""
    path = tmp_path / "traffic.jsonl"
    result = CliRunner().invoke(main, ["example-traffic", "-o", str(path), "--requests", "90"])
    assert result.exit_code == 0, result.output
    assert "90 requests" in result.output
    found = read_traffic(path, load_fake_text(""), VOCAB, 100_000)
    for part in split(found):
        assert {one.kind for one in part} == {"document", "explain", "extract"}
    before = path.read_bytes()
    again: Any = CliRunner().invoke(main, ["example-traffic", "-o", str(path)])
    assert again.exit_code == 1 and "--force" in again.output
    assert path.read_bytes() == before
    assert json.loads(before.splitlines()[0])["messages"][0]["role"] == "system"
