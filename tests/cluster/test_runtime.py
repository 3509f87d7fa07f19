"""How Dynamo is set up: the right version, private addresses, settings that hold up."""

from __future__ import annotations

import importlib.metadata
import socket

import pytest

from tenfold.cluster.ports import free_or, free_ports
from tenfold.cluster.runtime import (
    VERSION,
    DynamoMissing,
    Runtime,
    check_version,
    front_arguments,
    front_environment,
    worker_environment,
)


@pytest.mark.parametrize("found", [None, "1.5.0", "1.7.0"])
def test_another_version_is_refused(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a Dynamo that is not the one that Tenfold was tested with is refused, with what to install."""

    def version(package: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(DynamoMissing, match=rf"--no-deps ai-dynamo=={VERSION}"):
        check_version()


def test_no_socket_is_open_to_all() -> None:
    """Promise: every address that Dynamo is told is this machine's own, and events go by the broker."""
    runtime = Runtime(folder="/tmp/x", address="10.1.2.3", events="10.1.2.3:20001:20002")
    for variables in (front_environment(runtime), worker_environment(runtime, 20003)):
        hosts = {value for name, value in variables.items() if name.endswith("_HOST")}
        assert hosts == {"10.1.2.3"} and "0.0.0.0" not in str(variables)
        assert variables["DYN_ZMQ_BROKER_URL"] == "xsub=tcp://10.1.2.3:20001 , xpub=tcp://10.1.2.3:20002"


def test_settings_that_hold_up() -> None:
    """Promise: requests move when a worker dies or stands still, and a prompt that is computed costs more
    than one that is there."""
    runtime = Runtime(discovery="etcd", etcd="http://10.0.0.1:2379")
    arguments = " ".join(front_arguments(runtime, "127.0.0.1", 8000))
    assert "--migration-limit 3" in arguments and "--router-prefill-load-scale 4" in arguments
    variables = front_environment(runtime)
    silent_s = int(variables["DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS"])
    assert silent_s + int(variables["DYN_TCP_REQUEST_TIMEOUT"]) < 5
    assert worker_environment(runtime, 1)["ETCD_ENDPOINTS"] == "http://10.0.0.1:2379"


def test_ports_are_free_and_small() -> None:
    """Promise: different ports, none of those that Dynamo cannot keep, and an address that is not ours is an
    error."""
    found = free_ports("127.0.0.1", 20)
    assert len(set(found)) == 20 and max(found) < 32_768
    assert free_or("127.0.0.1", found[:2]) == found[:2]
    with socket.create_server(("127.0.0.1", found[0])):
        others = free_or("127.0.0.1", found[:2])
        assert len(others) == 2 and found[0] not in others
    with pytest.raises(OSError):
        free_ports("192.0.2.1", 1)
    with pytest.raises(OSError):
        free_or("192.0.2.1", [20_000])
