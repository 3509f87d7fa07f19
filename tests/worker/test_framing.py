"""Messages on a byte stream."""

from __future__ import annotations

import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.protocol import Abort, Chunk, Chunks, Failed, Refused, Shutdown, WorkerMessage
from tenfold.worker.framing import Channel, FrameReader, frame

chunks = st.builds(
    Chunk,
    id=st.text(max_size=8),
    tokens=st.lists(st.integers(0, 1 << 20), max_size=5).map(tuple),
    finish=st.sampled_from([None, "stop", "length"]),
)
messages = st.one_of(
    st.builds(Chunks, chunks=st.lists(chunks, max_size=4).map(tuple)),
    st.builds(Refused, id=st.text(max_size=8), error=st.text(max_size=40), field=st.text(max_size=8)),
    st.builds(Failed, error=st.text(max_size=300)),
)


@given(st.lists(messages, max_size=6), st.lists(st.integers(1, 40), min_size=1))
def test_any_cut_of_the_bytes_gives_the_same_messages(sent: list[WorkerMessage], cuts: list[int]) -> None:
    """A message arrives whole and once, wherever the reads end."""
    data = b"".join(frame(message) for message in sent)
    reader = FrameReader(msgspec.msgpack.Decoder(WorkerMessage))
    got: list[WorkerMessage] = []
    start = turn = 0
    while start < len(data):
        size = cuts[turn % len(cuts)]
        got += reader.feed(data[start : start + size])
        start, turn = start + size, turn + 1
    assert got == sent


def test_an_impossible_length_is_an_error_at_once() -> None:
    """A broken peer cannot make the reader wait for gigabytes."""
    reader = FrameReader(msgspec.msgpack.Decoder(WorkerMessage))
    with pytest.raises(ValueError, match="limit"):
        reader.feed(b"\xff\xff\xff\xff")


def test_a_message_of_the_wrong_direction_is_refused() -> None:
    """A worker takes only what a front may say."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame(Failed(error="I am no front")))
        with pytest.raises(msgspec.ValidationError):
            Channel(theirs).wait()


def test_poll_does_not_wait_and_the_end_is_noticed() -> None:
    """An idle front does not hold up a busy worker, and a dead one is seen as such."""
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(theirs)
        assert channel.poll() == []
        ours.sendall(frame(Abort(id="a")) + frame(Shutdown()))
        assert channel.poll() == [Abort(id="a"), Shutdown()]
        ours.close()
        with pytest.raises(EOFError):
            channel.poll()
