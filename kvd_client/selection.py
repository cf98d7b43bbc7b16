"""Selections of a whole decode batch at once, whose requests may come from different sources."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from kvd_client.arguments import deadline_of
from kvd_client.arrays import Bytes
from kvd_client.errors import DeadlineExceeded, InvalidArgument
from kvd_client.fetch import FetchHandle
from kvd_client.lanes import PendingSelection
from kvd_client.transfer import Index


class Pending(Protocol):
    """A selection between the parts of a select; :class:`PendingSelection` is one."""

    index: Index

    def submit(self) -> None: ...
    def load_local(self) -> None: ...
    @property
    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> Bytes: ...


class Selectable(Protocol):
    """What :func:`select_many` takes; :class:`kvd_client.DecodeTransfer` is one."""

    def prepare_select(self, layer: int, index: Index, *, slot: int = 0, parallel: bool = True) -> Any:
        """Check and split an index; a :class:`Pending`."""


def select_many(
    requests: Iterable[tuple[Selectable, int, Index, int]], *, parallel: bool = True, timeout_s: float | None = None
) -> Iterator[tuple[int, Pending]]:
    """One select for a whole decode batch, whose requests may come from different sources.

    ``requests`` has ``(transfer, layer, index, slot)`` of each; the transfers were opened with one client, and no
    slot of a transfer is named twice. Every fetch is sent before any is waited for, and local entries are loaded
    meanwhile. Yields ``(position in requests, selection)`` as each becomes complete, so that a slow source holds up
    nobody else's; ``selection.wait()`` then returns the entries or raises that transfer's own error, and
    ``selection.index`` has their order.

    Raises :class:`InvalidArgument` for an index or slot that does not fit, and what ended a transfer before, with
    nothing sent. Iterating raises :class:`DeadlineExceeded` ``timeout_s`` seconds after the call, with the fetches
    going on.
    """
    requests = list(requests)
    places = {(id(transfer), slot) for transfer, _, _, slot in requests}
    if len(places) != len(requests):
        raise InvalidArgument("two selections of one call name the same transfer and slot; give each a slot of its own")
    pending: list[Pending] = [
        transfer.prepare_select(layer, index, slot=slot, parallel=parallel) for transfer, layer, index, slot in requests
    ]
    deadline = deadline_of(timeout_s)
    for selection in pending:
        selection.submit()
    for selection in pending:
        selection.load_local()
    return as_completed(pending, deadline)


def as_completed(pending: Sequence[Pending], deadline: float | None = None) -> Iterator[tuple[int, Pending]]:
    """Yield ``(position, selection)`` of submitted selections as they complete.

    Raises :class:`DeadlineExceeded` at the ``deadline`` on the monotonic clock, with the fetches going on, and
    :class:`InvalidArgument` for selections of different clients' transfers.
    """
    left = dict(enumerate(pending))
    while left:
        found = [at for at, selection in left.items() if selection.done]
        for at in found:
            yield at, left.pop(at)
        if found or not left:
            continue
        waiting = [s for s in left.values() if isinstance(s, PendingSelection)]
        fetches = [s.fetch for s in waiting if s.fetch is not None]
        connection = fetches[0].connection
        if any(fetch.connection is not connection for fetch in fetches):
            raise InvalidArgument("selections of one call must be of transfers that were opened with one client")

        def any_done(fetches: list[FetchHandle] = fetches) -> bool | None:
            return any(fetch.poll() for fetch in fetches) or None

        since = time.monotonic()
        got = connection.wait(any_done, deadline)
        for selection in waiting:
            selection._waited += time.monotonic() - since
        if not got:
            raise DeadlineExceeded(
                f"{len(left)} of {len(pending)} selections were not complete in time; their fetches go on"
            )
