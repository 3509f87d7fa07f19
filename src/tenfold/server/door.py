"""From the options to the gate: the address and the secret for workers of other machines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from tenfold.checkpoint.fingerprint import fingerprint
from tenfold.config import ServeConfig
from tenfold.protocol import Join
from tenfold.server.gate import Gate, Muster
from tenfold.server.listening import bind
from tenfold.server.metrics import Metrics
from tenfold.worker.secret import load_secret, parse_address
from tenfold.worker.version import code_digest, version

log = logging.getLogger(__name__)

Identify = Callable[[Path], str]
"""Tells a model's files from others'."""


class Door:
    """Owns the socket until it is opened, and the gate then."""

    def __init__(self, address: str, secret_file: str, identify: Identify = fingerprint) -> None:
        """Takes the port. Raises OSError, and OptionError for an address or a secret that cannot be."""
        self._secret = load_secret(secret_file)
        self._socket = bind(*parse_address(address, "accept_workers"), option="--accept-workers")
        self._identify = identify
        self._gate: Gate | None = None

    async def open(self, config: ServeConfig, path: str, muster: Muster, metrics: Metrics) -> None:
        """Lets workers in that have the model at ``path`` as ``config`` has it, once it is known which that
        is. Raises OSError."""
        gate = self._gate = metrics.gate = Gate(self._socket, self._secret, muster)
        loop = asyncio.get_running_loop()
        model = await loop.run_in_executor(None, self._identify, Path(path))
        ours = Join(
            name="",
            instance="",
            version=version(),
            code=code_digest(),
            model=model,
            format=config.format,
            kv_format=config.kv_format,
        )
        await gate.open(ours)
        log.info("workers of other machines may join at %s", gate.address)

    def close(self) -> None:
        """Nobody else comes in."""
        if self._gate is None:
            self._socket.close()
        else:
            self._gate.close()


def door_of(config: ServeConfig, identify: Identify) -> Door | None:
    """The door that a configuration asks for; None: none. Raises as `Door` does."""
    if config.accept_workers is None or config.secret_file is None:
        return None
    return Door(config.accept_workers, config.secret_file, identify)
