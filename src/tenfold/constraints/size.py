"""How long a constraint may be."""

from __future__ import annotations

from tenfold.limits import RequestError
from tenfold.protocol import Constraint

MAX_BYTES = 1 << 16
"""Of a schema, a grammar or the choices."""


def check_size(constraint: Constraint) -> None:
    """Raises RequestError for a text that is too long or no Unicode."""
    try:
        size = len(constraint.text.encode())
    except UnicodeEncodeError:
        raise RequestError(constraint.field, "must be valid Unicode; it has a lone surrogate") from None
    if size > MAX_BYTES:
        raise RequestError(constraint.field, f"has {size} bytes; at most {MAX_BYTES} are taken")
