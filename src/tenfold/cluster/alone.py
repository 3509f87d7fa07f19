"""`tenfold worker --cluster dynamo`: one worker of a cluster whose front is elsewhere."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from tenfold.cluster.alike import check_alike
from tenfold.cluster.launcher import kept_worker
from tenfold.cluster.model_folder import write_model_folder
from tenfold.cluster.options import WorkerOptions
from tenfold.cluster.processes import keep
from tenfold.cluster.runtime import Runtime, check_version
from tenfold.protocol import EngineSettings

log = logging.getLogger(__name__)


def keep_worker(settings: EngineSettings, served_name: str, role: str, runtime: Runtime) -> None:
    """Keeps one worker until SIGINT or SIGTERM. Raises ValueError for what cannot be, or would answer
    differently from the others; OSError for an address that is not this machine's."""
    check_version()
    if not check_alike(runtime.namespace, settings):
        log.warning(
            "The namespace %s does not say which model and formats its workers have: all must have the same",
            runtime.namespace,
        )
    with tempfile.TemporaryDirectory(prefix="tenfold-worker-") as place:
        folder = str(Path(place) / "model")
        options = WorkerOptions(
            settings=settings,
            served_name=served_name,
            folder=folder,
            hole=write_model_folder(Path(settings.model), Path(folder)),
            namespace=runtime.namespace,
            role=role,
            discovery=runtime.discovery,
            registry=runtime.folder,
        )
        keep([kept_worker("the worker", options, runtime)])
