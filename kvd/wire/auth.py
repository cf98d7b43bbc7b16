"""Proofs that a peer holds the shared key, and the keys of its lane streams.

A proof is HMAC-SHA256, under the shared key, of the prover's role and a digest of every handshake byte that crossed
the connection so far, both nonces among them. So a proof fits one connection (no replay), one side of it (no
reflection), and what both sides said in it (nothing can be changed on the way). No key, nor anything from which one
could be computed, is ever sent.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from kvd.errors import AuthenticationFailed

NONCE_BYTES = 32
PROOF_BYTES = 32
LANE_KEY_BYTES = 32

DIALLER = b"kvd control dialler"
ACCEPTOR = b"kvd control acceptor"
LANE_DIALLER = b"kvd lane dialler"
LANE_ACCEPTOR = b"kvd lane acceptor"
_LANE_KEY = b"kvd lane key"


def prove(key: bytes, role: bytes, transcript: bytes) -> bytes:
    """The proof of ``role`` (one of this module's constants) over a 32-byte transcript digest."""
    return hmac.digest(key, role + b"\0" + transcript, "sha256")


def matching_key(keys: Sequence[bytes], role: bytes, transcript: bytes, proof: bytes) -> bytes | None:
    """The first of ``keys`` under which ``proof`` is right, or ``None``. Tries all of them, in constant time."""
    found = None
    for key in keys:
        if hmac.compare_digest(prove(key, role, transcript), proof) and found is None:
            found = key
    return found


def lane_key(key: bytes, transcript: bytes, agreed: bytes) -> bytes:
    """The session's secret, with which its lane streams prove that they belong to it: 32 bytes.

    ``transcript`` is the digest of the whole control handshake, ``agreed`` what the two key shares in it give.
    """
    return hmac.digest(key, _LANE_KEY + b"\0" + transcript + agreed, "sha256")


def failure(us: str, them: str) -> AuthenticationFailed:
    """The error of a proof that is wrong, the same for every way in which it can be."""
    return AuthenticationFailed(f"{us} and {them} could not authenticate each other; give both the same shared key")
