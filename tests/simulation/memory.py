"""Modelled memory: slabs that are reused at once and never cleared, leases on them, and grants that end."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd_client.spec import MASK_LOCAL, MASK_REMOTE, PartLayout

SLAB = 2560
"""Bytes of a slab; every layout of the simulation fits."""

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]


def some(flags: Flags) -> bool:
    """Whether any is set: of arrays as small as these, in a fraction of the time of ``any``."""
    return 1 in flags.tobytes()


def every(flags: Flags) -> bool:
    """Whether all are set."""
    return 0 not in flags.tobytes()


@dataclasses.dataclass(slots=True, eq=False)
class Slab:
    """Real bytes; ``users`` are those who believe they have it: never more than one, unless kvd is wrong."""

    memory: Bytes
    users: list[Lease | Stranger] = dataclasses.field(default_factory=list)


class Stranger:
    """Somebody else who has the memory that ``owner`` gave back: no byte of it may change."""

    def __init__(self, slab: Slab, fill: int, owner: Any) -> None:
        self.slab = slab
        self.owner = owner
        slab.memory[:] = fill
        self._frozen = slab.memory.tobytes()

    def wrong_bytes(self) -> str:
        """As :meth:`Lease.wrong_bytes`."""
        now = self.slab.memory.tobytes()
        if now == self._frozen:
            return ""
        first = next(at for at, (one, other) in enumerate(zip(now, self._frozen, strict=True)) if one != other)
        return f"bytes of another's memory have changed, from {first} on"


class Lease:
    """One part's memory, laid out as in the product: ``data[layer, row, token, byte]``, ``mask[layer, row, token]``."""

    def __init__(self, slab: Slab, layout: PartLayout, lengths: tuple[int, ...], owner: Any) -> None:
        assert layout.nbytes <= SLAB
        token = layout.token_bytes
        self.slab = slab
        self.layout = layout
        self.owner = owner
        self.sink = False
        self.data: Bytes = np.ndarray(
            (layout.layers, layout.rows, layout.capacity, token),
            np.uint8,
            slab.memory,
            0,
            (layout.layer_stride, layout.capacity * token, token, 1),
        )
        self.mask: Bytes = np.ndarray(
            (layout.layers, layout.rows, layout.capacity),
            np.uint8,
            slab.memory,
            layout.masks_offset,
            (layout.mask_stride, layout.capacity, 1),
        )
        self.mask[:] = 0
        for row, length in enumerate(lengths):
            self.mask[:, row, :length] = MASK_REMOTE
        self.memory: Bytes = slab.memory[: layout.nbytes]
        layers, stride = layout.layers if layout.metadata else 0, layout.metadata_stride
        start = layout.metadata_offset
        self.metadata: Bytes = self.memory[start : start + layers * stride].reshape(layers, stride)
        """A row for each layer; no rows if there is none."""
        start = layout.metadata_mask_offset
        self.metadata_mask: Bytes = self.memory[start : start + layers]
        self.metadata_mask[:] = MASK_REMOTE
        self.metadata_expected: Bytes = np.zeros(self.metadata.shape, np.uint8)
        self.metadata_known = np.zeros(layers, np.bool_)
        """Announced (source)."""
        self.metadata_sent = np.zeros(layers, np.bool_)
        """Handed to the fabric: by this part (source), for this part (sink)."""
        self.expected: Bytes = np.zeros(self.data.shape, np.uint8)
        """What the bytes of known tokens must be."""
        self.known = np.zeros(self.mask.shape, np.bool_)
        """Tokens whose bytes are there: rung (source), held (sink)."""
        self.sent = np.zeros(self.mask.shape, np.bool_)
        """Tokens handed to the fabric: by this part (source), for this part (sink)."""

    def wrong_bytes(self) -> str:
        """What is not as it must be; empty if all is well.

        A source's rung tokens have the bytes that its process put there. A sink's local tokens have the source's,
        or their own where they were held; and what was never sent is not local.
        """
        sink = self.sink
        there = (self.mask == MASK_LOCAL) if sink else self.known
        wrong = (self.data != self.expected)[there]
        if some(wrong):
            at = np.flatnonzero(wrong.any(axis=1))[0]
            layer, row, token = (int(axis[at]) for axis in np.nonzero(there))
            what = "mask says local, but" if sink else "the source's"
            return (
                f"{what} bytes of token {token}, row {row}, layer {layer} are {self.data[layer, row, token].tolist()} "
                f"instead of {self.expected[layer, row, token].tolist()}"
            )
        if sink:
            unsent = there > (self.known | self.sent)
            if some(unsent):
                return f"the mask says local for a token that nobody sent: {[int(a[0]) for a in np.nonzero(unsent)]}"
        return self._wrong_metadata() if len(self.metadata) else ""

    def _wrong_metadata(self) -> str:
        there = (self.metadata_mask == MASK_LOCAL) if self.sink else self.metadata_known
        if some((self.metadata != self.metadata_expected)[there]):
            wrong = there & (self.metadata != self.metadata_expected).any(axis=1)
            what = "mask says local for" if self.sink else "the source's"
            return f"metadata: {what} layer {int(np.argmax(wrong))}, but its bytes are not what they should be"
        if self.sink and some(there > self.metadata_sent):
            return "metadata: the mask says local for a layer that nobody sent"
        return ""


@dataclasses.dataclass(slots=True, eq=False)
class Grant:
    """Permits a peer to write into a lease until it is revoked."""

    lease: Lease
    token: bytes
    revoked: bool = False


class Memory:
    """A node's pool. What is given back is what is taken next, with its old bytes in it; a slab is made, of random
    bytes, when none has been given back."""

    def __init__(self, rng: random.Random, slabs: int) -> None:
        self.slabs = slabs
        self.taken = 0
        self.grants: dict[bytes, Grant] = {}
        self._rng = rng
        self._free: list[Slab] = []

    def take(self, layout: PartLayout, lengths: tuple[int, ...], owner: Any) -> Lease | None:
        """None if there is no memory left."""
        if self.taken == self.slabs:
            return None
        slab = self._take()
        lease = Lease(slab, layout, lengths, owner)
        slab.users.append(lease)
        return lease

    def take_for_stranger(self, fill: int, owner: Any) -> Stranger:
        """The slab that was given back last, all of it ``fill``."""
        slab = self._take()
        stranger = Stranger(slab, fill, owner)
        slab.users.append(stranger)
        return stranger

    def _take(self) -> Slab:
        self.taken += 1
        return self._free.pop() if self._free else Slab(np.frombuffer(bytearray(self._rng.randbytes(SLAB)), np.uint8))

    def give_back(self, lease: Lease | Stranger) -> None:
        lease.slab.users.remove(lease)
        self._free.append(lease.slab)
        self.taken -= 1

    def revoke(self, grant: Grant) -> None:
        grant.revoked = True
        del self.grants[grant.token]
