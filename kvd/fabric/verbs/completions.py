"""A completion queue under an event loop: its channel's descriptor wakes the loop, and nothing here waits."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any

from kvd.fabric.verbs import binding as ib

POLL_BATCH = 32
POLLS_A_TURN = 8
"""Batches of completions that are handled before the event loop gets its turn."""
ACK_BATCH = 64
"""Events that are acknowledged at once, since that takes a lock."""


class Completions:
    """See the module. ``on_completion`` is called with the work request's id, the status and the length, then
    ``on_batch`` once for all that were found; either may close the queue."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: Any,
        depth: int,
        on_completion: Callable[[int, int, int], None],
        on_batch: Callable[[], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._on_completion, self._on_batch, self._on_failure = on_completion, on_batch, on_failure
        self._channel, self._descriptor = ib.make_channel(context)
        self.queue = ib.CQ(context, depth, None, self._channel, 0)
        self._unacknowledged = 0
        self._started = self._closed = False

    def start(self) -> None:
        """Wake for completions from now on, those that are there already included."""
        self.queue.req_notify()
        self._loop.add_reader(self._descriptor, self._on_event)
        self._started = True
        self.poll()

    def _on_event(self) -> None:
        try:
            while True:
                self._channel.get_cq_event(self.queue)
                self._unacknowledged += 1
        except ib.PyverbsError as error:
            if ib.error_number(error) != errno.EAGAIN:
                self._on_failure(f"the completion channel failed: {error}")
                return
        if self._unacknowledged >= ACK_BATCH:
            self._acknowledge()
        self.queue.req_notify()  # before the poll, so that nothing is missed between them
        self.poll()

    def poll(self) -> None:
        """Handle the completions that are there."""
        for _ in range(POLLS_A_TURN):
            if self._closed:
                return
            count, completions = self.queue.poll(POLL_BATCH)
            for completion in completions:
                if self._closed:
                    return
                self._on_completion(completion.wr_id, completion.status, completion.byte_len)
            if count < POLL_BATCH:
                break
        else:
            self._loop.call_soon(self.poll)
        if not self._closed:
            self._on_batch()

    def _acknowledge(self) -> None:
        self.queue.ack_events(self._unacknowledged)
        self._unacknowledged = 0

    def close(self) -> None:
        """Destroy the queue; its queue pairs must be gone."""
        self._closed = True
        if self._started:
            self._loop.remove_reader(self._descriptor)
        if self._unacknowledged:
            self._acknowledge()  # else the queue could not be destroyed
        self.queue.close()
        self._channel.close()
