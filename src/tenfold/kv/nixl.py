"""Pages over NVIDIA's NIXL with its UCX backend: RDMA, shared memory or TCP, whatever UCX finds, no GPU.

The exporter registers its arena once and does nothing more. Importers read the regions in it from afar
(`tenfold.kv.region`), with the head, which says how many pages are ready, and write there that they have
taken them. So no engine ever waits for NIXL; an importer's reading threads do, with deadlines.

NIXL has no authentication: who reaches a worker's UCX ports and knows the protocol can read and write its
memory. A handoff is signed with the secret, so that an agent is told of other agents by those alone. Beyond
that, this is for a network of one's own.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import importlib
import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof, c_char
from importlib.util import find_spec
from typing import Any, NamedTuple

from tenfold.kv.arena import Arena
from tenfold.kv.region import Region, TransferError
from tenfold.kv.tcp import check_secret, proof
from tenfold.kv.transfer import READ_PAGES, Handoff, NixlOffer, RegionSource

log = logging.getLogger(__name__)

INSTALL = "pip install --no-deps nixl==1.5.2 nixl-cu12==1.5.1"
"""Without its dependencies, one of which is not on PyPI, and of which nothing here is needed."""
READ_S = 3.0
"""A read, of a few pages and with the connection that it may need, takes no longer, or it never ends."""
LONGEST_POLL_S = 0.01
"""An importer that waits for long looks at the exporter's head this often: over TCP that takes each of them
0.1 to 0.3 ms of CPU time."""
PROGRESS_US = 100_000
"""NIXL's thread sleeps until something happens, and so long at most. At 0, which is what NIXL's own Python
class sets, it spins and takes a core for itself."""
MOST_REMOTES = 64
"""Exporters to which connections are kept."""
MOST_LOST = 64
"""Buffers of reads that did not end."""
_LEAST_BUFFER = 1 << 16


class NixlMissing(ValueError):
    """NIXL is not installed, or not one that can be used; the message says what to do."""


def check_installed() -> None:
    """Raises NixlMissing. Quick: NIXL itself takes seconds to import."""
    if find_spec("nixl") is None:
        raise NixlMissing(f"NIXL is not installed: {INSTALL}")


def bindings() -> Any:
    """NIXL's. Raises NixlMissing."""
    for name in ("NIXL_LOG_LEVEL", "UCX_LOG_LEVEL"):
        os.environ.setdefault(name, "FATAL")  # what fails is raised, and said in words of ours
    try:
        importlib.import_module("nixl")
        found = importlib.import_module("nixl._bindings")
    except ImportError as error:
        raise NixlMissing(f"NIXL is not installed ({error}): {INSTALL}") from None
    if not hasattr(found.nixlAgentConfig, "pthrDelay"):
        raise NixlMissing(f"this NIXL is not one that Tenfold knows: {INSTALL}")
    return found


class _Memory:
    """Memory that is registered with an agent, until the agent ends."""

    def __init__(self, agent: Any, nixl: Any, backend: int, size: int, file: int = -1) -> None:
        self.size = size
        self._map = mmap.mmap(file, size)
        self.view = memoryview(self._map)
        self.address = addressof(c_char.from_buffer(self._map))
        agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, [(self.address, size, 0, "")]), [backend])


