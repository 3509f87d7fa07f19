"""A whole cluster on one machine, to which workers of further machines can be added."""

from __future__ import annotations

import logging
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from tenfold.cluster.alike import full_namespace
from tenfold.cluster.children import command
from tenfold.cluster.folder import lock_folder
from tenfold.cluster.launcher import Launcher, LocalLauncher
from tenfold.cluster.model_folder import write_model_folder
from tenfold.cluster.options import WorkerOptions
from tenfold.cluster.ports import bracketed, free_or
from tenfold.cluster.probe import known_workers
from tenfold.cluster.processes import Kept, keep
from tenfold.cluster.runtime import Runtime, check_version, front_arguments, front_environment
from tenfold.protocol import EngineSettings
from tenfold.server.listening import bind

log = logging.getLogger(__name__)

EVENT_PORTS = (20_250, 20_251)
"""Of the broker: where events come in, and where they go out."""
ETCD_PORTS = (2379, 2380)
"""etcd's own."""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What `tenfold cluster up` is told."""

    settings: EngineSettings
    served_name: str
    model: str
    """As it was given: for the command that is shown for further machines."""
    roles: tuple[str, ...]
    """Of the workers, one each."""
    folder: Path
    """For the model's text side, for logs and for file discovery."""
    host: str = "127.0.0.1"
    port: int = 8000
    address: str = "127.0.0.1"
    namespace: str = "tenfold"
    etcd: bool = False
    launcher: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    """HOST:PORT, or ``local`` for a Ray of our own; None: see `tenfold.cluster.ray_launcher.find_ray`."""
    shared: bool = False
    """``folder`` may be there on further machines too."""
    builder: str | None = None


class Cluster:
    """Its processes: etcd, the event broker, the front, the workers. Owns them."""

    def __init__(self, config: ClusterConfig) -> None:
        """Raises ValueError for what cannot be: Dynamo is missing, the model cannot be served so, another
        cluster has the folder; OSError for a port that is taken."""
        check_version()
        self.config = config
        bind(config.host, config.port, free="").close()
        self._lock = lock_folder(config.folder)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
        self.url = f"http://{bracketed(host)}:{config.port}"
        folder = config.folder
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        store = folder / "discovery"
        store.mkdir(exist_ok=True)
        subscribe, publish = free_or(config.address, list(EVENT_PORTS))
        client, peer = free_or(config.address, list(ETCD_PORTS))
        self.runtime = Runtime(
            namespace=full_namespace(config.namespace, config.settings),
            discovery="etcd" if config.etcd else "file",
            folder=str(store),
            etcd=f"http://{bracketed(config.address)}:{client}" if config.etcd else "",
            address=config.address,
            events=f"{bracketed(config.address)}:{subscribe}:{publish}",
        )
        self.processes: list[Kept] = []
        if config.etcd:
            self._add("etcd", etcd_command(folder / "etcd", config.address, client, peer), {})
        self._add("events", command("broker", self.runtime.events), {})
        front = command("front", *front_arguments(self.runtime, config.host, config.port))
        self._add("front", front, front_environment(self.runtime), f"{self.url}/live")
        hole = write_model_folder(Path(config.settings.model), folder / "model")
        self.launcher = self._launcher()
        try:
            self._add_workers(hole, store)
        except BaseException:
            self.launcher.close()
            raise

    def _add_workers(self, hole: int | None, store: Path) -> None:
        config, folder = self.config, self.config.folder
        for number, role in enumerate(config.roles):
            options = WorkerOptions(
                settings=config.settings,
                served_name=config.served_name,
                folder=str(folder / "model"),
                hole=hole,
                namespace=self.runtime.namespace,
                role=role,
                discovery=self.runtime.discovery,
                registry="" if config.etcd else str(store),
                **({} if config.builder is None else {"builder": config.builder}),
            )
            self.processes.append(self.launcher.worker(f"worker-{number}", options))

    def run(self, ready: Callable[[float], None]) -> None:
        """Starts all and watches until SIGINT or SIGTERM; ``ready`` is called when the first requests are
        welcome, with the seconds that took. Then ends all. Raises NeverUp where a process cannot be there."""
        began = asked_at = time.monotonic()
        told = False

        def look() -> None:
            nonlocal asked_at, told
            now = time.monotonic()
            if not told and now > asked_at + 0.25:
                asked_at = now
                if told := known_workers(self.url) >= len(self.config.roles):
                    for process in self.processes:
                        process.up = True
                    ready(now - began)

        try:
            keep(self.processes, look)
        finally:
            self.launcher.close()
            self._lock.close()

    def further(self) -> str | None:
        """What to run on further machines; None: no worker of another machine could find this cluster."""
        if not self.config.etcd or self.config.address.startswith("127."):
            return None
        return shlex.join(
            [
                *("tenfold", "worker", self.config.model, "--cluster", "dynamo"),
                *("--name", self.config.served_name, "--namespace", self.runtime.namespace),
                *("--etcd", self.runtime.etcd, "--events", self.runtime.events),
                *("--address", "ITS-OWN-ADDRESS"),
            ]
        )

    def _launcher(self) -> Launcher:
        """Where workers are to run. Raises ValueError where that cannot be."""
        config = self.config
        if config.launcher == "local":
            return LocalLauncher(self.runtime, config.folder / "logs")
        from tenfold.cluster.ray_launcher import RayLauncher

        return RayLauncher(
            self.runtime,
            config.folder,
            config.shared,
            config.ray_address,
            workers=len(config.roles),
            threads=config.settings.threads,
        )

    def _add(
        self, name: str, command: list[str], variables: dict[str, str], probe: str | None = None
    ) -> None:
        output = self.config.folder / "logs" / f"{name}.log"
        self.processes.append(Kept(name, command, variables, output, probe))


def etcd_command(folder: Path, address: str, client: int, peer: int) -> list[str]:
    """An etcd of one node. Raises ValueError where there is no etcd."""
    program = shutil.which("etcd")
    if program is None:
        raise ValueError("etcd is not installed: apt-get install etcd-server, or leave out --etcd")
    host = bracketed(address)
    return [
        *(program, "--name", "tenfold", "--data-dir", str(folder)),
        *("--listen-client-urls", f"http://{host}:{client}"),
        *("--advertise-client-urls", f"http://{host}:{client}"),
        *("--listen-peer-urls", f"http://{host}:{peer}"),
        *("--initial-advertise-peer-urls", f"http://{host}:{peer}"),
        *("--initial-cluster", f"tenfold=http://{host}:{peer}"),
    ]
