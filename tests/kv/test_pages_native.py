"""Pages of the native core that were on disk or in another engine: the very bits that computing gives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from tenfold.backends.base import ProgramInfo
from tenfold.engine.engine import Engine
from tenfold.kv.disk import DiskTier
from tenfold.kv.identity import page_identity
from tenfold.kv.imports import Transfer
from tenfold.protocol import EngineSettings
from tenfold.worker.build import build_engine
from tests.helpers.model_files import random_weights, tiny_config, write_folder
from tests.helpers.native_programs import LEVELS, tiny_model
from tests.helpers.requests import request, run
from tests.helpers.tiny_models import CONFIGS

MODEL = tiny_model({**CONFIGS["mistral"], "max_position_embeddings": 160})
PROMPT = [1 + i * i % 95 for i in range(100)]
ASKED = request("a", PROMPT, max_tokens=20, ignore_eos=True, temperature=1.0, logprobs=2)


@pytest.mark.parametrize("kv_format", ["bf16", "f32", "q8"])
def test_levels_and_thread_counts_share_a_tier(tmp_path: Path, kv_format: str) -> None:
    """What one ISA level wrote another reads, with tokens and log-probabilities of a run that computed all:
    so the identity of pages has neither level nor threads in it."""
    laws = []
    infos: list[ProgramInfo] = []
    for number, level in enumerate([*LEVELS, LEVELS[0]]):
        options = {"isa": level, "threads": 1 + number % 2, "kv_format": kv_format, "kv_pages": 12}
        laws.append(run(Engine(MODEL.native("q8", **options)), [ASKED])["a"])
        program = MODEL.native("q8", **options)
        infos.append(program.info)
        disk = DiskTier(tmp_path, "same", program.info.page_bytes, 1 << 26)
        engine = Engine(program, disk=disk)
        found = run(engine, [ASKED])["a"]
        engine.close()
        assert found.cached == [96 if number else 0]
        assert (found.tokens, found.logprobs) == (laws[0].tokens, laws[0].logprobs)
    assert all(law == laws[0] for law in laws)
    assert len({page_identity("model", info) for info in infos}) == 1


def test_an_identity_tells_what_changes_rows() -> None:
    """Model, weights' formats, KV format and code: a change of any makes other pages."""
    info = MODEL.native("q8", kv_format="bf16").info
    identities = {
        page_identity("model", info),
        page_identity("other", info),
        page_identity("model", MODEL.native("q8", kv_format="q8").info),
        page_identity("model", MODEL.native("q4", kv_format="bf16").info),
        page_identity("model", info, bias=True),
    }
    assert len(identities) == 5


def test_pages_go_from_program_to_program() -> None:
    """A handover between two native programs, of two levels where there are two."""
    law = run(Engine(MODEL.native("q4")), [ASKED])["a"]
    engines = []
    for level in (LEVELS[0], LEVELS[-1]):
        program = MODEL.native("q4", isa=level)
        transfer = Transfer.on_this_machine("same", program.info.page_bytes, 1 << 24)
        engines.append(Engine(program, transfer=transfer))
    first = run(engines[0], [replace(ASKED, prefill_only=True)])["a"]
    engines[0].add(replace(ASKED, id="b", prefill_only=True))
    chunks = [chunk for _ in range(20) for chunk in engines[0].step()]
    assert chunks[-1].handoff is not None
    found = run(engines[1], [replace(ASKED, output=tuple(first.tokens), handoff=chunks[-1].handoff)])["a"]
    assert [*first.tokens, *found.tokens] == law.tokens
    assert [*first.logprobs, *found.logprobs] == law.logprobs
    assert found.cached == [96]
    for engine in engines:
        engine.close()


def test_a_worker_with_a_tier(tmp_path: Path) -> None:
    """From settings to an engine, twice: the second finds what the first left, readable by the owner alone;
    a size that is of no use is refused."""
    config = tiny_config("llama")
    model = write_folder(tmp_path / "model", config, random_weights(config))
    settings = EngineSettings(
        model=str(model),
        threads=1,
        max_running=4,
        kv_memory_bytes=1 << 20,
        kv_disk=str(tmp_path / "tier"),
        transfer=True,
    )
    asked = request("a", PROMPT[:40], max_tokens=4)
    outcomes = []
    for _ in range(2):
        engine, info = build_engine(settings)
        tier = engine.load().tier
        assert tier is not None
        assert tier.size_bytes > 1 << 20
        assert tier.page_bytes == info.page_bytes
        outcomes.append(run(engine, [asked])["a"])
        engine.close()
    assert outcomes[0].tokens == outcomes[1].tokens
    assert [outcome.cached for outcome in outcomes] == [[0], [32]]
    (path,) = (tmp_path / "tier").glob("*/*.kv")
    assert os.stat(path).st_mode & 0o077 == 0
    with pytest.raises(ValueError, match="--kv-disk-size"):
        build_engine(replace(settings, kv_disk_bytes=1000))