class _Remote:
    """An exporter's agent, as ours knows it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.users = 0
        self.failed = False


class _Lost(NamedTuple):
    """A read that did not end in time, and may still write."""

    handle: int
    buffer: _Memory
    remote: _Remote


class NixlAgent:
    """One engine's part in NIXL: offers what is in its arena, and opens what others offer. Owns the agent,
    whose ports are open until `close`."""

    def __init__(self, arena: Arena, page_bytes: int, secret: bytes) -> None:
        """Raises NixlMissing, ValueError for a secret that is too short, OSError if UCX cannot work here."""
        self.nixl = nixl = bindings()
        self._secret = check_secret(secret)
        self._contact = threading.Lock()
        """Of who looks for an exporter or a buffer: that may take NIXL a while."""
        self._lock = threading.Lock()
        """Of the counts of users: the engine's thread takes this one too."""
        self._remotes: dict[str, _Remote] = {}
        """By metadata."""
        self._buffers: list[_Memory] = []
        self._lost: list[_Lost] = []
        self._buffer_bytes = max(_LEAST_BUFFER, READ_PAGES * page_bytes)
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = PROGRESS_US
        try:
            self.agent = nixl.nixlAgent(secrets.token_hex(16), config)
            self.backend = self.agent.createBackend("UCX", {})
            self._arena: _Memory | None = None
            if arena.size:
                self._arena = _Memory(self.agent, nixl, self.backend, arena.size, arena.file)
            self._metadata = base64.b64encode(self.agent.getLocalMD()).decode()
        except Exception as error:  # the bindings have no class for all of theirs
            raise OSError(f"NIXL cannot be used here (UCX_TLS, UCX_NET_DEVICES?): {error}") from error

    def offer(self, region: Region) -> tuple[dict[str, Any], Callable[[], None]]:
        """A `tenfold.kv.transfer.Offer`."""
        assert self._arena is not None
        address = self._arena.address + region.at
        fields = {
            "metadata": self._metadata,
            "address": address,
            "proof": self._sign(self._metadata, address),
        }
        return {"nixl": fields}, lambda: None

    def open(self, handoff: Handoff) -> NixlSource:
        """A `tenfold.kv.transfer.Opener`."""
        offer = handoff.nixl
        if offer is None:
            raise TransferError("the exporter does not offer NIXL")
        if not hmac.compare_digest(offer.proof.encode(), self._sign(offer.metadata, offer.address).encode()):
            raise TransferError("the exporter does not know the secret")
        with self._contact, self.translated():
            remote = self._remote(offer)
            try:
                reach = NixlReach(self, remote, offer.address, self._buffer())
            except BaseException:
                self.leave(remote)
                raise
        try:
            return NixlSource(reach, handoff.expires)
        except BaseException:
            reach.close()
            raise

    def close(self) -> None:
        """Ends the agent; no source is open any more."""
        del self.agent
        self._buffers.clear()
        self._lost.clear()

    def leave(self, remote: _Remote) -> None:
        """A source of this exporter is closed."""
        with self._lock:
            remote.users -= 1

    def keep(self, buffer: _Memory) -> None:
        """A buffer is not used any more."""
        self._buffers.append(buffer)

    def lose(self, handle: int, buffer: _Memory, remote: _Remote) -> None:
        """A read did not end; it is a user of the exporter until it does."""
        with self._lock:
            remote.users += 1
        self._lost.append(_Lost(handle, buffer, remote))

    @contextmanager
    def translated(self) -> Iterator[None]:
        """NIXL's errors as a TransferError."""
        try:
            yield
        except (TransferError, OSError):
            raise
        except self.nixl.nixlRemoteDisconnectError:
            raise TransferError("the exporter is gone", "gone") from None
        except Exception as error:  # the bindings have no class for all of theirs
            raise TransferError(f"NIXL: {error or type(error).__name__}") from None

    def _sign(self, metadata: str, address: int) -> str:
        return proof(self._secret, b"nixl", address.to_bytes(8, "little"), metadata.encode()).hex()

    def _remote(self, offer: NixlOffer) -> _Remote:
        """The exporter; it has one user more. Forgets others."""
        spare = max(len(self._remotes) - MOST_REMOTES, 0)
        for metadata, known in list(self._remotes.items()):
            if not known.users and (known.failed or spare > 0):
                spare -= not known.failed
                del self._remotes[metadata]
                self.agent.invalidateRemoteMD(known.name)
        remote = self._remotes.pop(offer.metadata, None)
        if remote is None:
            try:
                raw = base64.b64decode(offer.metadata, validate=True)
            except binascii.Error:
                raise TransferError("the exporter's metadata is none") from None
            remote = _Remote(self.agent.loadRemoteMD(raw).decode())
        self._remotes[offer.metadata] = remote  # as the latest
        with self._lock:
            remote.users += 1
        return remote

    def _buffer(self) -> _Memory:
        """One that nobody uses."""
        for lost in list(self._lost):
            try:
                if self.agent.getXferStatus(lost.handle) == self.nixl.NIXL_IN_PROG:
                    continue
            except Exception:  # it has failed, and so ended
                pass
            self.agent.releaseXferReq(lost.handle)
            self._lost.remove(lost)
            self.leave(lost.remote)
            self.keep(lost.buffer)
        if self._buffers:
            return self._buffers.pop()
        if len(self._lost) >= MOST_LOST:
            raise TransferError(f"{MOST_LOST} reads over NIXL have not ended yet")
        return _Memory(self.agent, self.nixl, self.backend, self._buffer_bytes)


