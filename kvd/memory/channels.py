"""Free space of a device's memory channels, kept balanced: a tensor takes the same bytes of every channel it lies in.

An NPU spreads a tensor over its DRAM channels by explicit placement, and every kernel that reads it computes addresses
from one base that holds for all channels (HAWK, section 4.2). So the unit of allocation is an extent of *all* channels
of a tensor at once, and the free space is one list of segments for all channels together. Pure arithmetic.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence

from kvd.errors import InvalidArgument, OutOfMemory
from kvd.units import about

MAX_CHANNELS = 64


class ChannelSpace:
    """``channels`` channels of ``channel_bytes`` bytes each; bases and sizes are multiples of ``alignment`` bytes.

    Tensors in all channels fill from below, at the best fit; tensors in only some channels (shards, or a flat tensor
    in one) go where other channels are taken already, and else to the top. So they don't break up the space that is
    free in all channels more than they must.
    """

    __slots__ = ("_all", "_masks", "_starts", "_used", "alignment", "channel_bytes", "channels")

    def __init__(self, channels: int, channel_bytes: int, alignment: int = 1) -> None:
        if not 1 <= channels <= MAX_CHANNELS:
            raise InvalidArgument(f"a device has 1 to {MAX_CHANNELS} channels, not {channels}", channels=channels)
        if alignment < 1 or channel_bytes < alignment:
            raise InvalidArgument(
                f"channels of {channel_bytes} bytes hold nothing that is aligned to {alignment}; the alignment must be "
                "positive and the channels at least as large",
                channel_bytes=channel_bytes,
                alignment=alignment,
            )
        self.channels = channels
        self.channel_bytes = channel_bytes // alignment * alignment
        self.alignment = alignment
        self._all = (1 << channels) - 1
        # Segment i reaches from _starts[i] to the next one's start and is free in the channels of _masks[i]; neighbours
        # differ. The last start is the end, free in no channel.
        self._starts = [0, self.channel_bytes]
        self._masks = [self._all, 0]
        self._used = [0] * channels

    # --- what there is --------------------------------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        """Nothing is taken."""
        return len(self._starts) == 2 and self._masks[0] == self._all

    def rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment

    def used(self, channel: int) -> int:
        return self._used[channel]

    def free(self, channel: int) -> int:
        return self.channel_bytes - self._used[channel]

    def gaps(self, channels: Iterable[int] | None = None) -> list[tuple[int, int]]:
        """``(offset, length)`` of each extent that is free in all of ``channels`` (``None``: all), by offset."""
        return list(self._runs(self._mask(channels)))

    def largest(self, channels: Iterable[int] | None = None) -> int:
        """Bytes of the largest extent that is free in all of ``channels`` (``None``: all)."""
        return max((length for _, length in self._runs(self._mask(channels))), default=0)

    # --- taking and giving ----------------------------------------------------------------------------------------

    def take(self, nbytes: int, channels: Sequence[int] | None = None) -> int:
        """The base of ``nbytes`` bytes in each of ``channels`` (``None``: all): the same offset in all of them.

        Raises :class:`OutOfMemory` that names the ``channel`` that has the least room, with ``need``, ``free`` and
        ``largest_free`` there in bytes, and ``largest_common``, the largest extent free in all channels asked for;
        nothing has changed then. Raises :class:`InvalidArgument` for a size that is not positive or channels that
        don't exist.
        """
        if nbytes <= 0:
            raise InvalidArgument(f"a tensor of {nbytes} bytes makes no sense; give a positive size", need=nbytes)
        mask, need = self._mask(channels), self.rounded(nbytes)
        base = self._place(mask, need)
        if base is None:
            raise self._exhausted(mask, need, need)
        self._flip(base, need, mask)
        for channel in self._members(mask):
            self._used[channel] += need
        return base

    def take_all(self, sizes: Sequence[int], channels: Sequence[int] | None = None) -> list[int]:
        """The base of each of several tensors, of ``sizes`` bytes in each channel: end to end in one extent where there
        is one, else in as few as go; all or none.

        A request's tensors, one for each layer and K or V, are small beside a channel. Asking for them so keeps what
        earlier tensors left between them usable; asking for their sum does not. Errors as in :meth:`take`, where
        ``need`` is the sum and ``largest_tensor`` the largest of ``sizes``.
        """
        if not sizes or min(sizes) <= 0:
            raise InvalidArgument("each tensor needs a positive size, and there must be one", need=sum(sizes))
        mask = self._mask(channels)
        ends = [0, *itertools.accumulate(map(self.rounded, sizes))]
        bases: list[int] = []
        while len(bases) < len(sizes):
            first = len(bases)
            largest = self.largest(channels)
            last = bisect.bisect_right(ends, ends[first] + largest) - 1
            if last == first:
                for base, nbytes in zip(bases, sizes, strict=False):
                    self.give(base, nbytes, channels)
                raise self._exhausted(mask, ends[-1], max(map(self.rounded, sizes)))
            base = self.take(ends[last] - ends[first], channels)
            bases += (base + end - ends[first] for end in ends[first:last])
        return bases

    def give(self, base: int, nbytes: int, channels: Sequence[int] | None = None) -> None:
        """Return what :meth:`take` gave; raises :class:`InvalidArgument`, and changes nothing, where part of it is
        free already or was never part of a channel."""
        mask, need = self._mask(channels), self.rounded(nbytes)
        inside = nbytes > 0 and base >= 0 and base + need <= self.channel_bytes and base % self.alignment == 0
        if not inside or any(free & mask for free in self._overlapped(base, base + need)):
            raise InvalidArgument(
                f"bytes {base} to {base + need} of channels {self._named(mask)} are not taken as a whole; give each "
                "extent back once, as it was taken",
                offset=base,
                length=need,
            )
        self._flip(base, need, mask)
        for channel in self._members(mask):
            self._used[channel] -= need

    # --- inside ---------------------------------------------------------------------------------------------------

    def _mask(self, channels: Iterable[int] | None) -> int:
        if channels is None:
            return self._all
        mask = 0
        for channel in channels:
            if not 0 <= channel < self.channels or mask >> channel & 1:
                raise InvalidArgument(
                    f"channel {channel} is named twice or does not exist; the device has channels 0 to "
                    f"{self.channels - 1}",
                    channel=channel,
                    channels=self.channels,
                )
            mask |= 1 << channel
        if not mask:
            raise InvalidArgument("a tensor lies in at least one channel; name it", channels=self.channels)
        return mask

    def _members(self, mask: int) -> Iterator[int]:
        return (channel for channel in range(self.channels) if mask >> channel & 1)

    def _named(self, mask: int) -> str:
        members = list(self._members(mask))
        if len(members) > 2 and members == list(range(members[0], members[-1] + 1)):
            return f"{members[0]} to {members[-1]}"
        return ", ".join(map(str, members))

    def _runs(self, mask: int, *, broken: bool = False) -> Iterator[tuple[int, int]]:
        """Maximal extents that are free in all channels of ``mask``; with ``broken``, only the parts of them that are
        not free in all channels of the device."""
        start = -1
        for at, free in enumerate(self._masks):
            fits = free & mask == mask and not (broken and free == self._all)
            if fits and start < 0:
                start = self._starts[at]
            elif not fits and start >= 0:
                yield start, self._starts[at] - start
                start = -1

    def _place(self, mask: int, need: int) -> int | None:
        if mask == self._all:
            fit = min(((n, at) for at, n in self._runs(mask) if n >= need), default=None)
            return None if fit is None else fit[1]
        fit = min(((n, -at) for at, n in self._runs(mask, broken=True) if n >= need), default=None)
        if fit is None:
            fit = min(((-at, n) for at, n in self._runs(mask) if n >= need), default=None)
            return None if fit is None else fit[1] - fit[0] - need
        return fit[0] - fit[1] - need

    def _overlapped(self, start: int, end: int) -> Iterator[int]:
        at = bisect.bisect_right(self._starts, start) - 1
        while self._starts[at] < end:
            yield self._masks[at]
            at += 1

    def _flip(self, base: int, nbytes: int, mask: int) -> None:
        """Free becomes taken and taken free, in the channels of ``mask``."""
        first, last = self._cut(base), self._cut(base + nbytes)
        for at in range(first, last):
            self._masks[at] ^= mask
        # Only these borders can have become ones between equals.
        for at in range(last, first - 1, -1):
            if 0 < at < len(self._masks) - 1 and self._masks[at] == self._masks[at - 1]:
                del self._starts[at], self._masks[at]

    def _cut(self, offset: int) -> int:
        """The index of the segment that begins at ``offset``, made where there is none."""
        at = bisect.bisect_left(self._starts, offset)
        if self._starts[at] != offset:
            self._starts.insert(at, offset)
            self._masks.insert(at, self._masks[at - 1])
        return at

    def _exhausted(self, mask: int, need: int, tensor: int) -> OutOfMemory:
        """``need`` bytes in each channel, in pieces of which the largest has ``tensor`` bytes."""
        largest = {channel: self.largest([channel]) for channel in self._members(mask)}
        channel = min(largest, key=lambda c: (self.free(c) >= need, largest[c], self.free(c)))
        free, common = self.free(channel), self.largest(self._members(mask))
        if free < need:
            what = f"channel {channel} has {free} bytes free of the {need} that are needed in it"
        elif largest[channel] < tensor:
            what = (
                f"channel {channel} has {free} bytes free for the {need} that are needed in it, but only "
                f"{largest[channel]} in one piece where a tensor needs {tensor}"
            )
        else:
            what = (
                f"channel {channel} has {free} bytes free for the {need} that are needed in it, but channels "
                f"{self._named(mask)} have only {common} in one piece at the same base where a tensor needs {tensor}"
            )
        return OutOfMemory(
            f"{what}; release tensors, ask for smaller ones, or give the device larger channels than "
            f"{about(self.channel_bytes)}",
            channel=channel,
            need=need,
            free=free,
            largest_free=largest[channel],
            largest_common=common,
            largest_tensor=tensor,
        )
