"""A small model that runs on from another's hidden states: what a recurrent drafter is."""

from __future__ import annotations

import msgspec

from tenfold.graph.graph import Graph


class RecurrentGraph(msgspec.Struct, frozen=True, kw_only=True):
    """Two graphs without attention that share weights by name.

    A row is a sequence. ``first`` reads the sequence's newest token and the `Input` value ``features`` (the
    target's hidden states that led to that token), ``next`` the token just drafted and the `Input` value
    ``state``. Both have logits over ``vocab_size`` rows (see ``token_ids`` of whoever runs them), and both
    compute the value named ``state_output``, ``[rows, state_width]``, that is the following step's ``state``.
    """

    first: Graph
    next: Graph
    state_output: tuple[str, str]
    """Its name in ``first`` and in ``next``: a value of all rows, before any select_rows."""
    feature_width: int
    state_width: int
