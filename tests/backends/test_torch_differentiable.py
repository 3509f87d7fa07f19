"""What is trained is what is served: the executor agrees with the oracle, and its gradients are right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tenfold.backends.base import CompileOptions
from tenfold.backends.torch.differentiable import execute
from tenfold.backends.torch.reference import TorchBackend
from tenfold.graph.builder import GraphBuilder
from tenfold.graph.graph import Graph
from tenfold.models.recurrent_head import HeadConfig, recurrent_head
from tests.helpers.batches import Part, step_batch
from tests.helpers.memory_checkpoint import DictCheckpoint
from tests.helpers.tiny_models import random_weights

TOKENS = [3, 17, 3, 49, 41]


def every_row_wise_op() -> Graph:
    """All ops that the reference backend runs and that do not mix rows."""
    b = GraphBuilder("test")
    x = b.embed("embed.weight", 50, 32, scale=1.5)
    normed = b.rms_norm(x, "norm.weight", 1e-5, width=16, weight_offset=1.0)
    silu = b.gate(b.linear(normed, "a.weight", 32, "a.bias"), b.linear(normed, "b.weight", 32), "silu")
    gelu = b.gate(b.linear(x, "c.weight", 32), silu, "gelu")
    x = b.add(x, b.scale(gelu, 0.7))
    b.softcap(b.linear(b.rms_norm(b.select_rows(x), "out_norm.weight", 1e-6), "out.weight", 50), 2.0)
    return b.build(hidden_size=32, vocab_size=50, max_context=64)


def test_agrees_with_the_oracle() -> None:
    """Each op gives in float32 what the float64 reference gives."""
    graph = every_row_wise_op()
    weights = random_weights(graph)
    oracle = TorchBackend().compile(graph, DictCheckpoint(weights, {}), CompileOptions(kv_pages=1))
    expected = oracle.logits(step_batch(Part(tokens=TOKENS, pages=[0], wanted=[1, 2, 4])))
    values = execute(
        graph,
        {name: torch.from_numpy(w) for name, w in weights.items()},
        torch.tensor(TOKENS),
        {},
        torch.tensor([1, 2, 4]),
    )
    torch.testing.assert_close(values[graph.ops[-1].output].double(), expected, rtol=1e-5, atol=1e-5)


def tiny_head() -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    config = HeadConfig(
        feature_width=12,
        state_width=4,
        mlp_width=6,
        vocab_size=5,
        embedding="embed.weight",
        target_vocab_size=9,
        embedding_scale=0.5,
        softcap=3.0,
    )
    graph = recurrent_head(config)
    weights = {**random_weights(graph.next), **random_weights(graph.first)}
    return config, {name: torch.from_numpy(w).double() for name, w in weights.items()}


def test_a_head_computes_what_its_description_says() -> None:
    """The two graphs, with inputs handed in and values joined, are the formula in the model file's head."""
    config, w = tiny_head()
    head = recurrent_head(config)
    rng = np.random.default_rng(3)
    features = torch.from_numpy(rng.standard_normal((2, 12)))
    tokens = [torch.tensor([8, 0]), torch.tensor([2, 2])]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(dim=1, keepdim=True) + config.eps).sqrt() * w[f"drafter.{name}.weight"]

    def silu(x: torch.Tensor) -> torch.Tensor:
        return x / (1 + torch.exp(-x))

    state = features @ w["drafter.fuse.weight"].T + w["drafter.fuse.bias"]
    graph, inputs = head.first, {"features": features}
    for step in range(2):
        x = torch.cat([norm(state, "state_norm"), 0.5 * w["embed.weight"][tokens[step]]], dim=1)
        gate, value = (x @ w[f"drafter.update_{name}.weight"].T for name in ("gate", "value"))
        state = state + silu(gate) * value
        n = norm(state, "mlp_norm")
        gate, up = (n @ w[f"drafter.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        state = state + (silu(gate) * up) @ w["drafter.mlp.down_proj.weight"].T
        logits = 3 * torch.tanh(norm(state, "output_norm") @ w["drafter.output.weight"].T / 3)

        values = execute(graph, w, tokens[step], inputs, dtype=torch.float64)
        torch.testing.assert_close(values[graph.ops[-1].output], logits)
        torch.testing.assert_close(values[head.state_output[step]], state)
        graph, inputs = head.next, {"state": values[head.state_output[step]]}


def test_gradients_are_right() -> None:
    """Gradients through two unrolled steps are those of finite differences, for weights and features."""
    config, weights = tiny_head()
    head = recurrent_head(config)
    names = sorted(weights)

    def logits(features: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        w = dict(zip(names, tensors, strict=True))
        one = execute(head.first, w, torch.tensor([1, 5]), {"features": features}, dtype=torch.float64)
        state = {"state": one[head.state_output[0]]}
        two = execute(head.next, w, torch.tensor([5, 7]), state, dtype=torch.float64)
        return two[head.next.ops[-1].output]

    features = torch.randn(2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inputs = [x.clone().requires_grad_() for x in (features, *(weights[name] for name in names))]
    assert torch.autograd.gradcheck(logits, inputs)


def test_an_op_that_mixes_rows_is_refused_by_name() -> None:
    """A graph with attention is no graph that can be trained here; the error says which op."""
    b = GraphBuilder("test")
    x = b.embed("embed.weight", 8, 8)
    x = b.attention(x, x, x, head_dim=8, scale=1.0)
    b.linear(b.select_rows(x), "out.weight", 8)
    graph = b.build(hidden_size=8, vocab_size=8, max_context=4)
    weights = {name: torch.from_numpy(w) for name, w in random_weights(graph).items()}
    with pytest.raises(NotImplementedError, match=r"attention.*mixes rows"):
        execute(graph, weights, torch.tensor([1]), {})
