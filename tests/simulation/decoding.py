"""What a sink's process does while it decodes: fetch random entries, ring idle windows, stop early."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvd.transfer import events as ev
from kvd.transfer.part import State

if TYPE_CHECKING:
    from .requests import Attempt


class Decode:
    """Steps until the transfer ends, or until the process has had enough."""

    def __init__(self, attempt: Attempt) -> None:
        rng = attempt.world.rng
        self.attempt = attempt
        self.begun = False
        self.steps = rng.choice((1, 3, 6))
        self.patient = rng.random() < 0.7
        """Goes on until all is here, where windows bring it."""
        self.appetite = rng.choice((0.0, 0.3, 0.9))
        """How likely it is that a step fetches."""
        if rng.random() < 0.2:  # before there is anything to fetch from
            attempt.node.later(rng.choice((0.0, 0.05, 1.0)), self.fetch)

    def begin(self) -> None:
        """Something has arrived."""
        if not self.begun:
            self.begun = True
            self._later()

    def _later(self) -> None:
        self.attempt.node.later(self.attempt.world.rng.choice((0.02, 0.1, 0.3)), self._step)

    def _step(self) -> None:
        attempt = self.attempt
        record, node, rng = attempt.record, attempt.node, attempt.world.rng
        assert record is not None
        if attempt.dead or record.released:
            return
        for _ in range(rng.choice((1, 1, 3))):
            if rng.random() < self.appetite:
                self.fetch()
        for layer in range(record.lease.layout.layers):
            if record.wants_windows:
                node.feed(ev.IdleWindow(record.transfer, layer))
        if record.released or attempt.dead:
            return
        part = node.core.parts[record.transfer]
        self.steps -= part.state in (State.RUNNING, State.ENDED)
        if self.steps > 0:
            self._later()
        elif part.state is State.RUNNING and part.mode != "full":
            if record.wants_windows and self.patient:
                self._later()
            else:
                attempt.release(enough=True)

    def fetch(self) -> None:
        """Random entries of a random layer into a free slot; now and then one that does not exist."""
        attempt = self.attempt
        record, rng = attempt.record, attempt.world.rng
        if record is None or attempt.dead or record.released:
            return
        layout = record.lease.layout
        taken = {request.offset for request in attempt.pending.values()}
        free = [slot for slot in range(layout.landing_slots) if layout.landing_offset(slot) not in taken]
        if not free:
            return
        counts = [rng.randint(0, layout.landing_entries) for _ in range(layout.rows * layout.heads)]
        lengths = [record.lengths[group // layout.heads] for group in range(len(counts))]
        index = [rng.randrange(length) for length, count in zip(lengths, counts, strict=True) for _ in range(count)]
        if index and rng.random() < 0.03:
            index[rng.randrange(len(index))] = rng.choice((-1, layout.capacity))
        number, attempt.node.next_fetch = attempt.node.next_fetch, attempt.node.next_fetch + 1
        request = ev.FetchRequested(
            transfer=record.transfer, fetch=number, layer=rng.randrange(layout.layers),
            counts=np.array(counts, np.int32).tobytes(), index=np.array(index, np.int32).tobytes(),
            offset=layout.landing_offset(rng.choice(free)), stride=layout.landing_row_bytes,
        )  # fmt: skip
        attempt.pending[number] = request
        attempt.node.feed(request)
        if attempt.world.chance(0.1):
            attempt.world.stranger_answers(attempt.node, record.transfer, number)
