"""Running a graph without attention in torch such that gradients reach its weights and inputs.

What is trained is then the graph itself, the same that a backend compiles, and no second description of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tenfold.backends.torch import functions
from tenfold.backends.torch.functions import Tensor
from tenfold.graph.graph import Graph
from tenfold.graph.ops import AnyOp, Embed, Input, Linear, SelectRows
from tenfold.graph.validate import describe


def execute(
    graph: Graph,
    weights: Mapping[str, Tensor],
    tokens: Tensor,
    inputs: Mapping[str, Tensor],
    rows: Tensor | None = None,
    *,
    dtype: Any = torch.float32,
    after: Callable[[AnyOp, Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Every value of ``graph`` by name, for rows of ``tokens`` ``[R]``.

    ``weights`` are tensors ``[out, in]`` by name, ``inputs`` the `Input` values ``[R, width]``, ``rows`` the
    indices of the wanted rows (None: all of them). Embeddings and linears give ``dtype`` whatever precision
    they were computed in (an embedding table may be bfloat16, and linears are under torch's autocast).
    ``after`` may change a value before others read it: dropout, say.

    Raises KeyError for a weight or input that is not given, NotImplementedError for ops that mix rows.
    """
    values: dict[str, Tensor] = {}
    for op in graph.ops:
        value = _run(op, [values[name] for name in op.inputs], weights, tokens, inputs, rows, dtype)
        values[op.output] = value if after is None else after(op, value)
    return values


def _run(
    op: AnyOp,
    x: list[Tensor],
    weights: Mapping[str, Tensor],
    tokens: Tensor,
    inputs: Mapping[str, Tensor],
    rows: Tensor | None,
    dtype: Any,
) -> Tensor:
    w = [weights[spec.name] for spec in op.weights]
    match op:
        case Embed():
            return torch.nn.functional.embedding(tokens, w[0]).to(dtype) * op.scale
        case Input():
            return inputs[op.output]
        case Linear():
            return torch.nn.functional.linear(x[0], *w).to(dtype)
        case SelectRows():
            return x[0] if rows is None else x[0][rows]
    try:
        return functions.row_wise(op, x, w)
    except NotImplementedError:
        raise NotImplementedError(
            f"{describe(op)} mixes rows; only graphs without attention can be trained"
        ) from None