class NixlReach:
    """A region that another agent offers; see `tenfold.kv.region.Reach`. What is read comes into a buffer of
    our agent's first: a read that is given up must not write to pages that are someone else's by then. For
    one thread."""

    def __init__(self, agent: NixlAgent, remote: _Remote, address: int, buffer: _Memory) -> None:
        self._agent = agent
        self._remote = remote
        self._address = address
        self._buffer: _Memory | None = buffer
        self.cancelled = False

    def get(self, at: int, count: int) -> bytes:
        """See `tenfold.kv.region.Reach`."""
        data = bytearray(count)
        self.fill(at, [memoryview(data)])
        return bytes(data)

    def fill(self, at: int, views: Sequence[memoryview]) -> int:
        """See `tenfold.kv.region.Reach`."""
        buffer = self._buffer
        if buffer is None:
            raise TransferError("an earlier read did not end")
        wanted = [view for view in views if view]
        while wanted:
            size = min(sum(len(view) for view in wanted), buffer.size)
            self._move(self._agent.nixl.NIXL_READ, at, size)
            at += size
            done = 0
            while done < size:
                view = wanted.pop(0)
                count = min(len(view), size - done)
                view[:count] = buffer.view[done : done + count]
                done += count
                if count < len(view):
                    wanted.insert(0, view[count:])
        return len(views)

    def put(self, at: int, data: bytes) -> None:
        """See `tenfold.kv.region.Reach`."""
        if self._buffer is None:
            raise TransferError("an earlier read did not end")
        self._buffer.view[: len(data)] = data
        self._move(self._agent.nixl.NIXL_WRITE, at, len(data))

    def close(self) -> None:
        """Gives back what it has of the agent."""
        if self._buffer is not None:
            self._agent.keep(self._buffer)
            self._buffer = None
        self._agent.leave(self._remote)

    def _move(self, operation: Any, at: int, size: int) -> None:
        """Between the region and the beginning of the buffer. Raises TransferError when it fails, or does not
        end in time."""
        assert self._buffer is not None
        nixl, agent, backend = self._agent.nixl, self._agent.agent, self._agent.backend
        ours = nixl.nixlXferDList(nixl.DRAM_SEG, [(self._buffer.address, size, 0)])
        theirs = nixl.nixlXferDList(nixl.DRAM_SEG, [(self._address + at, size, 0)])
        try:
            with self._agent.translated():
                handle = agent.createXferReq(operation, ours, theirs, self._remote.name, b"", [backend])
                if not self._ended(handle):
                    # Not released: UCX cannot call back what is on its way.
                    self._agent.lose(handle, self._buffer, self._remote)
                    self._buffer = None
                    raise TransferError("the exporter does not answer, or is not asked any more")
        except TransferError:
            self._remote.failed = True
            raise

    def _ended(self, handle: int) -> bool:
        """Whether a transfer comes to its end in time; releases it then. Raises what NIXL raises."""
        nixl, agent = self._agent.nixl, self._agent.agent
        deadline, pause_s = time.monotonic() + READ_S, 20e-6
        try:
            state = agent.postXferReq(handle, b"")
            while state == nixl.NIXL_IN_PROG:
                if self.cancelled or time.monotonic() > deadline:
                    return False
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, 1e-3)
                state = agent.getXferStatus(handle)
        except Exception:
            agent.releaseXferReq(handle)
            raise
        agent.releaseXferReq(handle)
        return True


class NixlSource(RegionSource):
    """See `tenfold.kv.transfer.Source`."""

    def __init__(self, reach: NixlReach, expires: float) -> None:
        """Raises TransferError."""
        self._reach = reach
        super().__init__(reach, expires, LONGEST_POLL_S)

    def cancel(self) -> None:
        """See `tenfold.kv.transfer.Source`."""
        super().cancel()
        self._reach.cancelled = True

    def close(self) -> None:
        """See `tenfold.kv.transfer.Source`."""
        self._reach.close()
