"""Who holds what of a pool or a device, and for how long leases are kept."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from kvd.memory.leases import Lifetime

L = TypeVar("L", bound=Lifetime)

FIRST_HINT_S = 0.5
"""When to come back for memory, before any lease has been given back."""
LEAST_HINT_S, MOST_HINT_S = 0.01, 5.0


class Holdings(Generic[L]):
    """The leases whose memory has not gone back yet."""

    def __init__(self) -> None:
        self._by_owner: dict[Hashable, dict[int, L]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[L]:
        """All of them as they are now: they may be removed meanwhile."""
        return iter([lease for owned in self._by_owner.values() for lease in owned.values()])

    def of(self, owner: Hashable) -> list[L]:
        """The owner's, oldest first."""
        return list(self._by_owner.get(owner, {}).values())

    def add(self, lease: L) -> None:
        self._by_owner.setdefault(lease.owner, {})[lease.generation] = lease
        self._count += 1

    def remove(self, lease: L) -> None:
        owned = self._by_owner[lease.owner]
        del owned[lease.generation]
        self._count -= 1
        if not owned:
            del self._by_owner[lease.owner]


class Turnover:
    """How long leases are kept, and so when the next one will go back, most likely."""

    def __init__(self) -> None:
        self._born: dict[int, float] = {}
        self._lifetime_s = 0.0
        """The mean, the last ones counting most; 0 before the first has gone back."""

    def began(self, lease: Lifetime) -> None:
        self._born[lease.generation] = time.monotonic()

    def ended(self, lease: Lifetime) -> None:
        kept_s = time.monotonic() - self._born.pop(lease.generation)
        self._lifetime_s = kept_s if not self._lifetime_s else 0.9 * self._lifetime_s + 0.1 * kept_s

    @property
    def retry_after_s(self) -> float:
        """When a request that finds no room should come back."""
        if not self._lifetime_s:
            return FIRST_HINT_S
        return round(min(max(self._lifetime_s / max(1, len(self._born)), LEAST_HINT_S), MOST_HINT_S), 3)
