"""The head as a graph: valid, its two halves share their weights, and it takes over what it should."""

from __future__ import annotations

import msgspec

from tenfold.graph.ops import Input, SelectRows, Softcap
from tenfold.graph.validate import validate
from tenfold.models.recurrent_head import FUSE, FUSE_BIAS, OUTPUT, HeadConfig, recurrent_head

SMOLLM2 = HeadConfig(
    feature_width=3 * 576,
    state_width=576,
    mlp_width=1536,
    vocab_size=4096,
    embedding="model.embed_tokens.weight",
    target_vocab_size=49152,
    embedding_scale=10.0,
)


def test_both_graphs_are_valid_and_share_all_but_the_way_in() -> None:
    """A weight trained in the first step is the one used in all the others; only features come in by their
    own matrix."""
    head = recurrent_head(SMOLLM2)
    for graph, state, name in zip(
        (head.first, head.next), head.state_output, ("features", "state"), strict=True
    ):
        validate(graph)
        assert [op.output for op in graph.ops if isinstance(op, Input)] == [name]
        order = [op.output for op in graph.ops]
        select = next(i for i, op in enumerate(graph.ops) if isinstance(op, SelectRows))
        assert order.index(state) < select, "the state must be of all rows"
        assert graph.widths[state] == head.state_width
    first, following = head.first.weights, head.next.weights
    assert first.keys() - following.keys() == {FUSE, FUSE_BIAS}
    assert following.items() <= first.items()


def test_a_step_reads_as_few_weights_as_planned() -> None:
    """About 4 million of the cell and 2.4 million output rows a step, 1 million once: what makes drafting
    cheap beside the target."""
    head = recurrent_head(SMOLLM2)
    sizes = {
        name: spec.shape[0] * spec.shape[1] for name, spec in head.first.weights.items() if spec.shape[1:]
    }
    del sizes[SMOLLM2.embedding]  # a row of it
    assert sizes[OUTPUT] == 4096 * 576
    assert sizes[FUSE] == 1728 * 576
    assert sum(sizes.values()) - sizes[OUTPUT] - sizes[FUSE] == 3_981_312


def test_the_cap_on_logits_is_taken_over() -> None:
    """A target that caps its logits is drafted for with capped logits: sampled drafts depend on it."""
    head = recurrent_head(msgspec.structs.replace(SMOLLM2, softcap=30.0))
    for graph in (head.first, head.next):
        last = graph.ops[-1]
        assert isinstance(last, Softcap)
        assert last.cap == 30.0
        assert graph.vocab_size == 4096
