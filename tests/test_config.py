"""The configuration and what it resolves to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.checkpoint.pooling import UNSAID
from tenfold.config import (
    MAX_KV_PAGES,
    PAGE_ROWS,
    ResolvedPlan,
    ServeConfig,
    check_kv_disk,
    check_kv_memory,
    explain_kv,
    format_bytes,
    plan_kv,
)
from tenfold.protocol import EnginePlan
from tenfold.server.chat_setup import choose_chat
from tenfold.server.embeddings import plan_line
from tests.helpers.fake_text import load_fake_text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 70000),
        ("threads", -1),
        ("max_batch_tokens", 0),
        ("max_running", 0),
        ("max_queue", -1),
        ("kv_memory_bytes", 0),
        ("kv_memory_bytes", 10**30),
        ("isa", "sse2"),
        ("format", "q3"),
        ("stall_after_s", 0.0),
        ("workers", 0),
        ("routing", "hottest"),
    ],
)
def test_a_value_out_of_range_names_its_field(field: str, value: object) -> None:
    """The message says which field, which value, and what would do."""
    with pytest.raises(ValueError, match=f"{field} is .*{value}.*must be"):
        ServeConfig(model="m", **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["tiny.gguf\0x", "dir/a\nb", "x" * 257, "/"])
def test_a_model_s_own_name_is_checked_as_one_that_is_given(model: str) -> None:
    """It is in answers, metrics and the log like any other; and another may be given."""
    with pytest.raises(ValueError, match=r"no name for the API: .* give another with served_name"):
        ServeConfig(model=model)
    assert ServeConfig(model=model, served_name="m").model_name == "m"


def test_the_folder_here_is_called_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the empty string."""
    monkeypatch.chdir(tmp_path)
    assert ServeConfig(model=".").model_name == tmp_path.name


def test_workers_share_what_there_is() -> None:
    """Each is told how many they are and that a router listens; a lone one is not; and only a lone one
    learns."""
    settings = ServeConfig(model="m", workers=3, kv_memory_bytes=300).engine_settings("m")
    assert (settings.workers, settings.routed, settings.kv_memory_bytes) == (3, True, 300)
    assert not ServeConfig(model="m").engine_settings("m").routed
    with pytest.raises(ValueError, match="learn is given and workers is 2"):
        ServeConfig(model="m", workers=2, learn=True, drafter="d")
    assert "divided among 3 workers" in explain_kv(5, 300, 1000, 4, 3)


def test_prefill_and_decode_workers() -> None:
    """They count together, transfer pages and are routed; half of the pair, or `workers` beside it, is
    refused with the remedy."""
    config = ServeConfig(model="m", prefill=2, decode=3)
    settings = config.engine_settings("m")
    assert (settings.workers, settings.prefill_workers, config.processes) == (5, 2, 5)
    assert settings.routed and settings.transfer
    assert not ServeConfig(model="m", workers=2).engine_settings("m").transfer
    for fields, why in (
        ({"prefill": 1}, "decode is 0; give 1 or more of each"),
        ({"decode": 1}, "prefill is 0 and decode is 1"),
        ({"prefill": 1, "decode": 1, "workers": 2}, "workers is 2 beside prefill and decode"),
        ({"prefill": 1, "decode": 1, "learn": True, "drafter": "d"}, "learn is given and prefill is 1"),
        ({"prefill": 300, "decode": 1}, "prefill is 300"),
    ):
        with pytest.raises(ValueError, match=why):
            ServeConfig(model="m", **fields)


def test_a_size_of_the_disk_tier_needs_its_folder() -> None:
    """The message says what to give."""
    with pytest.raises(ValueError, match="without kv_disk"):
        ServeConfig(model="m", kv_disk_bytes=1 << 30)
    with pytest.raises(ValueError, match="kv_disk_bytes is 0"):
        ServeConfig(model="m", kv_disk="/tmp/x", kv_disk_bytes=0)


def test_workers_that_join_need_an_address_and_a_secret() -> None:
    """Promise: neither alone is taken; with both a server may have no workers of its own, and its workers are
    to tell a router of their pages even if there is one."""
    with pytest.raises(ValueError, match="without secret_file"):
        ServeConfig(model="m", accept_workers="127.0.0.1:7001")
    with pytest.raises(ValueError, match="without accept_workers"):
        ServeConfig(model="m", secret_file="s")
    both: dict[str, Any] = {"accept_workers": "127.0.0.1:7001", "secret_file": "s"}
    assert ServeConfig(model="m", workers=0, **both).engine_settings("m").routed
    assert ServeConfig(model="m", workers=1, **both).engine_settings("m").routed
    assert not ServeConfig(model="m").engine_settings("m").routed
    with pytest.raises(ValueError, match="only one worker can learn"):
        ServeConfig(model="m", learn=True, drafter="d", **both)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kv_events": "127.0.0.1:5557"}, "kv_events is .*tcp://127.0.0.1:5557"),
        ({"kv_events": "tcp://*:0"}, "ports from 1"),
        ({"kv_events": "tcp://*:65535", "workers": 2}, "2 workers need ports"),
        ({"kv_events_replay": "tcp://*:5558"}, "without kv_events"),
        ({"kv_events": "tcp://*:5557", "kv_events_replay": "ipc://x"}, "kv_events_replay is"),
        (
            {
                "kv_events": "tcp://*:5557",
                "workers": 0,
                "accept_workers": "127.0.0.1:7001",
                "secret_file": "s",
            },
            "give it to each `tenfold worker`",
        ),
    ],
)
def test_an_address_for_events_that_cannot_be_is_refused(fields: dict[str, Any], said: str) -> None:
    """Promise: the error names the option, and what it may be; every worker has a port of its own."""
    with pytest.raises(ValueError, match=said):
        ServeConfig(model="m", **fields)


