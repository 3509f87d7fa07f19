"""What a training is told, and what it answers."""

from __future__ import annotations

import msgspec

from tenfold.live.decide import Comparison
from tenfold.speculate.trained_head import HeadSettings


class LiveJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a training process is told."""

    model: str
    live: str
    """Folder with the answers."""
    present: str
    """Folder of the head that is live."""
    output: str
    """Folder that the new head is written to, if it is better."""
    work: str
    """An empty folder; ``verdict.json`` is written to it."""
    settings: HeadSettings


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a training."""

    promoted: bool
    why: str
    """For people, with the numbers."""
    trained_tokens: int = 0
    comparison: Comparison | None = None
