"""Where the final hidden states of a graph come from: what a text's embedding is made of."""

from __future__ import annotations

from typing import NamedTuple

from tenfold.graph.graph import Graph
from tenfold.graph.ops import RMSNorm, SelectRows


class FinalStates(NamedTuple):
    """The final hidden state of a row is ``norm`` of its row of ``source``: what the output matrix reads of
    the rows whose logits are wanted, and transformers' ``last_hidden_state``."""

    source: str
    """The residual stream after the last layer: a value of all rows."""
    norm: RMSNorm


def final_states(graph: Graph) -> FinalStates | None:
    """Those of a graph that selects rows and norms them whole; None for another."""
    for select in graph.ops:
        if isinstance(select, SelectRows):
            (source,) = select.inputs
            for norm in graph.ops:
                if isinstance(norm, RMSNorm) and norm.inputs == (select.output,):
                    return FinalStates(source, norm) if norm.width == graph.widths[source] else None
    return None
