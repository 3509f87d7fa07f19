"""Tenfold: serve one model fast, with the same answers.

``from tenfold import LLM, SamplingParams`` runs a model in this process; see `tenfold.llm`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenfold.llm import LLM, Completion
    from tenfold.protocol import Constraint, SamplingParams

__all__ = ["LLM", "Completion", "Constraint", "SamplingParams"]

_HOMES = {
    "LLM": "tenfold.llm",
    "Completion": "tenfold.llm",
    "Constraint": "tenfold.protocol",
    "SamplingParams": "tenfold.protocol",
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for only then: a command's help needs none of it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tenfold' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
