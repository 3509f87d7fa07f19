"""The query of a request, as strictly as the fields of a body."""

from __future__ import annotations

from urllib.parse import parse_qsl

from tenfold.server.errors import ApiError


def read_query(query: bytes, known: tuple[str, ...]) -> dict[str, str]:
    """Its parameters by name. Raises ApiError (400) for one that nobody knows here or that is there twice."""
    asked: dict[str, str] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name not in known:
            there = f"; there is: {', '.join(known)}" if known else "; there is none here"
            raise ApiError(
                400, f"unknown query parameter {name:.80}{there}", param=name, code="unknown_parameter"
            )
        if name in asked:
            raise ApiError(400, f"the query has {name} twice; give it once", param=name, code="invalid_value")
        asked[name] = value
    return asked
