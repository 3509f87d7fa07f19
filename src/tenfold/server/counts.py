"""Counts of an engine from a moment on."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct
from msgspec.structs import replace

from tenfold.protocol import LoadSnapshot

COUNTED = {
    "LoadSnapshot": (
        "prompt_tokens",
        "cached_tokens",
        "generated_tokens",
        "preemptions",
        "speculation",
        "constraints",
        "tier",
        "transfer",
    ),
    "TierCounts": ("stored_pages", "dropped_pages", "restored_pages", "restores", "corrupt", "errors"),
}
"""Fields that only grow, by struct; of the others all do."""


def counts_since(base: LoadSnapshot, now: LoadSnapshot) -> LoadSnapshot:
    """``now`` with what was counted since ``base``. Gauges, steps and sequence numbers stay."""
    since: LoadSnapshot = _since(base, now)
    return since


def _since(base: Any, now: Any) -> Any:
    if isinstance(now, Struct):
        fields = COUNTED.get(type(now).__name__, now.__struct_fields__)
        changed = {name: _since(getattr(base, name, UNSET), getattr(now, name)) for name in fields}
        return replace(now, **changed)
    if isinstance(now, dict):
        before = base if isinstance(base, dict) else {}
        return {key: _since(before.get(key, UNSET), value) for key, value in now.items()}
    if isinstance(now, int | float) and isinstance(base, int | float):
        return now - base
    return now
