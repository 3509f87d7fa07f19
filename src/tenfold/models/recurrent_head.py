"""The recurrent drafting head: a small model that runs on from a target's hidden states, without attention.

``first`` makes the state from the target's features; each step then folds the newest token into the state and
reads off the next one:

    x     = [norm(state), embedding of the newest token]
    state = state + silu(update_gate x) * update_value x
    state = state + down(silu(gate n) * up n)          with n = norm(state)
    logits = output norm(state)

As the state starts anew from the target's own, nothing has to be kept between steps of the target: no cache
that goes stale, nothing to roll back. (Drafting from fused hidden states: EAGLE-3, arXiv 2503.01840; a
recurrent cell in place of its attention layer: IBM's and Snowflake's speculators.)
"""

from __future__ import annotations

import msgspec

from tenfold.graph.builder import GraphBuilder
from tenfold.graph.graph import Graph
from tenfold.graph.recurrent import RecurrentGraph
from tenfold.models.blocks import gated_mlp

FUSE = "drafter.fuse.weight"
FUSE_BIAS = "drafter.fuse.bias"
UPDATE_VALUE = "drafter.update_value.weight"
MLP_DOWN = "drafter.mlp.down_proj.weight"
OUTPUT_NORM = "drafter.output_norm.weight"
OUTPUT = "drafter.output.weight"
"""The output rows: ``[vocab_size, state_width]``."""


class HeadConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes of a head and what it takes over from its target."""

    feature_width: int
    state_width: int
    """The target's hidden size: the output rows are the target's own."""
    mlp_width: int
    vocab_size: int
    """Output rows, that is tokens that can be drafted."""
    embedding: str
    """Name of the target's embedding table, which the head reads too."""
    target_vocab_size: int
    """Rows of that table: every token can be the newest one."""
    embedding_scale: float
    """What table rows are multiplied by so that their elements are of order one."""
    softcap: float = 0.0
    """The target's cap on logits; 0: none."""
    eps: float = 1e-6


def recurrent_head(config: HeadConfig) -> RecurrentGraph:
    """The two graphs of a head. Raises GraphError for sizes that make no sense."""
    first, first_state = _graph(config, first=True)
    following, next_state = _graph(config, first=False)
    return RecurrentGraph(
        first=first,
        next=following,
        state_output=(first_state, next_state),
        feature_width=config.feature_width,
        state_width=config.state_width,
    )


def _graph(config: HeadConfig, *, first: bool) -> tuple[Graph, str]:
    """A graph and the name of the state that it computes."""
    width = config.state_width
    b = GraphBuilder("recurrent-head")
    if first:
        state = b.linear(b.input("features", config.feature_width), FUSE, width, FUSE_BIAS)
    else:
        state = b.input("state", width)
    token = b.embed(config.embedding, config.target_vocab_size, width, config.embedding_scale)
    x = b.concat(b.rms_norm(state, "drafter.state_norm.weight", config.eps), token)
    update = b.gate(
        b.linear(x, "drafter.update_gate.weight", width),
        b.linear(x, UPDATE_VALUE, width),
        "silu",
    )
    state = b.add(state, update)
    normed = b.rms_norm(state, "drafter.mlp_norm.weight", config.eps)
    state = b.add(state, gated_mlp(b, normed, "drafter.mlp", config.mlp_width, "silu", width))
    logits = b.linear(b.rms_norm(b.select_rows(state), OUTPUT_NORM, config.eps), OUTPUT, config.vocab_size)
    if config.softcap:
        b.softcap(logits, config.softcap)
    graph = b.build(hidden_size=width, vocab_size=config.vocab_size, max_context=1)
    return graph, state
