"""How Dynamo is set up: where its processes find each other, and the settings that hold up.

Dynamo is configured by environment variables; they are set for its own processes and nothing of Tenfold reads
them. Its defaults are cautious where they should not be (a request dies with its worker, a worker that hangs
hangs its clients) and bold where they should not be (events with prompts in them on all addresses).
"""

from __future__ import annotations

import importlib.metadata
from typing import Literal

import msgspec

VERSION = "1.6.1"
"""Of ai-dynamo and its runtime: the backend interface may change with any release."""
INSTALL = (
    f'pip install "tenfold[dynamo]" and then pip install --no-deps ai-dynamo=={VERSION} (without --no-deps, '
    "pip wants a package that is not on PyPI)"
)

STREAM_TIMEOUT_S = 3
"""A stream without a sign of life for so long goes to another worker: `tenfold.cluster.dynamo.BEAT_S`."""
SEND_TIMEOUT_S = 1
"""A worker that has not taken a request by then gets none for some seconds. Its runtime takes them, however
busy its engine is."""
MIGRATIONS = 3
"""So many workers may die with a request."""
PREFILL_LOAD_SCALE = 4
"""What a prompt token costs the router beside a block that is kept: 1 hardly beats taking turns."""
LEASE_S = 100
SYSTEM_PORT = "DYN_SYSTEM_PORT"


class Runtime(msgspec.Struct, frozen=True, kw_only=True):
    """Where the processes of one cluster find each other."""

    namespace: str = "tenfold"
    discovery: Literal["file", "etcd"] = "file"
    folder: str = ""
    """``file``: a folder that all can write."""
    etcd: str = ""
    """``etcd``: URLs, with commas between."""
    address: str = "127.0.0.1"
    """Of this machine, as the others reach it: all sockets are bound to it, and to nothing else."""
    events: str = ""
    """``HOST:PORT:PORT`` of the event broker (`tenfold.cluster.broker`)."""


class DynamoMissing(ValueError):
    """Dynamo is not there, or is another version."""


def check_version() -> None:
    """Raises DynamoMissing, with the remedy, unless the right version of Dynamo is installed."""
    for package in ("ai-dynamo-runtime", "ai-dynamo"):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise DynamoMissing(f"{package} is not installed: {INSTALL}") from None
        if found != VERSION:
            raise DynamoMissing(f"{package} is {found}, and Tenfold works with {VERSION}: {INSTALL}")


def environment(runtime: Runtime) -> dict[str, str]:
    """What all of Dynamo's processes are told."""
    address = runtime.address
    variables = {
        "DYN_DISCOVERY_BACKEND": runtime.discovery,
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_NAMESPACE": runtime.namespace,
        "DYN_TCP_RPC_HOST": address,
        "DYN_TCP_RESPONSE_STREAM_HOST": address,
        "DYN_EVENT_PLANE_HOST": address,
        "DYN_SYSTEM_HOST": address,
        "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
        "DYN_TCP_CONNECT_TIMEOUT": str(SEND_TIMEOUT_S),
        "DYN_TCP_REQUEST_TIMEOUT": str(SEND_TIMEOUT_S),
        "HF_HUB_OFFLINE": "1",
    }
    if runtime.discovery == "file":
        variables["DYN_FILE_KV"] = runtime.folder
    else:
        variables["ETCD_ENDPOINTS"] = runtime.etcd
        variables["ETCD_LEASE_TTL"] = str(LEASE_S)
    if runtime.events:
        # With a broker nobody else binds a socket for events: those would be bound to all addresses.
        host, subscribe, publish = runtime.events.rsplit(":", 2)
        variables["DYN_ZMQ_BROKER_URL"] = f"xsub=tcp://{host}:{subscribe} , xpub=tcp://{host}:{publish}"
        variables["DYN_ZMQ_BROKER_ENABLED"] = "true"
    return variables


def front_environment(runtime: Runtime) -> dict[str, str]:
    """What its front is told beside that."""
    return {
        **environment(runtime),
        "DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS": str(STREAM_TIMEOUT_S),
    }


def worker_environment(runtime: Runtime, system_port: int) -> dict[str, str]:
    """What a worker is told beside that; at ``system_port`` it tells of its health and metrics, and hands the
    model's text side to fronts on other machines."""
    return {
        **environment(runtime),
        SYSTEM_PORT: str(system_port),
        "DYN_HEALTH_CHECK_ENABLED": "true",
        "DYN_SELF_HOST_METADATA": "1" if runtime.discovery == "etcd" else "0",
    }


def front_arguments(runtime: Runtime, host: str, port: int) -> list[str]:
    """Of ``python -m dynamo.frontend``."""
    return [
        *("--http-host", host, "--http-port", str(port)),
        *("--namespace", runtime.namespace, "--discovery-backend", runtime.discovery),
        *("--router-mode", "kv", "--router-prefill-load-scale", str(PREFILL_LOAD_SCALE)),
        *("--migration-limit", str(MIGRATIONS)),
    ]
