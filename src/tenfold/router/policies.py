"""The names of the policies, for those who ask for one and need nothing else of the router."""

from __future__ import annotations

from typing import Literal

Policy = Literal["cache-aware", "least-loaded", "prefix-only", "round-robin", "random"]
POLICIES: tuple[Policy, ...] = ("cache-aware", "least-loaded", "prefix-only", "round-robin", "random")
