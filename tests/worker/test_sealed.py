"""Greeting and sealing between machines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.worker.framing import MAX_FRAME_BYTES
from tenfold.worker.sealed import (
    ANSWER,
    HELLO,
    TAG,
    WRONG_SECRET,
    FrontGreeting,
    NotTrusted,
    Seals,
    WorkerGreeting,
)

SECRET = b"a secret of more than thirty-two characters"


def greeted(secret: bytes = SECRET) -> tuple[Seals, Seals]:
    """A front's and a worker's seals."""
    front = FrontGreeting(SECRET)
    worker = WorkerGreeting(secret, front.hello)
    proof, seals = front.check(worker.answer)
    return seals, worker.check(proof)


def test_messages_pass_in_both_directions_however_they_are_cut() -> None:
    """Promise: what was sealed arrives, and nothing else is needed than the bytes in order."""
    front, worker = greeted()
    for sealer, unsealer in ((front.sealer, worker.unsealer), (worker.sealer, front.unsealer)):
        stream = b"".join(sealer.seal(body) for body in (b"", b"one", b"two" * 1000))
        bodies = [body for at in range(len(stream)) for body in unsealer.feed(stream[at : at + 1])]
        assert bodies == [b"", b"one", b"two" * 1000]


def test_neither_side_goes_on_without_the_secret() -> None:
    """Promise: each proves it, and the secret itself is in nothing that is sent."""
    front = FrontGreeting(SECRET)
    worker = WorkerGreeting(b"another secret", front.hello)
    with pytest.raises(NotTrusted, match="does not have the secret"):
        front.check(worker.answer)
    with pytest.raises(NotTrusted, match="compare the two secret files"):
        worker.check(WRONG_SECRET)
    honest = WorkerGreeting(SECRET, front.hello)
    proof, _ = front.check(honest.answer)
    impostor = FrontGreeting(b"another secret")
    with pytest.raises(NotTrusted, match="the front does not have"):
        WorkerGreeting(SECRET, impostor.hello).check(proof)
    assert (len(front.hello), len(honest.answer), len(proof)) == (HELLO, ANSWER, TAG)
    assert SECRET not in front.hello + honest.answer + proof


def test_an_answer_heard_before_or_ones_own_proof_opens_nothing() -> None:
    """Promise: proofs hold for one connection and one side: a recorded one, and a mirrored one, are
    worthless."""
    first, second = FrontGreeting(SECRET), FrontGreeting(SECRET)
    answer = WorkerGreeting(SECRET, first.hello).answer
    first.check(answer)
    with pytest.raises(NotTrusted):
        second.check(answer)
    worker = WorkerGreeting(SECRET, first.hello)
    with pytest.raises(NotTrusted):
        worker.check(worker.answer[-TAG:])


def test_somebody_else_at_the_port_is_named() -> None:
    """Promise: a front that is none is told from one with another secret."""
    with pytest.raises(NotTrusted, match="no tenfold serve --accept-workers"):
        WorkerGreeting(SECRET, b"HTTP/1.1 400 Bad Request" + bytes(HELLO - 24))


bodies = st.lists(st.binary(max_size=40), min_size=1, max_size=5)


@given(bodies, st.data())
def test_a_changed_bit_is_never_believed(sent: list[bytes], data: st.DataObject) -> None:
    """Promise: whatever bit of a stream is changed, no changed message comes out, and those before it do."""
    front, worker = greeted()
    stream = bytearray(b"".join(worker.sealer.seal(body) for body in sent))
    bit = data.draw(st.integers(0, 8 * len(stream) - 1))
    stream[bit // 8] ^= 1 << bit % 8
    got: list[bytes] = []
    try:
        for at in range(len(stream)):
            got += front.unsealer.feed(bytes(stream[at : at + 1]))
    except NotTrusted:
        pass
    assert got == sent[: len(got)] and len(got) < len(sent)


@given(bodies, st.data())
def test_repeated_left_out_and_swapped_messages_are_noticed(sent: list[bytes], data: st.DataObject) -> None:
    """Promise: the messages that come out are the first ones sent, in their order, each once."""
    front, worker = greeted()
    frames = [worker.sealer.seal(body) for body in sent]
    places = data.draw(st.lists(st.integers(0, len(frames) - 1), max_size=8))
    honest = next((n for n, place in enumerate(places) if place != n), len(places))
    got: list[bytes] = []
    try:
        for place in places:
            got += front.unsealer.feed(frames[place])
    except NotTrusted:
        assert honest < len(places)
    else:
        assert honest == len(places)
    assert got == sent[:honest]


def test_one_connection_and_direction_is_not_another() -> None:
    """Promise: a frame of another connection, or sent back to who sealed it, is not believed."""
    (front, worker), (other, _) = greeted(), greeted()
    frame = worker.sealer.seal(b"news")
    for unsealer in (other.unsealer, worker.unsealer):
        with pytest.raises(NotTrusted):
            unsealer.feed(frame)
    assert front.unsealer.feed(frame) == [b"news"]


def test_an_impossible_length_is_refused_at_once() -> None:
    """Promise: nobody makes us wait for, or keep, more than a message can have."""
    front, _ = greeted()
    with pytest.raises(NotTrusted, match="limit"):
        front.unsealer.feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
