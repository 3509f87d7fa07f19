"""GGUF files as checkpoints: names, row order, norms, configuration, layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from tenfold.checkpoint.base import Checkpoint, CheckpointError
from tenfold.checkpoint.gguf_checkpoint import GGUFCheckpoint
from tenfold.formats.ggml import GGML_TYPES
from tenfold.formats.matrix import Format, Layout
from tests.helpers.model_files import (
    Tensors,
    encode,
    gguf_metadata,
    gguf_name,
    random_weights,
    tiny_config,
    weight_shapes,
    write_gguf,
    write_gguf_model,
)

FAMILIES = ["llama", "qwen2", "qwen3", "gemma3"]
F32 = Layout(Format.F32)


def read(checkpoint: Checkpoint, name: str, layout: Layout, block_rows: int = 0) -> npt.NDArray[np.float32]:
    """The whole weight as float32, assembled from its blocks."""
    blocks, at = [], 0
    for first, block in checkpoint.rows(name, layout, block_rows):
        assert first == at
        assert block.layout == layout
        blocks.append(block.dequantize())
        at += len(block.codes)
    return np.concatenate(blocks)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_rows", [0, 16, 48])
def test_weights_come_back_canonical(tmp_path: Path, family: str, block_rows: int) -> None:
    """What a converter renamed, permuted and shifted is undone; blocks of 48 rows cut through heads."""
    config = tiny_config(family, num_hidden_layers=3, hidden_size=96, head_dim=64)
    weights = random_weights(config)
    checkpoint = GGUFCheckpoint(str(write_gguf_model(tmp_path / "m.gguf", config, weights)))
    assert checkpoint.architecture == family
    infos = checkpoint.tensors()
    assert {name: info.shape for name, info in infos.items()} == weight_shapes(config)
    for name, expected in weights.items():
        assert infos[name].name == name
        assert infos[name].stored_type == "F32"
        placement = checkpoint.place(name, "auto")
        assert placement.layout == F32
        got = read(checkpoint, name, F32, block_rows)
        if family == "gemma3" and name.endswith("norm.weight"):
            np.testing.assert_allclose(got[0], expected, atol=1e-7)
        else:
            np.testing.assert_array_equal(got.reshape(expected.shape), expected)
    checkpoint.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_comes_back(tmp_path: Path, family: str) -> None:
    """Metadata give the config.json that the model was converted from."""
    config = tiny_config(family, num_hidden_layers=7)
    path = write_gguf_model(tmp_path / "m.gguf", config, random_weights(config))
    checkpoint = GGUFCheckpoint(str(path))
    assert checkpoint.config == config
    checkpoint.close()


@pytest.mark.parametrize(
    "kind", [kind for kind in GGML_TYPES.values() if kind.block > 1], ids=lambda kind: kind.name
)
def test_rows_of_blocks_are_permuted_whole(tmp_path: Path, kind: Any) -> None:
    """For every quantized type q is the reference's dequantized matrix with its rows in canonical order."""
    config = tiny_config("llama", hidden_size=256, intermediate_size=256, head_dim=64)
    path = write_gguf_model(tmp_path / "m.gguf", config, random_weights(config), kind.name)
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    checkpoint = GGUFCheckpoint(str(path))
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"):
        name = f"model.layers.1.{name}.weight"
        stored = reference[gguf_name(name, "llama")]
        expected = gguf.quants.dequantize(stored.data, stored.tensor_type)
        if "q_proj" in name:
            expected = expected.reshape(4, 32, 2, 256).swapaxes(1, 2).reshape(256, 256)
        placement = checkpoint.place(name, "auto")
        assert (placement.layout, placement.lossless) == (kind.layout, True)
        assert kind.name in placement.why
        np.testing.assert_array_equal(read(checkpoint, name, placement.layout, 32), expected)
        np.testing.assert_array_equal(read(checkpoint, name, F32), expected)
    checkpoint.close()


