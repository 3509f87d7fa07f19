"""What a drafter takes from its target: the right values, rows and name."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tenfold.graph.ops import Linear, RMSNorm, WeightSpec
from tenfold.models.registry import build_graph
from tenfold.speculate.target import TargetModel, check_fingerprint
from tests.helpers.memory_checkpoint import DictCheckpoint
from tests.helpers.tiny_models import CONFIGS, random_weights
from tests.helpers.toy_drafting import toy_target


@pytest.mark.parametrize("name", CONFIGS)
def test_taps_are_the_stream_after_one_and_two_thirds_and_what_logits_are_made_of(name: str) -> None:
    """For every family: what the second and third of three layers read, and the output matrix' input."""
    graph = build_graph(CONFIGS[name])
    target = TargetModel(graph, DictCheckpoint(random_weights(graph), CONFIGS[name]))
    norms = {op.weight.name: op for op in graph.ops if isinstance(op, RMSNorm)}
    linears = {op.weight.name: op for op in graph.ops if isinstance(op, Linear)}
    assert target.taps() == (
        norms["model.layers.1.input_layernorm.weight"].inputs[0],
        norms["model.layers.2.input_layernorm.weight"].inputs[0],
        linears[target.output].inputs[0],
    )
    assert {graph.widths[tap] for tap in target.taps()} == {graph.hidden_size}
    assert target.output in ("lm_head.weight", "model.embed_tokens.weight")
    assert target.softcap == CONFIGS[name].get("final_logit_softcapping", 0.0)


def test_rows_come_in_the_order_asked_for() -> None:
    """Row i of the result is the row of the i-th index, whatever blocks the file is read in."""
    target = toy_target()
    whole = np.concatenate(
        [
            block.dequantize()
            for _, block in target.checkpoint.rows(
                target.output, target.checkpoint.place(target.output, "auto").layout
            )
        ]
    )
    wanted = [70, 3, 95, 3, 0]
    np.testing.assert_array_equal(target.rows(target.output, wanted), whole[wanted])


def test_a_drafter_for_another_target_is_refused_with_what_differs() -> None:
    """Another architecture, size, vocabulary or output matrix is named, with what to do."""
    mine = toy_target().fingerprint()
    assert toy_target().fingerprint() == mine
    check_fingerprint(mine, mine, "folder")
    others = {
        "architecture qwen3": msgspec.structs.replace(mine, architecture="qwen3"),
        "hidden size 65": msgspec.structs.replace(mine, hidden_size=65),
        "vocab size 7": msgspec.structs.replace(mine, vocab_size=7),
        "output matrix": toy_target(seed=1).fingerprint(),
    }
    for differs, other in others.items():
        with pytest.raises(
            ValueError, match=f"folder: made for a target with .*{differs[:6]}.*train a drafter"
        ):
            check_fingerprint(mine, other, "folder")


def test_a_change_of_one_output_weight_changes_the_fingerprint() -> None:
    """The hash is of every row."""
    graph = build_graph(CONFIGS["llama"])
    weights = random_weights(graph)
    before = TargetModel(graph, DictCheckpoint(weights, CONFIGS["llama"])).fingerprint()
    weights["lm_head.weight"][95, 63] += 1e-3
    assert TargetModel(graph, DictCheckpoint(weights, CONFIGS["llama"])).fingerprint() != before


def test_logits_that_a_head_cannot_take_over_are_refused() -> None:
    """An output matrix with a bias is not drafted for wrongly, but refused by name."""
    graph = build_graph(CONFIGS["llama"])
    last = graph.ops[-1]
    assert isinstance(last, Linear)
    biased = msgspec.structs.replace(last, bias=WeightSpec("lm_head.bias", (96,)))
    graph = msgspec.structs.replace(graph, ops=(*graph.ops[:-1], biased))
    with pytest.raises(ValueError, match="plain linear; this one ends in linear"):
        TargetModel(graph, DictCheckpoint({}, CONFIGS["llama"]))
