"""How a front and a worker on two machines know each other, and that nobody changes what they say.

Both have one secret, which is never sent. Each proves that it has it, by HMAC-SHA-256 over what both drew at
random for this connection; keys for the two directions are made of the same::

    front                                                worker
    "tenfold1", nonce (32)                          ->
                                                    <-   nonce (32), proof (32)
    proof (32), or zeros: yours is wrong            ->

    proof = HMAC(secret, who, both nonces)     key = HMAC(secret, "from " who, both nonces)

Then every message is four bytes of length (little-endian), the message, and HMAC(key, number of the message,
message): 32 bytes. Numbers count from 0 in each direction, so a message that was changed, left out, repeated
or taken from another connection does not fit, and ends the connection. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from tenfold.worker.framing import Frames

MAGIC = b"tenfold1"
NONCE = 32
TAG = 32
HELLO = len(MAGIC) + NONCE
"""Bytes of a front's first message."""
ANSWER = NONCE + TAG
"""Bytes of a worker's."""
WRONG_SECRET = bytes(TAG)
"""In the place of the front's proof."""

T = TypeVar("T")


class NotTrusted(ValueError):
    """The other side does not have the secret, or somebody changed what it said."""


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


class Sealer:
    """Makes frames of messages."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, body: bytes) -> bytes:
        """The next frame."""
        tag = _mac(self._key, self._number.to_bytes(8, "little"), body)
        self._number += 1
        return len(body).to_bytes(4, "little") + body + tag


class Unsealer:
    """Cuts a byte stream into messages, and believes none that was not sealed as the next one."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0
        self._frames = Frames(TAG)

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that ``data`` completes, in order. Raises NotTrusted; then nothing of this stream is
        to be used any more."""
        try:
            frames = self._frames.feed(data)
        except ValueError as error:
            raise NotTrusted(str(error)) from None
        for body, tag in frames:
            if not hmac.compare_digest(tag, _mac(self._key, self._number.to_bytes(8, "little"), body)):
                raise NotTrusted(
                    f"message {self._number} is not what was sent: changed, repeated or left out"
                )
            self._number += 1
        return [body for body, _ in frames]


class SealedReader(Generic[T]):
    """As `tenfold.worker.framing.FrameReader`, of sealed frames. Raises also NotTrusted."""

    def __init__(self, unsealer: Unsealer, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._unsealer = unsealer
        self._decoder = decoder

    def feed(self, data: bytes) -> list[T]:
        """The messages that ``data`` completes, in order."""
        return [self._decoder.decode(body) for body in self._unsealer.feed(data)]


@dataclass(frozen=True)
class Seals:
    """What one side of a connection seals and unseals with."""

    sealer: Sealer
    unsealer: Unsealer


def _seals(secret: bytes, nonces: bytes, we: bytes, they: bytes) -> Seals:
    return Seals(Sealer(_mac(secret, b"from " + we, nonces)), Unsealer(_mac(secret, b"from " + they, nonces)))


class FrontGreeting:
    """The front's side; ``hello`` goes first."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE)
        self.hello = MAGIC + self._nonce

    def check(self, answer: bytes) -> tuple[bytes, Seals]:
        """What the worker is to be told on its ``answer``, and the seals. Raises NotTrusted."""
        nonces = self._nonce + answer[:NONCE]
        if not hmac.compare_digest(answer[NONCE:], _mac(self._secret, b"worker", nonces)):
            raise NotTrusted("it does not have the secret")
        return _mac(self._secret, b"front", nonces), _seals(self._secret, nonces, b"front", b"worker")


class WorkerGreeting:
    """The worker's side, with the front's ``hello``. Raises NotTrusted if that is something else."""

    def __init__(self, secret: bytes, hello: bytes) -> None:
        if hello[: len(MAGIC)] != MAGIC:
            raise NotTrusted(
                "what answers there is no tenfold serve --accept-workers, or one of another version"
            )
        self._secret = secret
        nonce = secrets.token_bytes(NONCE)
        self._nonces = hello[len(MAGIC) :] + nonce
        self.answer = nonce + _mac(secret, b"worker", self._nonces)

    def check(self, proof: bytes) -> Seals:
        """The seals, if the front has the secret. Raises NotTrusted."""
        if proof == WRONG_SECRET:
            raise NotTrusted("the front says that this is not its secret; compare the two secret files")
        if not hmac.compare_digest(proof, _mac(self._secret, b"front", self._nonces)):
            raise NotTrusted("the front does not have the secret")
        return _seals(self._secret, self._nonces, b"worker", b"front")
