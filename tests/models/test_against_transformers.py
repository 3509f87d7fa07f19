"""Each family computes what Hugging Face's implementation of it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from tenfold.backends.base import CompileOptions
from tenfold.backends.torch.reference import TorchBackend
from tenfold.graph.graph import Graph
from tenfold.models.registry import build_graph
from tests.helpers.batches import Part, step_batch
from tests.helpers.memory_checkpoint import DictCheckpoint
from tests.helpers.tiny_models import CONFIGS, random_weights

Arrays = dict[str, npt.NDArray[np.float32]]
TOKENS = np.random.default_rng(7).integers(0, 96, 40).tolist()


@contextmanager
def float32_means(dtype: Any) -> Iterator[None]:
    """Transformers computes norms, angles and softmax in float32 whatever the model's dtype. Inside this, the
    name float32 stands for ``dtype`` in its code, so that a float64 model is float64 throughout."""
    with pytest.MonkeyPatch.context() as patch:
        default = torch.get_default_dtype()
        if dtype is torch.float64:
            patch.setattr(torch, "float32", dtype)
            patch.setattr(torch, "float", dtype)
            patch.setattr(torch.Tensor, "float", lambda self: self.to(dtype))
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def transformers_logits(config: dict[str, Any], weights: Arrays, dtype: Any) -> npt.NDArray[np.float64]:
    kind = {"gemma3_text": transformers.Gemma3TextConfig}.get(config["model_type"])
    kind = kind or transformers.CONFIG_MAPPING[config["model_type"]]
    with float32_means(dtype):
        settings = kind.from_dict({key: value for key, value in config.items() if key != "model_type"})
        settings._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(settings).to(dtype).eval()
        state = {name: torch.from_numpy(weight).to(dtype) for name, weight in weights.items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected
        assert set(missing) <= ({"lm_head.weight"} if settings.tie_word_embeddings else set())
        with torch.inference_mode():
            logits = model(torch.tensor([TOKENS])).logits[0]
    assert logits.dtype is dtype
    return np.asarray(logits, dtype=np.float64)


def tenfold_logits(graph: Graph, weights: Arrays, dtype: Any) -> npt.NDArray[np.float64]:
    options = CompileOptions(kv_pages=3)
    program = TorchBackend(dtype).compile(graph, DictCheckpoint(weights, {}), options)
    return np.asarray(program.logits(step_batch(Part(tokens=TOKENS, pages=[2, 0, 1]))), dtype=np.float64)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("float64", 1e-9)])
def test_logits_match(name: str, dtype: str, limit: float) -> None:
    """Every family and feature has the logits of transformers: in float64 nothing but rounding may differ."""
    graph = build_graph(CONFIGS[name])
    weights = random_weights(graph)
    ours = tenfold_logits(graph, weights, dtype)
    theirs = transformers_logits(CONFIGS[name], weights, getattr(torch, dtype))
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= limit * np.abs(theirs).max()
    # The planted features must matter: logits that hardly depend on anything would match by accident.
    assert theirs.std() > 0.1
