"""Calls made of the server's own OpenAPI document: what it allows, and what it does not."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
TIMEOUT_S = 60.0
"""A call that takes longer counts as hung."""


def fuzz(
    url: str,
    calls: int,
    begin: int | None = None,
    model: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Counter[str]:
    """At least so many calls, most of them to the POST endpoints; returns how many ended with which status.

    ``begin``: where the random numbers begin; None: anywhere. ``model``: named by bodies that name one, where
    there are several. ``headers``: of every call. Raises the first failure of a check, and
    requests' Timeout for a call that hangs.
    """
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    statuses: Counter[str] = Counter()
    number = secrets.randbits(32) if begin is None else begin
    with requests.Session() as session:
        session.headers.update(headers or {})
        while statuses.total() < calls:
            for operation in operations:
                post = operation.method.upper() == "POST"
                modes = (
                    (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if post else (GenerationMode.POSITIVE,)
                )
                for mode in modes:
                    number += 1
                    _call(operation, mode, calls // 16 + 1 if post else 2, number, session, statuses, model)
    return statuses


def mend(body: dict[str, Any]) -> None:
    """What a schema of single fields cannot say: else most calls would break a rule between two of them."""
    if body.get("top_logprobs") is not None:
        body["logprobs"] = True
    if body.get("stream_options") is not None:
        body["stream"] = True
    if body.get("max_completion_tokens") is not None:
        body.pop("max_tokens", None)
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) is not None:
            body[name] = min(body[name], 50)
    if body.get("logit_bias"):
        body["logit_bias"] = {"5": next(iter(body["logit_bias"].values()))}


def _call(  # type: ignore[no-untyped-def]
    operation,
    mode,
    examples: int,
    number: int,
    session: requests.Session,
    statuses: Counter[str],
    model: str | None,
) -> None:
    @seed(number)
    @settings(
        max_examples=examples,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case) -> None:  # type: ignore[no-untyped-def]
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            # Else nearly every call would be for a model that is not there.
            case.body.pop("model")
            if model is not None:
                case.body["model"] = model
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            mend(case.body)
        response = case.call_and_validate(session=session, checks=CHECKS, timeout=TIMEOUT_S)
        statuses[f"{operation.path} {response.status_code}"] += 1

    one()
