"""Which values a program hands back beside its logits, and where in a row of features each stands."""

from __future__ import annotations

from collections.abc import Sequence

from tenfold.graph.graph import Graph


def feature_columns(graph: Graph, taps: Sequence[str]) -> list[tuple[str, int]]:
    """Each tap with its first column in `StepOutput.features`.

    Raises ValueError for a name that is no value of the graph.
    """
    columns = []
    width = 0
    for name in taps:
        if name not in graph.widths:
            selected = graph.selected
            ends = (value for value in graph.widths if value in selected)
            known = ", ".join((*graph.layer_outputs, *ends))
            raise ValueError(f"taps: {graph.name} has no value {name!r}; it has, among others, {known}")
        columns.append((name, width))
        width += graph.widths[name]
    return columns