def test_the_name_in_the_api_is_without_the_folder() -> None:
    """Unless another was given."""
    assert ServeConfig(model="/models/a.gguf").model_name == "a.gguf"
    assert ServeConfig(model="smollm2").model_name == "smollm2"
    assert ServeConfig(model="/models/a.gguf", served_name="b").model_name == "b"


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 24), st.integers(1, 1 << 17), st.integers(1, 4096))
def test_the_kv_cache_neither_fills_the_machine_nor_is_useless(
    available: int, page_bytes: int, context: int, running: int
) -> None:
    """At least one context; beyond that at most a quarter of what is free, and no more than can be used."""
    pages = plan_kv(None, available, page_bytes, context, running)
    one = -(-context // PAGE_ROWS)
    assert one <= pages <= running * one
    assert pages == one or pages * page_bytes <= available / 4
    assert explain_kv(pages, None, context, running)


def test_an_asked_for_kv_cache_is_taken_as_it_is() -> None:
    """Rounded down to pages; less than a page is an error that says how much a page takes."""
    assert plan_kv(10_500, 0, 1000, 100, 1) == 10
    with pytest.raises(ValueError, match="takes 1000"):
        plan_kv(999, 0, 1000, 100, 1)


def test_a_kv_cache_that_cannot_be_is_refused_with_its_option() -> None:
    """More pages than the kernels count, or more than all memory: the message has option and limit."""
    with pytest.raises(ValueError, match=r"--kv-memory.* 67108864 can be used, 67108864000 bytes"):
        plan_kv((MAX_KV_PAGES + 1) * 1000, 0, 1000, 100, 1)
    assert plan_kv(None, 1 << 62, 1, 1 << 40, 4096) >= 1 << 36, "one context is always there"
    assert plan_kv(None, 1 << 62, 1, 1 << 17, 1 << 20) == MAX_KV_PAGES
    check_kv_memory(None, 0)
    check_kv_memory(1 << 30, 1 << 30)
    with pytest.raises(
        ValueError, match=r"--kv-memory\) is 9.1 TiB, but .* has 16.0 GiB in all; ask for less"
    ):
        check_kv_memory(10**13, 1 << 34)


def test_the_plan_is_for_people_and_for_machines() -> None:
    """Every line has a value and a why; the same as JSON."""
    engine = EnginePlan(
        backend="native",
        threads=2,
        threads_why="the control group has a CPU quota of 1.5 cores",
        isa="avx2",
        isa_why="best that this machine has",
        vocab_size=10,
        max_context=160,
        kv_pages=10,
        kv_format="bf16",
        page_bytes=1 << 20,
        weight_bytes=1,
        format_bytes={"q4": 3 << 20},
        lossy_weights=0,
        weights=4,
        max_batch_tokens=512,
        max_running=64,
        load_ms=1,
    )
    plan = ResolvedPlan(config=ServeConfig(model="m"), path="/m.gguf", engine=engine)
    assert all(line.value and line.why for line in plan.lines())
    assert "10.0 MiB of bf16, 160 tokens" in plan.text()
    assert "one full context" in plan.text() and "CPU quota of 1.5" in plan.text()
    data = json.loads(json.dumps(plan.to_json()))
    assert data["engine"]["isa"] == "avx2"
    assert {line["name"] for line in data["lines"]} >= {"model", "weights", "threads", "kv cache"}
    whole = ResolvedPlan(
        config=ServeConfig(model="m"),
        path="/m.gguf",
        engine=engine,
        chat=(*choose_chat(load_fake_text("")).lines(), plan_line(UNSAID)),
    )
    page = (Path(__file__).parents[1] / "docs" / "operations.md").read_text()
    example = page.partition("## The plan")[2].split("```")[1].strip("\n").splitlines()
    names = [line[2:].partition("  ")[0] for line in example]
    assert names == [line.name for line in whole.lines()], "the example in docs/operations.md"


@pytest.mark.parametrize(
    ("size", "text"),
    [(5, "5 B"), (1024, "1.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 29, "2.5 GiB"), (900 << 40, "900.0 TiB")],
)
def test_bytes_for_people(size: int, text: str) -> None:
    """In the unit that reads best."""
    assert format_bytes(size) == text


def test_a_disk_folder_that_cannot_be_is_found_before_anything_starts(tmp_path: Path) -> None:
    """A folder is made; a file, nothing at all, and a place where none can be made are refused by name."""
    check_kv_disk(None)
    check_kv_disk(str(tmp_path / "a" / "b"))
    for made in (tmp_path / "a", tmp_path / "a" / "b"):
        assert made.stat().st_mode & 0o777 == 0o700, "what it holds tells of prompts"
    (tmp_path / "file").write_text("")
    for wrong in (str(tmp_path / "file"), "", str(tmp_path / "file" / "c"), "/proc/tier"):
        with pytest.raises(ValueError, match="kv_disk"):
            check_kv_disk(wrong)
