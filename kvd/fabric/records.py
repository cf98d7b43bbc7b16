"""Encrypted records below a lane's frames: for the level ``secret``.

A record is its length (u32, little-endian) with a tag of its own, and AES-GCM ciphertext with its tag. The nonces
are twice the record's number, and one more. The length has a tag since a changed one would keep the receiver waiting
for bytes that nobody sent. Frames begin and end anywhere in records.

Why not TLS 1.3: measured in this place (``python -m tests.bench.bench_security`` prints both) it takes about the same
CPU time a byte and 1.3 to 1.5 times as long, for it sends 16 KiB at a time. And it brings certificates, or pre-shared
keys that Python 3.11 can't set, where the handshake already leaves both ends with a secret.

Nothing of a record is looked at before its tag has been verified.
"""

from __future__ import annotations

import struct

from cryptography.exceptions import InvalidTag

from kvd.errors import ChecksumMismatch, ProtocolError
from kvd.fabric.iovec import Vector
from kvd.fabric.regions import address_of
from kvd.fabric.seals import REKEY_NUMBERS
from kvd.wire.keys import TAG_BYTES, Keys

RECORD_BYTES = 256 << 10
"""Most plaintext of a record."""
LENGTH = struct.Struct("<I")
_HEAD_BYTES = LENGTH.size + TAG_BYTES
_OVERHEAD = _HEAD_BYTES + TAG_BYTES
_NONCE = struct.Struct("<4xQ")
_PER_KEY = REKEY_NUMBERS * 16
"""Records of one key: 64 GiB at most."""


class RecordWriter:
    """Encrypts what a lane sends."""

    def __init__(self, key: bytes) -> None:
        self._keys = Keys(key, _PER_KEY)
        self._number = 0
        self._plain = bytearray(RECORD_BYTES)
        self._plain_address = address_of(self._plain)
        self._sealed = bytearray(RECORD_BYTES + _OVERHEAD)
        self._sealed_address = address_of(self._sealed)
        self._vector = Vector()

    @property
    def pending(self) -> bool:
        """Whether the kernel has not taken all of the last record."""
        return self._vector.remaining > 0

    def send(self, fd: int, vector: Vector) -> int:
        """Encrypt and hand over what is left of ``vector``, as far as the kernel takes it; bytes, or -1 for none.
        What is taken out of ``vector`` is not read again. Raises OSError."""
        total = 0
        while True:
            if self._vector.remaining:
                n = self._vector.send(fd)
                if n < 0:
                    return total or -1
                total += n
                if self._vector.remaining:
                    return total
            if not vector.remaining:
                return total
            self._seal(vector.gather(self._plain_address, RECORD_BYTES))

    def _seal(self, nbytes: int) -> None:
        self._number += 1
        aead = self._keys.at(self._number)
        length = LENGTH.pack(nbytes + TAG_BYTES)
        self._sealed[:_HEAD_BYTES] = length + aead.encrypt(_NONCE.pack(2 * self._number), b"", length)
        sealed = memoryview(self._sealed)[_HEAD_BYTES : nbytes + _OVERHEAD]
        aead.encrypt_into(_NONCE.pack(2 * self._number + 1), memoryview(self._plain)[:nbytes], None, sealed)
        self._vector.clear()
        self._vector.add(self._sealed_address, nbytes + _OVERHEAD)


class RecordReader:
    """Decrypts what a lane receives; :attr:`address` is where the plaintext of the last record lies."""

    def __init__(self, key: bytes) -> None:
        self._keys = Keys(key, _PER_KEY)
        self._number = 0
        self._length = 0
        """Of the record that has begun to arrive, verified; 0 before."""
        self._sealed = bytearray(2 * (RECORD_BYTES + _OVERHEAD))
        self._sealed_address = address_of(self._sealed)
        self._start = self._end = 0
        self._plain = bytearray(RECORD_BYTES)
        self.address = address_of(self._plain)
        self._vector = Vector()

    @property
    def missing(self) -> int:
        """Bytes that the record which has begun to arrive still lacks; 1 if none has."""
        return max(1, self._length - (self._end - self._start)) if self._length else 1

    def receive(self, fd: int) -> tuple[int, bool]:
        """Take what the socket has: (bytes, whether there may be more); -1 bytes for none, 0 at the end of the
        stream. Raises OSError."""
        if self._start:
            left = self._end - self._start
            self._sealed[:left] = self._sealed[self._start : self._end]
            self._start, self._end = 0, left
        room = len(self._sealed) - self._end
        self._vector.clear()
        n, _ = self._vector.receive(fd, self._sealed_address + self._end, room)
        self._end += max(n, 0)
        return n, n == room

    def open(self) -> int:
        """Decrypt the next record that is complete; its bytes, 0 if there is none.

        Raises :class:`ProtocolError` for a length that can't be, and :class:`ChecksumMismatch` for a wrong tag."""
        if not self._length and self._end - self._start >= _HEAD_BYTES:
            self._number += 1
            self._open_head()
        if not self._length or self._end - self._start < self._length:
            return 0
        sealed = memoryview(self._sealed)[self._start : self._start + self._length]
        nbytes = self._length - TAG_BYTES
        try:
            self._keys.at(self._number).decrypt_into(
                _NONCE.pack(2 * self._number + 1), sealed, None, memoryview(self._plain)[:nbytes]
            )
        except InvalidTag:
            raise self._changed() from None
        self._start += self._length
        self._length = 0
        return nbytes

    def _open_head(self) -> None:
        at, middle = self._start, self._start + LENGTH.size
        length = bytes(self._sealed[at:middle])
        tag = bytes(self._sealed[middle : at + _HEAD_BYTES])
        try:
            self._keys.at(self._number).decrypt(_NONCE.pack(2 * self._number), tag, length)
        except InvalidTag:
            raise self._changed() from None
        (size,) = LENGTH.unpack(length)
        if not TAG_BYTES < size <= RECORD_BYTES + TAG_BYTES:
            raise ProtocolError(f"an encrypted record claims {size} bytes; the connection is closed", size=size)
        self._length = int(size)
        self._start += _HEAD_BYTES

    def _changed(self) -> ChecksumMismatch:
        return ChecksumMismatch(
            f"encrypted record {self._number} of the lane was changed on the way; the connection is closed",
            reason="damaged",
        )
