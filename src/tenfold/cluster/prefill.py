"""How a decode worker has prompts computed: it asks the cluster's prefill workers, and does without them.

Dynamo's front can split requests too, but serves nobody while no prefill worker is there: the card of a
decode worker says that it needs one, and no option changes that (`resolve_worker_type_and_needs` in
lib/backend-common/src/worker.rs and `evaluate_readiness` in lib/llm/src/discovery/readiness.rs of ai-dynamo
1.6.1). So decode workers are whole workers for the front, and prefill workers have a namespace of their own,
which it does not look at.

Which prefill worker is asked, Dynamo's KV-aware router decides, one in each decode worker. It leaves out for
some seconds what cannot be reached; what does not answer is left alone here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from dynamo.llm import KvRouter, KvRouterConfig
from dynamo.runtime import DistributedRuntime

from tenfold.cluster.asked import HANDOFF
from tenfold.cluster.runtime import PREFILL_LOAD_SCALE, SYSTEM_PORT
from tenfold.config import PAGE_ROWS

log = logging.getLogger(__name__)

PATIENCE_S = 2.5
"""So long a prefill worker computes before it says where its pages will be."""
SILENCE_S = 4.0
"""One that has said nothing for so long stands still."""
PAUSE_S = 5.0
"""And so long nobody is asked then."""
COMPONENT = "prefill"


def prefill_namespace(namespace: str) -> str:
    """Where the prefill workers of a cluster are."""
    return f"{namespace}-prefill"


class PrefillWorkers:
    """Those of a cluster, as a decode worker has them. To be made and used in its event loop."""

    def __init__(self, namespace: str, discovery: str) -> None:
        loop = asyncio.get_running_loop()
        # This process has a server for its health already, and needs no second one at the same port.
        port = os.environ.pop(SYSTEM_PORT, None)
        self._runtime: Any = DistributedRuntime(loop, discovery, "tcp", event_plane="zmq")
        if port is not None:
            os.environ[SYSTEM_PORT] = port
        endpoint = self._runtime.endpoint(f"{prefill_namespace(namespace)}.{COMPONENT}.generate")
        self._router: Any = KvRouter(
            endpoint, PAGE_ROWS, KvRouterConfig(prefill_load_scale=PREFILL_LOAD_SCALE)
        )
        self._paused_until = 0.0
        self._trouble: str | None = None

    async def pages_of(self, tokens: Sequence[int], namespace: str) -> dict[str, Any] | None:
        """Where the pages of a prompt are, or will be, as ``Request.handoff`` has it; None: the prompt is to
        be computed here. Never raises but for its own cancellation."""
        if len(tokens) <= PAGE_ROWS or time.monotonic() < self._paused_until:
            return None  # The last page is not handed over: it may get more rows.
        try:
            handoff = await asyncio.wait_for(self._ask(tokens, namespace), SILENCE_S)
        except asyncio.TimeoutError:
            self._paused_until = time.monotonic() + PAUSE_S
            self._note(f"one has said nothing for {SILENCE_S:g} s")
            return None
        except Exception as error:  # whatever became of that worker, this one can do without
            self._note(str(error))
            return None
        self._note(None)
        return handoff

    def close(self) -> None:
        """Asks no more."""
        self._runtime.shutdown()

    async def _ask(self, tokens: Sequence[int], namespace: str) -> dict[str, Any] | None:
        asked: dict[str, Any] = {
            "model": "",
            "token_ids": list(tokens),
            "stop_conditions": {"max_tokens": 1},
            "sampling_options": {},
            "output_options": {},
        }
        if namespace:
            asked["routing"] = {"cache_salt": namespace}
        handoff: dict[str, Any] | None = None
        async for chunk in await self._router.generate_from_request(asked):
            handoff = (chunk.get("disaggregated_params") or {}).get(HANDOFF, handoff)
        return handoff

    def _note(self, trouble: str | None) -> None:
        """Says in the log when something changes, and no more: it may be every request."""
        if trouble is not None and self._trouble is None:
            log.warning("prompts are computed here, for the prefill workers fail: %s", trouble)
        elif trouble is None and self._trouble is not None:
            log.info("prompts are computed by prefill workers again")
        self._trouble = trouble
