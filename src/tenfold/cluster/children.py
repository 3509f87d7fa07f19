"""The entries of a cluster's processes: what `tenfold.cluster.up` starts."""

from __future__ import annotations

import os
import runpy
import sys

import msgspec

from tenfold.cluster.options import WorkerOptions
from tenfold.interpreter import python_command
from tenfold.log_format import log_to_stderr
from tenfold.worker.main import die_with_parent


def command(entry: str, *arguments: str) -> list[str]:
    """Runs ``entry``, a function of this file, in a fresh interpreter that ends with this process."""
    code = f"from tenfold.cluster.children import {entry}\n{entry}({os.getpid()}, *sys.argv[1:])"
    return [*python_command(code), *arguments]


def worker(parent: int | str, options: str) -> None:
    """A worker, from its options as JSON."""
    die_with_parent(int(parent))
    log_to_stderr("%(asctime)s %(name)s: %(message)s")
    from tenfold.cluster.dynamo import run_worker

    run_worker(msgspec.json.decode(options, type=WorkerOptions))


def front(parent: int | str, *arguments: str) -> None:
    """Dynamo's own front."""
    die_with_parent(int(parent))
    sys.argv = ["dynamo.frontend", *arguments]
    runpy.run_module("dynamo.frontend", run_name="__main__")


def broker(parent: int | str, events: str) -> None:
    """The event broker."""
    die_with_parent(int(parent))
    from tenfold.cluster.broker import run_broker

    run_broker(events)
