"""Workers placed by Ray: an actor each, which keeps the worker's process on the node where Ray put it.

Ray carries no request: workers and front find each other as without it.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import secrets
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tenfold.backends.cores import choose_threads
from tenfold.cluster.options import WorkerOptions
from tenfold.cluster.processes import Kept
from tenfold.cluster.runtime import Runtime
from tenfold.cluster.supervisor import MARK, Job
from tenfold.worker.build import own_threads

log = logging.getLogger(__name__)

CONNECT_S = 5.0
LOCAL = "local"
"""Ray's word for one of our own."""
_ATTEMPTS = 2
"""Ray ends where its agents take longer than 15 s to start, as on a busy machine."""
_OBJECTS_BYTES = 80 << 20
"""About the least that Ray takes; nothing here puts objects into its store."""


class RayLauncher:
    """Places workers on a Ray cluster. Owns the Ray that it started, if it did."""

    def __init__(
        self, runtime: Runtime, folder: Path, shared: bool, address: str | None, workers: int, threads: int
    ) -> None:
        """``folder`` is the cluster's, and ``shared`` if it may be there on all nodes; ``threads``: of a
        worker, 0 for its share of a node's cores. Raises ValueError, with the remedy, for a Ray that is not
        there or does not fit."""
        if importlib.util.find_spec("ray") is None:
            raise ValueError('Ray is not installed: pip install "tenfold[ray]", or leave out --launcher ray')
        # Ray would tell its makers of each cluster; it reads this when it is imported.
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._runtime = runtime
        self._folder = folder
        self._own: tempfile.TemporaryDirectory[str] | None = None
        found = find_ray(address)
        if found is None:
            self._own = tempfile.TemporaryDirectory(prefix="tenfold-ray-", ignore_cleanup_errors=True)
        try:
            if self._own is not None:
                self._start(self._own.name, max(choose_threads(0)[0], workers * max(threads, 1)))
            elif found is not None:
                join_ray(found)
            nodes = self._nodes()
            check_nodes(runtime, nodes, shared, threads)
        except BaseException:
            self.close()
            raise
        self._workers_a_node = math.ceil(workers / len(nodes))
        self._mark = secrets.token_hex(16)
        (folder / MARK).write_text(self._mark)
        place = "this machine" if found is None else f"the nodes of the Ray cluster at {found}"
        log.info("Ray places workers on %s: %s", place, ", ".join(sorted(nodes)))

    def worker(self, name: str, options: WorkerOptions) -> Kept:
        """One that an actor keeps, with a CPU of Ray's for each of its threads."""
        from tenfold.cluster.ray_actor import KeptActor

        settings = replace(options.settings, workers=self._workers_a_node)
        threads = own_threads(settings)[0]
        job = Job(
            name=name,
            options=replace(options, settings=replace(settings, threads=threads)),
            runtime=self._runtime,
            folder=str(self._folder),
            mark=self._mark,
        )
        return KeptActor(job, threads)

    def close(self) -> None:
        """Leaves the Ray cluster; ends it where it is our own."""
        import ray

        ray.shutdown()
        if self._own is not None:
            self._own.cleanup()
            self._own = None

    def _start(self, folder: str, cpus: int) -> None:
        # In a folder and with a token of its own, and on loopback alone. Ray would leave them in the common
        # temporary folder and in the home, and listen at this machine's address in its network.
        token = Path(folder) / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        os.environ.pop("RAY_AUTH_TOKEN", None)
        os.environ.update(
            {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(token),
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # there it has only loopback
                "RAY_worker_niceness": "0",  # engines would inherit its 15
            }
        )
        log.info("Starting a Ray on this machine")
        import ray

        for attempt in range(_ATTEMPTS):
            try:
                ray.init(
                    LOCAL,
                    num_cpus=cpus,
                    object_store_memory=_OBJECTS_BYTES,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=f"{folder}/r{attempt}",
                )
                return
            except Exception as error:
                why = first_line(error)
                log.error("Ray did not start: %s", why)
                ray.shutdown()
        raise ValueError(f"Ray does not start on this machine: {why}")

    def _nodes(self) -> dict[str, float]:
        """CPUs of the nodes that have some, by address."""
        import ray

        nodes: list[dict[str, Any]] = ray.nodes()
        return {
            node["NodeManagerAddress"]: node["Resources"]["CPU"]
            for node in nodes
            if node["Alive"] and node["Resources"].get("CPU")
        }


def find_ray(address: str | None) -> str | None:
    """HOST:PORT of the Ray cluster to use: ``address``; else what RAY_ADDRESS says; else the one that `ray
    start` has begun on this machine. None: there is none, or ``local`` asks for none. Raises ValueError for
    one that does not answer: Ray itself would try for minutes and then end the process."""
    file = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"
    found, remedy = (
        address,
        "give --ray-address HOST:PORT of its head, or --ray-address local",
    )
    if found is None and (found := os.environ.get("RAY_ADDRESS") or None) is not None:
        remedy = f"RAY_ADDRESS says so; unset it, or {remedy}"
    if found is None:
        try:
            found = file.read_text().strip()
        except FileNotFoundError:
            return None
        remedy = f"{file} says so, which a Ray that was killed leaves behind; delete it, or {remedy}"
    if found == LOCAL:
        return None
    host, _, port = found.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise ValueError(f"{found!r} is no HOST:PORT of a Ray cluster; {remedy}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"no Ray cluster answers at {found} ({error}); {remedy}") from None
    return found


def join_ray(address: str) -> None:
    """Raises ValueError where that cannot be."""
    import ray

    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise ValueError(
            f"cannot join the Ray cluster at {address} ({first_line(error)}): this machine must be a node "
            f"of it (ray start --address={address}), and if it has a token, RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN_PATH, the file with it, must be set"
        ) from None


def check_nodes(runtime: Runtime, nodes: dict[str, float], shared: bool, threads: int) -> None:
    """Whether workers on these nodes (CPUs by address) can find the front. Raises ValueError."""
    if max(nodes.values(), default=0) < max(threads, 1):
        raise ValueError(
            f"no node of the Ray cluster has the {max(threads, 1)} CPUs of a worker: give a smaller --threads"
        )
    if len(nodes) == 1:
        return
    names = ", ".join(sorted(nodes))
    if runtime.discovery == "file" and not shared:
        raise ValueError(
            f"the Ray cluster has {len(nodes)} nodes ({names}), whose workers find the front by etcd or by a "
            "folder that all of them share: give --etcd, or that folder as --dir"
        )
    if is_loopback(runtime.address) and not all(map(is_loopback, nodes)):
        raise ValueError(
            f"the Ray cluster has {len(nodes)} nodes ({names}), which cannot reach {runtime.address}: give "
            "this machine's address in their network as --address"
        )


def is_loopback(address: str) -> bool:
    """Whether only this machine itself gets there."""
    return address.startswith("127.") or address == "::1"


def first_line(error: BaseException) -> str:
    """Of its text, or its kind where it has none."""
    lines: Sequence[str] = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
