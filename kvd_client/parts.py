"""What a process has open at its daemon: transfers and caches, with their memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvd_client.errors import LeaseExpired, error_from_code
from kvd_client.layouts import TensorMap
from kvd_client.mapping import Mapping
from kvd_client.protocol import CacheOpened, Ended, Opened


class Part:
    """One open transfer, as the connection knows it: its numbers, its memory, and how it ended."""

    __slots__ = (
        "__weakref__",
        "channels",
        "count_blocks",
        "ended",
        "handle",
        "mapping",
        "released",
        "slot",
        "tensors",
        "transfer",
    )

    def __init__(self, opened: Opened, mapping: Mapping, channels: Sequence[Mapping] = ()) -> None:
        self.transfer, self.handle, self.slot = opened.transfer, opened.handle, opened.slot
        self.count_blocks = opened.count_blocks
        self.mapping = mapping
        self.tensors = opened.tensors
        self.channels = channels
        """The device's channels, where the part has tensors of its own there and the device can be mapped."""
        self.ended: Ended | None = None
        self.released = False

    def retire(self) -> None:
        """Zero pages instead of the memory, before it may be somebody else's. Idempotent."""
        for mapping in (self.mapping, *self.channels):
            mapping.retire()


class OpenedCache:
    """A cache of this connection."""

    __slots__ = ("__weakref__", "cache", "channels", "tensors")

    def __init__(self, opened: CacheOpened, channels: list[Mapping]) -> None:
        self.cache, self.tensors, self.channels = opened.cache, opened.tensors, channels

    def retire(self) -> None:
        for mapping in self.channels:
            mapping.retire()


def released_error(part: Part) -> LeaseExpired:
    """What whoever uses a part after its release gets."""
    return LeaseExpired(
        f"transfer {part.transfer} has been released, and its memory is gone; open a new one", transfer=part.transfer
    )


def raise_if_failed(part: Part) -> None:
    """Raise the error with which the part ended, if it did."""
    ended = part.ended
    if ended is not None and ended.code != "OK":
        raise error_from_code(ended.code, ended.message, ended.fields)


def map_channels(tensors: TensorMap | None, fds: list[int]) -> list[Mapping]:
    """A mapping for each channel's descriptor."""
    if tensors is None or not fds:
        return []
    return [Mapping(fd, tensors.offset, tensors.nbytes) for fd in fds]
