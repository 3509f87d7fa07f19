"""The other end of `tenfold.bench.peers.Peer`, for processes that do not have Tenfold."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(orders: dict[str, Callable[..., Any]]) -> None:
    """Answers orders, a JSON object a line, until standard input ends; ``orders`` itself is one, whose answer
    is the names of all. What libraries print to standard output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    orders = {**orders, "orders": lambda: list(orders)}
    for line in sys.stdin:
        fields = json.loads(line)
        try:
            answer = {"answer": orders[fields.pop("order")](**fields)}
        except Exception as error:  # whatever a foreign library raises is an answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