def test_placements(tmp_path: Path) -> None:
    """Every request gets the layout it asks for, a grid of that format is kept, and the reason is said."""
    config = tiny_config("llama", intermediate_size=48)
    kinds = {"q_proj": "Q4_0", "k_proj": "Q8_0", "v_proj": "BF16", "o_proj": "F16", "up_proj": "Q5_1"}

    def kind_of(name: str) -> str:
        return next((kind for part, kind in kinds.items() if part in name), "F32")

    path = write_gguf_model(tmp_path / "m.gguf", config, random_weights(config), kind_of)
    checkpoint = GGUFCheckpoint(str(path))
    at = "model.layers.0."
    q8, q4 = Layout(Format.Q8, group=32), Layout(Format.Q4, group=32, has_minimum=True)
    bf16 = Layout(Format.BF16)
    q5_1 = Layout(Format.Q8, group=32, has_minimum=True)
    table = [
        ("self_attn.q_proj", "auto", Layout(Format.Q4, group=32), True, "Q4_0 grid kept"),
        ("self_attn.q_proj", "q4", Layout(Format.Q4, group=32), True, "Q4_0 grid kept"),
        ("self_attn.q_proj", "q8", q8, False, "requantized from Q4_0 by --format q8"),
        ("self_attn.q_proj", "f32", F32, True, "dequantized from Q4_0 by --format f32"),
        ("self_attn.q_proj", "bf16", bf16, False, "requantized from Q4_0 by --format bf16"),
        ("self_attn.k_proj", "q8", q8, True, "Q8_0 grid kept"),
        ("self_attn.k_proj", "q4", q4, False, "requantized from Q8_0 by --format q4"),
        ("self_attn.v_proj", "auto", bf16, True, "BF16 kept"),
        ("self_attn.v_proj", "f32", F32, True, "widened from BF16 by --format f32"),
        ("self_attn.o_proj", "auto", F32, True, "F16 widened to F32"),
        ("self_attn.o_proj", "bf16", bf16, False, "rounded from F16 by --format bf16"),
        ("mlp.up_proj", "auto", q5_1, True, "Q5_1 grid kept"),
        ("mlp.gate_proj", "q4", q4, False, "rounded from F32 by --format q4"),
        (
            "mlp.down_proj",
            "q8",
            bf16,
            False,
            "48 columns are not whole groups of 32: BF16 in place of --format q8",
        ),
        ("input_layernorm", "q4", F32, True, "vectors are held as F32"),
    ]
    for part, requested, layout, lossless, why in table:
        placement = checkpoint.place(f"{at}{part}.weight", requested)
        assert (placement.layout, placement.lossless, placement.why) == (layout, lossless, why), part
        exact = read(checkpoint, f"{at}{part}.weight", F32)
        got = read(checkpoint, f"{at}{part}.weight", placement.layout)
        if lossless:
            np.testing.assert_array_equal(got, exact)
        else:
            assert 0 < np.abs(got - exact).max() < 0.1 * np.abs(exact).max()
    with pytest.raises(ValueError, match="fp8"):
        checkpoint.place("model.norm.weight", "fp8")
    with pytest.raises(ValueError, match="multiple of 16"):
        checkpoint.rows("lm_head.weight", F32, 8)
    with pytest.raises(ValueError, match="vector"):
        checkpoint.rows("model.norm.weight", q8)
    with pytest.raises(KeyError):
        checkpoint.rows("model.missing", F32)
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        list(checkpoint.rows("lm_head.weight", F32))


def test_biases_of_llama_are_permuted_too(tmp_path: Path) -> None:
    """A llama with biases rotates them with their rows, and says that it has them."""
    config = tiny_config("llama", attention_bias=True)
    weights = random_weights(config)
    checkpoint = GGUFCheckpoint(str(write_gguf_model(tmp_path / "m.gguf", config, weights)))
    assert checkpoint.config["attention_bias"] is True
    for part in "qkv":
        name = f"model.layers.1.self_attn.{part}_proj.bias"
        np.testing.assert_array_equal(read(checkpoint, name, F32)[0], weights[name])
    checkpoint.close()


def test_a_damaged_scale_is_named(tmp_path: Path) -> None:
    """The error has the file, the tensor and the very byte, also where rows are permuted."""
    config = tiny_config("llama")
    path = write_gguf_model(tmp_path / "m.gguf", config, random_weights(config), "Q8_0")
    name = "model.layers.1.self_attn.k_proj.weight"
    checkpoint = GGUFCheckpoint(str(path))
    info = checkpoint.tensors()[name]
    checkpoint.close()
    position = info.offset + 21 * 68 + 34
    data = bytearray(path.read_bytes())
    data[position : position + 2] = b"\x00\x7c"
    path.write_bytes(data)
    checkpoint = GGUFCheckpoint(str(path))
    layout = checkpoint.place(name, "auto").layout
    assert layout.format is Format.Q8
    with pytest.raises(CheckpointError) as caught:
        list(checkpoint.rows(name, layout))
    for part in (str(path), name, f"byte {position}"):
        assert part in str(caught.value)
    checkpoint.close()


