"""The names of the routing policies. Apart, since the command line reads them and must be quick."""

from __future__ import annotations

from typing import Literal

Policy = Literal["cache-aware", "least-loaded", "prefix-only", "round-robin", "random"]
POLICIES: tuple[Policy, ...] = ("cache-aware", "least-loaded", "prefix-only", "round-robin", "random")
