"""Processes that take turns."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tenfold.bench.peers import Peer, PeerError, Turns, cpu_seconds, family

ECHO = """
import os
from tenfold.bench.peers import answer_orders
def refuse(why): raise ValueError(why)
answer_orders({"echo": lambda value: value, "refuse": refuse, "die": lambda: os._exit(3)})
"""


@pytest.fixture
def peer() -> Iterator[Peer]:
    """A process that answers orders."""
    with Peer("echo", [sys.executable, "-c", ECHO]) as peer:
        yield peer


def test_orders_are_answered_and_faults_are_told(peer: Peer) -> None:
    """Values go both ways; an error names the side and the reason and leaves it usable; a death is an error,
    not a hang."""
    assert peer.ask("echo", value=[1.5, "ä\n"]) == [1.5, "ä\n"]
    with pytest.raises(PeerError, match="echo: ValueError: no"):
        peer.ask("refuse", why="no")
    assert peer.ask("echo", value=None) is None
    with pytest.raises(PeerError, match="ended with code 3"):
        peer.ask("die")


def test_a_closed_peer_is_gone() -> None:
    """Nothing is left running."""
    with Peer("echo", [sys.executable, "-c", ECHO]) as peer:
        peer.ask("echo", value=1)
    assert family(peer.pid) == []


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs /proc")
def test_a_side_that_does_not_rest_is_found_out(peer: Peer) -> None:
    """Computing, in a child process too, while another side has its turn, is not a fair run; resting is."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    restless = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        while cpu_seconds(family(restless.pid)) < 0.1 or len(family(restless.pid)) < 2:
            time.sleep(0.02)
        fair = Turns({"us": os.getpid(), "echo": peer.pid})
        fair.turn("us", lambda: time.sleep(0.3))
        fair.check()
        unfair = Turns({"echo": peer.pid, "restless": restless.pid})
        unfair.turn("echo", lambda: time.sleep(0.3))
        with pytest.raises(PeerError, match="restless used"):
            unfair.check()
    finally:
        os.killpg(restless.pid, 9)
        restless.wait()
