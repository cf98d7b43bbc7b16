"""Free space of one arena: disjoint gaps, best fit, neighbours joined as soon as they touch. Pure arithmetic."""

from __future__ import annotations

import bisect

from kvd.errors import InvalidArgument


class Extents:
    """Carves ``[0, size)`` into pieces that are multiples of ``grain`` bytes."""

    __slots__ = ("_lengths", "_offsets", "free", "grain", "size")

    def __init__(self, size: int, grain: int) -> None:
        self.size = size
        self.grain = grain
        self.free = size
        # Two sorted-by-offset lists instead of objects: a bisect and a scan over integers.
        self._offsets = [0]
        self._lengths = [size]

    @property
    def empty(self) -> bool:
        """Nothing is taken."""
        return self.free == self.size

    @property
    def largest(self) -> int:
        return max(self._lengths, default=0)

    def gaps(self) -> list[tuple[int, int]]:
        """``(offset, length)`` of each gap, by offset."""
        return list(zip(self._offsets, self._lengths, strict=True))

    def rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.grain) * self.grain

    def best(self, nbytes: int) -> int | None:
        """Length of the smallest gap that holds ``nbytes``, ``None`` where none does."""
        need = self.rounded(nbytes)
        return min((length for length in self._lengths if length >= need), default=None)

    def take(self, nbytes: int) -> int | None:
        """Offset of ``rounded(nbytes)`` bytes out of the best gap, ``None`` where none holds them."""
        need = self.rounded(nbytes)
        fit = self.best(need)
        if fit is None:
            return None
        at = self._lengths.index(fit)
        offset = self._offsets[at]
        if fit == need:
            del self._offsets[at], self._lengths[at]
        else:
            self._offsets[at] += need
            self._lengths[at] -= need
        self.free -= need
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Return a piece as it was taken; raises :class:`InvalidArgument` where part of it is free already."""
        need = self.rounded(nbytes)
        at = bisect.bisect_left(self._offsets, offset)
        before = at > 0 and self._offsets[at - 1] + self._lengths[at - 1]
        after = self._offsets[at] if at < len(self._offsets) else self.size
        if offset < 0 or before > offset or offset + need > after:
            raise InvalidArgument(
                f"bytes {offset} to {offset + need} of the arena are (partly) free already; give each piece back once",
                offset=offset,
                length=need,
            )
        joins_next = at < len(self._offsets) and after == offset + need
        if at > 0 and before == offset:
            self._lengths[at - 1] += need
            if joins_next:
                self._lengths[at - 1] += self._lengths[at]
                del self._offsets[at], self._lengths[at]
        elif joins_next:
            self._offsets[at] = offset
            self._lengths[at] += need
        else:
            self._offsets.insert(at, offset)
            self._lengths.insert(at, need)
        self.free += need
