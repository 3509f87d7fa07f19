"""The fusing pass: the same numbers from fewer ops, and an error where a pattern is not known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tenfold.backends.base import CompileOptions
from tenfold.backends.torch.reference import TorchBackend
from tenfold.graph.builder import GraphBuilder
from tenfold.graph.fused import FusedAttention, FusedLinear, NormAdd
from tenfold.graph.graph import Graph
from tenfold.graph.ops import Add, Attention, Concat, Embed, Gate, RMSNorm, Rope, SelectRows
from tenfold.graph.passes import fuse
from tenfold.models.registry import build_graph
from tests.helpers.batches import Part, step_batch
from tests.helpers.fused_interpreter import fused_values, run_fused
from tests.helpers.memory_checkpoint import DictCheckpoint
from tests.helpers.tiny_models import CONFIGS, random_weights

TOKENS = np.random.default_rng(3).integers(0, 32, 21).tolist()
WANTED = [0, 13, 20]


def assert_fused_equals_unfused(graph: Graph) -> None:
    weights = random_weights(graph)
    program = TorchBackend().compile(graph, DictCheckpoint(weights, {}), CompileOptions(kv_pages=2))
    plain = program.logits(step_batch(Part(tokens=TOKENS, pages=[0, 1], wanted=WANTED)))
    doubles = {name: torch.from_numpy(weight).double() for name, weight in weights.items()}
    fused = run_fused(fuse(graph), doubles, TOKENS, WANTED)
    np.testing.assert_allclose(fused.numpy(), plain.numpy(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", CONFIGS)
def test_fused_equals_unfused(name: str) -> None:
    """Every family computes the same logits after fusing."""
    assert_fused_equals_unfused(build_graph(CONFIGS[name]))


def test_ops_of_a_llama_layer() -> None:
    """Norms and additions are taken into the linears: five ops a layer, and nothing else but the ends."""
    ops = fuse(build_graph(CONFIGS["llama"])).ops
    layer = [FusedLinear, FusedAttention, FusedLinear, FusedLinear, FusedLinear]
    assert [type(op) for op in ops] == [Embed, *layer * 3, SelectRows, FusedLinear]


def test_ops_of_a_gemma_layer() -> None:
    """The norms after the blocks stay, together with the addition that follows them."""
    ops = fuse(build_graph(CONFIGS["gemma3"])).ops
    layer = [FusedLinear, FusedAttention, FusedLinear, NormAdd, FusedLinear, FusedLinear, NormAdd]
    assert [type(op) for op in ops] == [Embed, *layer * 3, SelectRows, FusedLinear]


def start() -> tuple[GraphBuilder, str]:
    b = GraphBuilder("test")
    return b, b.embed("embed.weight", 32, 16)


def finish(b: GraphBuilder, x: str) -> Graph:
    b.linear(b.select_rows(x), "head.weight", 32)
    return b.build(hidden_size=16, vocab_size=32, max_context=64)


def attention(b: GraphBuilder, x: str, stem: str) -> str:
    q, k, v = (b.linear(x, f"{stem}.{name}.weight", 16) for name in "qkv")
    return b.attention(b.rope(q, 8, 1e4), b.rope(k, 8, 1e4), v, head_dim=8, scale=0.3)


def test_a_norm_with_other_readers_stays() -> None:
    """Parallel attention and MLP read one norm, so neither may take it in; attention that is added without
    an output projection leaves an addition of its own."""
    for projected in (True, False):
        b, x = start()
        normed = b.rms_norm(x, "n.weight", 1e-5)
        out = attention(b, normed, "a")
        if projected:
            out = b.linear(out, "o.weight", 16)
        gated = b.gate(b.linear(normed, "g.weight", 16), b.linear(normed, "u.weight", 16), "gelu")
        graph = finish(b, b.add(b.add(x, out), b.linear(gated, "d.weight", 16)))
        ops = fuse(graph).ops
        assert any(isinstance(op, RMSNorm) for op in ops)
        assert any(isinstance(op, Add) for op in ops) != projected
        assert_fused_equals_unfused(graph)


def test_a_value_with_two_readers_is_kept() -> None:
    """A linear whose result is both added and read again is not fused into the addition."""
    b, x = start()
    y = b.linear(x, "a.weight", 16)
    z = b.linear(y, "b.weight", 16)
    graph = finish(b, b.add(y, z))
    assert_fused_equals_unfused(graph)
    fused = fuse(graph)
    assert y in fused.widths and z not in fused.widths


def test_scaled_and_unusual_graphs_keep_their_meaning() -> None:
    """Attention without rope, scales, a norm that is read by an addition, an addition of two linears."""
    b, x = start()
    q, k, v = (b.linear(x, f"{name}.weight", 16) for name in "qkv")
    attended = b.attention(q, k, v, head_dim=8, scale=0.5, softcap=2.0, window=3)
    x = b.add(b.scale(x, 0.5), b.linear(attended, "o.weight", 16))
    x = b.add(b.rms_norm(x, "norm.weight", 1e-5, weight_offset=0.5), x)
    x = b.add(b.linear(x, "s.weight", 16), b.linear(x, "t.weight", 16))
    assert_fused_equals_unfused(finish(b, x))


def test_ops_that_fit_nowhere_stay() -> None:
    """Additions, gates and joined values with any inputs keep their meaning: no order of ops is refused."""
    b, x = start()
    y = b.add(x, b.embed("other.weight", 32, 16))
    y = b.gate(b.linear(y, "g.weight", 16), b.linear(b.scale(y, 2.0), "u.weight", 16), "silu")
    y = b.gate(y, x, "gelu")
    joined = b.concat(x, b.rms_norm(y, "n.weight", 1e-5), x)
    graph = finish(b, b.softcap(b.linear(joined, "j.weight", 16), 3.0))
    assert {Add, Gate, Concat} <= {type(op) for op in fuse(graph).ops}
    assert_fused_equals_unfused(graph)


def kept_values(graph: Graph) -> list[str]:
    """All that are not inside of an attention."""
    inside: set[str] = set()
    for op in reversed(graph.ops):
        if isinstance(op, Attention) or (op.output in inside and isinstance(op, Rope | RMSNorm)):
            inside.update(op.inputs)
    return [name for name in graph.widths if name not in inside]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_kept_values_survive_with_their_meaning(name: str) -> None:
    """Every value but those inside of an attention can be kept, alone or with all others, and is then what
    the unfused graph computes; the logits stay."""
    graph = build_graph(CONFIGS[name])
    weights = random_weights(graph)
    doubles = {name: torch.from_numpy(weight).double() for name, weight in weights.items()}
    program = TorchBackend().compile(graph, DictCheckpoint(weights, {}), CompileOptions(kv_pages=2))
    batch = step_batch(Part(tokens=TOKENS, pages=[0, 1], wanted=WANTED))
    plain = program._values(batch)
    names = kept_values(graph)
    assert {*graph.layer_outputs, "model.norm"} <= set(names)
    for keep in [names, *([one] for one in names[::7])]:
        fused = fused_values(fuse(graph, keep), doubles, TOKENS, WANTED)
        for value in [*keep, graph.ops[-1].output]:
            np.testing.assert_allclose(fused[value].numpy(), plain[value].numpy(), rtol=0, atol=1e-10)


def test_what_cannot_be_kept_is_refused() -> None:
    """A value inside of an attention, and one that is not there, are named."""
    graph = build_graph(CONFIGS["gemma3"])
    for value in ("model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.k_norm"):
        with pytest.raises(ValueError, match=f"{value}.* cannot be kept"):
            fuse(graph, [value])
    with pytest.raises(ValueError, match="no value 'nowhere'"):
        fuse(graph, ["nowhere"])


def shared_values(b: GraphBuilder, x: str) -> str:
    q, kv = b.linear(x, "q.weight", 16), b.linear(x, "kv.weight", 16)
    return b.attention(q, kv, kv, head_dim=8, scale=1.0)


def keys_not_rotated(b: GraphBuilder, x: str) -> str:
    q, k, v = (b.linear(x, f"{name}.weight", 16) for name in "qkv")
    return b.attention(b.rope(q, 8, 1e4), k, v, head_dim=8, scale=1.0)


def norm_after_rope(b: GraphBuilder, x: str) -> str:
    q, k, v = (b.linear(x, f"{name}.weight", 16) for name in "qkv")
    q = b.rms_norm(b.rope(q, 8, 1e4), "qn.weight", 1e-5, width=8)
    return b.attention(q, b.rope(k, 8, 1e4), v, head_dim=8, scale=1.0)


def rotated_values(b: GraphBuilder, x: str) -> str:
    q, k, v = (b.rope(b.linear(x, f"{name}.weight", 16), 8, 1e4) for name in "qkv")
    return b.attention(q, k, v, head_dim=8, scale=1.0)


def head_norm_alone(b: GraphBuilder, x: str) -> str:
    return b.rms_norm(x, "n.weight", 1e-5, width=8)


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (shared_values, "attention"),
        (keys_not_rotated, "rotated differently"),
        (norm_after_rope, "norm"),
        (rotated_values, "values"),
        (head_norm_alone, "rms_norm"),
    ],
)
def test_unknown_patterns_are_refused(build: Callable[[GraphBuilder, str], str], names: str) -> None:
    """What no fused op can say is an error that names the op, never a graph that means something else."""
    b, x = start()
    graph = finish(b, build(b, x))
    with pytest.raises(NotImplementedError, match=names):
        fuse(graph)
