"""Rotary parameters from a configuration, old style (rope_theta, rope_scaling) or new (rope_parameters)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from tenfold.graph.ops import RopeScaling
from tenfold.models.settings import Settings, positive_number


class Rotation(msgspec.Struct, frozen=True):
    """The rotary embedding of a layer."""

    theta: float
    scaling: RopeScaling = RopeScaling()


KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "truncate",
    },
}
"""Parameters of each kind beside its name and theta."""


def rotation(settings: Settings) -> Rotation:
    """The rotary embedding of a model that has one for all layers."""
    parameters = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"{settings.family}: rope parameters must be a table, are {parameters!r}")
    theta = parameters.get("rope_theta", settings.get("rope_theta"))
    return Rotation(
        positive_number(settings.family, "rope_theta", 10000.0 if theta is None else theta),
        parse_scaling(settings, parameters),
    )


def parse_scaling(settings: Settings, parameters: Mapping[str, Any]) -> RopeScaling:
    """The scaling that a ``rope_scaling`` or ``rope_parameters`` table describes.

    Raises ValueError for a kind or a parameter that is not implemented.
    """
    family = settings.family
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in KEYS:
        raise ValueError(f"{family}: rope_type {kind!r} is not supported (supported: {', '.join(KEYS)})")
    common = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if parameters.get("partial_rotary_factor", 1) not in (None, 1):
        value = parameters["partial_rotary_factor"]
        raise ValueError(f"{family}: rope partial_rotary_factor = {value!r} is not supported")
    given = {key for key, value in parameters.items() if value is not None}
    if strange := sorted(given - common - KEYS[kind]):
        raise ValueError(f"{family}: rope parameter {strange[0]!r} of rope_type {kind!r} is not supported")
    if kind == "default":
        return RopeScaling()

    def number(key: str, otherwise: float | None = None) -> float:
        value = parameters.get(key)
        return positive_number(family, f"rope {key}", otherwise if value is None else value)

    factor = number("factor")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    # The top-level key goes first, then the table's, then the model's own context, as in transformers.
    original = settings.get("original_max_position_embeddings")
    if original is None:
        original = parameters.get("original_max_position_embeddings")
    if original is None:
        original = settings.size("max_position_embeddings")
    context = int(positive_number(family, "rope original_max_position_embeddings", original))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=factor,
            original_context=context,
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
        )
    if parameters.get("truncate") is False:
        raise ValueError(f"{family}: rope truncate = false is not supported")
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        attention = _magnitude(factor, number("mscale")) / _magnitude(factor, number("mscale_all_dim"))
    else:
        attention = _magnitude(factor, 1.0)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context=context,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=number("attention_factor", attention),
    )


def max_context(settings: Settings, scaling: RopeScaling) -> int:
    """Positions the model was made for. A yarn table may stretch them beyond ``max_position_embeddings``."""
    stated = settings.size("max_position_embeddings")
    if scaling.kind != "yarn":
        return stated
    return max(stated, int(scaling.original_context * scaling.factor))


def _magnitude(factor: float, mscale: float) -> float:
    """How much yarn turns up attention for a stretch by ``factor`` (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