def test_what_a_layout_cannot_hold_is_named(tmp_path: Path) -> None:
    """A weight too large for float16 scales is an error of the tensor, not of numpy."""
    config = tiny_config("llama")
    weights = random_weights(config)
    weights["lm_head.weight"][100, 5] = 1e9
    checkpoint = GGUFCheckpoint(str(write_gguf_model(tmp_path / "m.gguf", config, weights)))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*beyond the range of float16"):
        list(checkpoint.rows("lm_head.weight", Layout(Format.Q8, group=32)))
    checkpoint.close()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_behind_its_factors(tmp_path: Path, factor: float) -> None:
    """Llama 3.x files only have factors: the config gets the rule behind them, and they are no weight."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = tiny_config("llama", rope_scaling=scaling, rope_theta=500000.0, head_dim=64)
    checkpoint = GGUFCheckpoint(str(write_gguf_model(tmp_path / "m.gguf", config, random_weights(config))))
    assert checkpoint.config == config
    assert set(checkpoint.tensors()) == set(weight_shapes(config))
    checkpoint.close()


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    """Factors of a rule that is not known would silently give another model; factors of one are none."""
    config = tiny_config("llama")
    tensors: Tensors = {
        gguf_name(name, "llama"): (values.shape, "F32", encode(values, "F32"))
        for name, values in random_weights(config).items()
    }
    tensors["rope_freqs.weight"] = ((8,), "F32", np.linspace(1, 4, 8, dtype=np.float32).tobytes())
    path = write_gguf(tmp_path / "m.gguf", gguf_metadata(config), tensors)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight does not follow"):
        GGUFCheckpoint(str(path))
    tensors["rope_freqs.weight"] = ((8,), "F32", np.ones(8, dtype=np.float32).tobytes())
    checkpoint = GGUFCheckpoint(str(write_gguf(path, gguf_metadata(config), tensors)))
    assert checkpoint.config["rope_scaling"] is None
    checkpoint.close()


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    """Both come back as Hugging Face writes them; YaRN's attention factor is spelled out."""
    for scaling in (
        {"rope_type": "linear", "factor": 8.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ):
        config = tiny_config("qwen3", rope_scaling=scaling)
        checkpoint = GGUFCheckpoint(
            str(write_gguf_model(tmp_path / "m.gguf", config, random_weights(config)))
        )
        got = checkpoint.config["rope_scaling"]
        assert got | scaling == got
        if scaling["rope_type"] == "yarn":
            assert got["attention_factor"] == pytest.approx(1.138629)
            assert (got["beta_fast"], got["beta_slow"]) == (32.0, 1.0)
        checkpoint.close()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "mamba"}, "architecture 'mamba'"),
    ({"general.architecture": 7}, "architecture 7"),
    ({"split.count": 3}, "split into 3 files"),
    ({"llama.expert_count": 8}, "llama.expert_count = 8"),
    ({"llama.attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv = 8.0"),
    ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
    ({"llama.rope.scaling.type": "yarn"}, "original_context_length"),
    ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count = 8"),
    ({"llama.attention.value_length": 32}, "llama.attention.value_length = 32"),
    ({"llama.attention.head_count": 3}, "llama.attention.head_count = 3"),
    ({"llama.attention.head_count": 8}, "blk.0.attn_q.weight"),
    ({"llama.attention.head_count_kv": [2, 1]}, "differs from layer to layer"),
    ({"llama.attention.head_count_kv": []}, "differs from layer to layer"),
    ({"llama.block_count": 1}, "llama.block_count = 1"),
    ({"llama.block_count": 2**31 - 1}, "llama.block_count = 2147483647"),
    ({"llama.block_count": "2"}, "llama.block_count = '2'"),
    ({"llama.block_count": True}, "llama.block_count = True"),
    ({"llama.embedding_length": 65}, "llama.embedding_length = 65"),
    ({"llama.feed_forward_length": 0}, "llama.feed_forward_length = 0"),
    ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon = 0.0"),
    ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base = nan"),
    ({"llama.rope.freq_base": "x"}, "llama.rope.freq_base = 'x'"),
    ({"llama.attention.causal": False}, "llama.attention.causal = False"),
]


@pytest.mark.parametrize(
    ("change", "message"), REFUSED, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_metadata_that_are_unsupported_or_wrong(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """A key that would make it another model is never passed over: the error has its name and value."""
    config = tiny_config("llama")
    path = write_gguf_model(tmp_path / "m.gguf", config, random_weights(config), metadata=change)
    with pytest.raises(CheckpointError) as caught:
        GGUFCheckpoint(str(path))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "key", ["llama.embedding_length", "llama.context_length", "llama.feed_forward_length"]
)
def test_missing_metadata_are_named(tmp_path: Path, key: str) -> None:
    """What the file should say and does not is an error, not a guess."""
    config = tiny_config("llama")
    metadata = gguf_metadata(config)
    del metadata[key]
    tensors = {
        gguf_name(name, "llama"): (values.shape, "F32", encode(values, "F32"))
        for name, values in random_weights(config).items()
    }
    with pytest.raises(CheckpointError, match=f"{key} is missing"):
        GGUFCheckpoint(str(write_gguf(tmp_path / "m.gguf", metadata, tensors)))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("blk.0.ffn_gate_inp.weight", (4, 64)), ("blk.0.attn_q_norm.weight", (16,)), ("v.patch.weight", (4, 64)),
     ("blk.00.attn_norm.weight", (64,)), ("blk.0.attn_norm.bias", (64,))],
)  # fmt: skip
def test_tensors_of_other_features_are_named(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    """A tensor that this architecture has no use for means that the model is not the one we would compute."""
    config = tiny_config("llama")
    tensors = {
        gguf_name(known, "llama"): (values.shape, "F32", encode(values, "F32"))
        for known, values in random_weights(config).items()
    }
    tensors[name] = (shape, "F32", bytes(4 * int(np.prod(shape))))
    with pytest.raises(CheckpointError, match="not supported in architecture llama") as caught:
        GGUFCheckpoint(str(write_gguf(tmp_path / "m.gguf", gguf_metadata(config), tensors)))
    assert name in str(caught.value)
