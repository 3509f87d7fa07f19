"""What a worker of a cluster is told."""

from __future__ import annotations

import msgspec

from tenfold.protocol import EngineSettings
from tenfold.worker.process import ENGINE_BUILDER

ROLES = ("mixed", "prefill", "decode")


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker of a cluster is told."""

    settings: EngineSettings
    served_name: str
    folder: str
    """The model as Dynamo's front needs it (`tenfold.cluster.model_folder`), called ``model``."""
    namespace: str
    role: str = "mixed"
    hole: int | None = None
    """What that is: see there."""
    discovery: str = "file"
    registry: str = ""
    """The folder of ``file`` discovery."""
    builder: str = ENGINE_BUILDER
