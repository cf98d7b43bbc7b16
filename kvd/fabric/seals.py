"""What frames of a lane are checked with: a checksum against accidents, or a code that nobody else can compute.

A seal gives every frame of one direction up to three checks of ``check_bytes`` each, numbered with the frame, so that a
check fits neither another frame nor another part of it: one of the *head* (the header and the body's check), one of the
*runs* (the descriptors), one of the *body* (the payload). Head and runs are verified before anything is placed.

Everything is computed on the event loop's thread, large payloads too. xxh3 runs at 35 to 45 GB/s on what the CPU's
cache still holds and at 14 to 19 GB/s on what it doesn't: 50 to 150 us for a frame of 2 MiB, of the order of handing it
to another thread and back, and a tenth of what the system call takes that moves it. A thread would have to be waited
for before a mask may follow its data, memory be given back, or a connection be closed.
"""

from __future__ import annotations

import abc
import struct
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from kvd_kernels import copy_runs

from kvd.fabric.frames import MAX_PAYLOAD
from kvd.wire.keys import TAG_BYTES, Keys

REKEY_NUMBERS = 1 << 14
"""Frames of one key. A frame has up to 4 MiB, so a key covers at most 64 GiB: 2**32 blocks, far below where AES-GCM's
bounds begin to matter."""
SMALL_RUN = 4096
"""Runs that are shorter on average are gathered before they are checked: a call for each costs more."""

Buffer: TypeAlias = bytes | bytearray | memoryview
Offsets: TypeAlias = npt.NDArray[np.int64]

_HEAD, _RUNS, _BODY = range(3)
_NONCE = struct.Struct("<4xQ")
_scratch = bytearray(MAX_PAYLOAD)
_scratch_view = memoryview(_scratch)


class Seal(abc.ABC):
    """One direction of one lane. ``frame`` counts its frames from 1."""

    check_bytes: int

    @abc.abstractmethod
    def head(self, frame: int, data: Buffer) -> bytes:
        """The check of a header and the body's check."""

    @abc.abstractmethod
    def runs(self, frame: int, data: Buffer) -> bytes:
        """The check of packed descriptors."""

    @abc.abstractmethod
    def body(self, frame: int, pieces: Iterator[Buffer] | Sequence[Buffer]) -> bytes:
        """The check of a payload in pieces."""


class NoSeal(Seal):
    """Nothing is checked: TCP's own checksum has to do, or a record layer has seen to it."""

    check_bytes = 0

    def head(self, frame: int, data: Buffer) -> bytes:
        return b""

    def runs(self, frame: int, data: Buffer) -> bytes:
        return b""

    def body(self, frame: int, pieces: Iterator[Buffer] | Sequence[Buffer]) -> bytes:
        return b""


class Checksum(Seal):
    """xxh3 of 64 bits: finds what breaks by accident. Whoever changes bytes on purpose can compute it too."""

    check_bytes = 8

    def head(self, frame: int, data: Buffer) -> bytes:
        return xxhash.xxh3_64_digest(data, frame)

    runs = head

    def body(self, frame: int, pieces: Iterator[Buffer] | Sequence[Buffer]) -> bytes:
        digest = xxhash.xxh3_64(seed=frame)
        for piece in pieces:
            digest.update(piece)
        return digest.digest()


class Gmac(Seal):
    """AES-GMAC: a changed, repeated, dropped or reordered frame does not pass. Does not hide anything."""

    check_bytes = TAG_BYTES

    def __init__(self, key: bytes) -> None:
        self._keys = Keys(key, REKEY_NUMBERS)

    def head(self, frame: int, data: Buffer) -> bytes:
        return self._keys.at(frame).encrypt(_NONCE.pack(4 * frame + _HEAD), b"", data)

    def runs(self, frame: int, data: Buffer) -> bytes:
        return self._keys.at(frame).encrypt(_NONCE.pack(4 * frame + _RUNS), b"", data)

    def body(self, frame: int, pieces: Iterator[Buffer] | Sequence[Buffer]) -> bytes:
        self._keys.at(frame)
        nonce = _NONCE.pack(4 * frame + _BODY)
        mac = Cipher(algorithms.AES(self._keys.key), modes.GCM(nonce)).encryptor()
        for piece in pieces:
            mac.authenticate_additional_data(piece)
        mac.finalize()
        return mac.tag


def pieces(memory: memoryview, offsets: Offsets, lengths: Offsets) -> Iterator[memoryview]:
    """The runs of ``memory`` one after the other; of those that are short, a copy in one piece, valid until the next
    call. At most ``MAX_PAYLOAD`` bytes."""
    if len(offsets) == 1:
        at = int(offsets[0])
        yield memory[at : at + int(lengths[0])]
        return
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    if total >= SMALL_RUN * len(offsets):
        for at, stop in zip(offsets.tolist(), (offsets + lengths).tolist(), strict=True):
            yield memory[at:stop]
    elif total:
        copy_runs(memory, _scratch_view, np.stack([offsets, ends - lengths, lengths], axis=1))
        yield _scratch_view[:total]
