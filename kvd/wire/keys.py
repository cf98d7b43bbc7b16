"""Keys of one connection: what both ends agree on in the handshake, and the AES keys that follow from it.

The handshake proves a shared key (:mod:`kvd.wire.auth`) and carries an X25519 share each way, which the proofs cover.
So the session's secret is known to the two ends alone, and to nobody who records the traffic and gets at the shared
key later. Every use, lane and direction has an AES key of its own, so that a counter can be the nonce.
"""

from __future__ import annotations

import hmac

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvd.errors import ProtocolError
from kvd.types import Lane

SHARE_BYTES = 32
KEY_BYTES = 16
"""AES-128, as in TLS 1.3's mandatory suite."""
TAG_BYTES = 16


class KeyShare:
    """One end's half of a key agreement, used for one connection."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public: bytes = self._private.public_key().public_bytes_raw()

    def agree(self, theirs: bytes) -> bytes:
        """The secret of both halves, 32 bytes; raises :class:`ProtocolError` for a share that gives none."""
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(theirs))
        except ValueError:
            raise ProtocolError("the peer's key share is not one; the connection is closed") from None


def direction_key(secret: bytes, what: bytes, lane: Lane | None, from_dialler: bool) -> bytes:
    """The first AES key of what one end sends."""
    label = b"kvd %s %d %d" % (what, -1 if lane is None else lane, from_dialler)
    return hmac.digest(secret, label, "sha256")[:KEY_BYTES]


class Keys:
    """The AES keys of one direction: a new one, derived from the last, after every ``per_key`` numbers."""

    def __init__(self, key: bytes, per_key: int) -> None:
        self._per_key = per_key
        self._epoch = 0
        self.key = key
        self.aead = AESGCM(key)

    def at(self, number: int) -> AESGCM:
        """The cipher for ``number``, counted from 1; numbers never go down by an epoch."""
        while number // self._per_key > self._epoch:
            self._epoch += 1
            self.key = hmac.digest(self.key, b"kvd next key", "sha256")[:KEY_BYTES]
            self.aead = AESGCM(self.key)
        return self.aead
