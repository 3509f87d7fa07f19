"""Checks of what a recurrent program is compiled from."""

from __future__ import annotations

import numpy as np

from tenfold.backends.base import Int32s
from tenfold.graph.ops import Embed
from tenfold.graph.recurrent import RecurrentGraph, validate_recurrent


def check_recurrent(graph: RecurrentGraph, token_ids: Int32s, vocab_size: int, max_sequences: int) -> Int32s:
    """``token_ids`` as a contiguous array. Raises ValueError, naming the argument, for what does not fit."""
    validate_recurrent(graph)
    rows = graph.first.vocab_size
    if max_sequences < 1:
        raise ValueError(f"max_sequences must be positive, is {max_sequences}")
    if token_ids.shape != (rows,):
        raise ValueError(f"token_ids: shape {token_ids.shape}, the output matrix has {rows} rows")
    for op in (*graph.first.ops, *graph.next.ops):
        if isinstance(op, Embed) and op.weight.shape[0] < vocab_size:
            raise ValueError(f"{op.weight.name}: {op.weight.shape[0]} rows for a vocabulary of {vocab_size}")
    wrong = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if len(wrong):
        raise ValueError(f"token_ids: {wrong[0]} is not in the vocabulary of {vocab_size}")
    ids, counts = np.unique(token_ids, return_counts=True)
    if len(ids) < rows:
        raise ValueError(f"token_ids: {ids[counts > 1][0]} stands for more than one row")
    return np.ascontiguousarray(token_ids, dtype=np.int32)
