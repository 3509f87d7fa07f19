"""NIXL, where it differs from other transports: peers that do not answer, strangers, no NIXL at all."""

from __future__ import annotations

import base64
import signal
import time

import msgspec
import pytest
from msgspec.structs import replace

from tenfold.kv import nixl
from tenfold.kv.arena import Arena
from tenfold.kv.choice import transfer_between_machines
from tenfold.kv.nixl import NixlAgent, NixlMissing
from tenfold.kv.region import Region, TransferError
from tenfold.kv.transfer import Handoff
from tests.kv.test_transfer import CONTENTS, PAGE, SECRET, exporter, needs_nixl

TCP = {"UCX_TLS": "tcp,self"}
"""As between machines: where memory is shared, an exporter need not run to be read."""


@needs_nixl
def test_an_exporter_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a read that does not end is given up in time, and what it writes later is nobody's; when the
    exporter runs again, its pages come again, and the buffer is used again."""
    for name, value in TCP.items():
        monkeypatch.setenv(name, value)
    views = [memoryview(bytearray(PAGE)) for _ in range(2)]
    with exporter("nixl") as (process, handoff):
        agent = NixlAgent(Arena(0), PAGE, SECRET)
        # What a busy machine takes for the connection is not what is tested here.
        monkeypatch.setattr(nixl, "READ_S", 60.0)
        source = agent.open(handoff)
        assert source.read(0, views) == 2
        monkeypatch.setattr(nixl, "READ_S", 0.5)
        process.send_signal(signal.SIGSTOP)
        for _ in range(2):  # and the second time at once
            with pytest.raises(TransferError):
                source.read(0, views)
        with pytest.raises(TransferError):
            source.take()
        source.close()
        with pytest.raises(TransferError, match="does not answer"):
            agent.open(handoff)
        assert len(agent._lost) == 2
        process.send_signal(signal.SIGCONT)
        monkeypatch.setattr(nixl, "READ_S", 60.0)
        again = agent.open(handoff)
        views = [memoryview(bytearray(PAGE)) for _ in range(2)]
        assert again.read(0, views) == 2 and bytes(views[1]) == bytes([1]) * PAGE
        again.close()
        deadline = time.monotonic() + 60
        while agent._lost:
            assert time.monotonic() < deadline
            agent.open(handoff).close()
        last = agent.open(handoff)  # over a connection that is made anew
        assert last.read(0, views) == 2
        last.close()
        (remote,) = agent._remotes.values()
        assert not remote.failed
        assert remote.users == 0
        agent.close()


@needs_nixl
def test_what_strangers_say_never_reaches_nixl() -> None:
    """Promise: a handoff that is not signed with the secret is refused before NIXL reads it; one that is, and
    makes no sense, is an error like others."""
    one, two = NixlAgent(arena := Arena(1 << 20), PAGE, SECRET), NixlAgent(Arena(0), PAGE, SECRET)
    fields, _ = one.offer(Region(CONTENTS, arena))
    good = msgspec.convert({**fields, "pages": 4, "expires": time.time() + 60}, Handoff)
    assert good.nixl is not None
    for forged in (
        replace(good.nixl, address=good.nixl.address + 4096),
        replace(good.nixl, metadata="bm9uZQ=="),
        replace(good.nixl, proof=""),
        replace(good.nixl, proof="é"),
    ):
        with pytest.raises(TransferError, match="does not know the secret"):
            two.open(replace(good, nixl=forged))
    assert not two._remotes
    for metadata in ("not base64", "", base64.b64encode(b"none").decode()):
        signed = two._sign(metadata, good.nixl.address)
        with pytest.raises(TransferError):
            two.open(replace(good, nixl=replace(good.nixl, metadata=metadata, proof=signed)))
    outside = good.nixl.address + (1 << 30)
    signed = two._sign(good.nixl.metadata, outside)
    with pytest.raises(TransferError):
        two.open(replace(good, nixl=replace(good.nixl, address=outside, proof=signed)))
    source = two.open(good)
    assert source.contents == CONTENTS
    source.close()
    with pytest.raises(ValueError, match="16 or more"):
        NixlAgent(Arena(0), PAGE, b"short")
    two.close()
    one.close()


@needs_nixl
def test_an_agent_that_does_nothing_takes_no_core() -> None:
    """Promise: NIXL's thread sleeps while there is nothing to do: cores are the engine's."""
    agent = NixlAgent(Arena(1 << 20), PAGE, SECRET)
    began, cpu = time.monotonic(), time.process_time()
    time.sleep(1.0)
    assert time.process_time() - cpu < 0.05 * (time.monotonic() - began)
    agent.close()


def test_nixl_that_is_missing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Promise: asked for by name, the error says what to install; otherwise pages come without it, and the
    log says so."""

    def missing() -> None:
        raise NixlMissing("NIXL is not installed: " + nixl.INSTALL)

    monkeypatch.setattr(nixl, "bindings", missing)
    with pytest.raises(ValueError, match=r"--kv-transport nixl: .*pip install --no-deps nixl"):
        transfer_between_machines("nixl", "same", PAGE, 1 << 16, SECRET, "127.0.0.1")
    with caplog.at_level("INFO"):
        made = transfer_between_machines("auto", "same", PAGE, 1 << 16, SECRET, "127.0.0.1")
    assert "KV pages do not come by NIXL" in caplog.text
    assert "memory or tcp" in caplog.text
    handoff = made.exports.begin("a", "", CONTENTS.tokens, 4)
    assert handoff is not None and "port" in handoff and "nixl" not in handoff
    made.exports.close()
