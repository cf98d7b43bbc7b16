"""A source part's side of a send queue, and readers of what it hands out."""

from __future__ import annotations

from typing import Any

from kvd.transfer.order import Policy
from kvd.transfer.queue import ReadyTokens, SendQueue
from kvd_client.spec import PartLayout, TokenRange

LAYOUT = PartLayout(layers=2, heads=1, entry_bytes=10, rows=3, capacity=8)
LENGTHS = (8, 3, 5)


class Source:
    """What a source part has: what is ready, and the queue of what is to be sent."""

    def __init__(
        self,
        layout: PartLayout = LAYOUT,
        lengths: tuple[int, ...] = LENGTHS,
        policy: Policy | None = None,
        held: tuple[TokenRange, ...] = (),
        **options: Any,
    ) -> None:
        self.tokens = ReadyTokens(layout, lengths)
        self.queue = SendQueue(layout, lengths, policy or Policy(), held=held, **options)

    def ready(self, layer: int, row: int | None, start: int, stop: int) -> None:
        self.queue.add(self.tokens.add(layer, row, start, stop))

    def drain(self, max_bytes: int = 1 << 20) -> list[tuple[int, tuple[TokenRange, ...]]]:
        found = []
        while taken := self.queue.take(max_bytes):
            found += taken
        return found


def tokens_of(taken: list[tuple[int, tuple[TokenRange, ...]]]) -> list[tuple[int, int, int]]:
    return [(layer, r.row, token) for layer, ranges in taken for r in ranges for token in range(r.start, r.stop)]
