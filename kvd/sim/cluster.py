"""All nodes, and who gets which request."""

from __future__ import annotations

import collections
from collections.abc import Callable

from kvd.importance.matrix import ImportanceMatrix
from kvd.sim.clock import Clock
from kvd.sim.node import Node
from kvd.sim.request import Journey, Measured
from kvd.sim.workload import Request, Scenario, requests, synthetic_importance
from kvd.transfer.core import Settings
from kvd.transfer.policy import Profiled, Selective

CHUNK, WINDOW = 64 << 20, 256 << 20
CLASSES = 16
"""A quarter of the daemon's: each class of each layer is a write, and each write is events to simulate."""


class Cluster:
    """``known``: the importance that the daemons have a profile of; synthetic where none is given."""

    def __init__(self, scenario: Scenario, known: ImportanceMatrix | None = None) -> None:
        self.scenario = scenario
        self.clock = clock = Clock()
        self.known = known or synthetic_importance(scenario.shape.layers, scenario.seed)
        settings = Settings(
            chunk=CHUNK,
            window=WINDOW,
            bulk_delay_s=scenario.fetch_delay_s,
            selective=Selective(
                mode=scenario.mode,
                budget=scenario.budget,
                speculative=scenario.speculative,
                blocks=self.known.blocks,
                classes=CLASSES,
            ),
            profiled=lambda spec, selector, lengths: Profiled(
                self.known, transfer_s=sum(lengths) * scenario.token_bytes / scenario.link_rate
            ),
        )

        def nodes(kind: str, count: int) -> list[Node]:
            return [
                Node(clock, f"{kind}-{number}", settings, scenario.link_rate, scenario.delay_s)
                for number in range(count)
            ]

        self.prefill = nodes("prefill", scenario.prefill_nodes)
        self.decode = nodes("decode", scenario.decode_nodes)
        everyone = {node.name: node for node in self.prefill + self.decode}
        for node in everyone.values():
            node.nodes = everyone
        self.measured: list[Measured] = []
        self.arrived = 0
        self.running = 0
        self.most_running = 0
        """Requests at one time, from the beginning of their prefill on."""
        self.most_bytes = 0
        """At one decode node, of the caches that it held at a time."""
        self._bytes = dict.fromkeys(everyone, 0)
        self._active = dict.fromkeys((node.name for node in self.decode), 0)
        self._idle = collections.deque(self.prefill)
        self._waiting: collections.deque[Request] = collections.deque()
        for request in requests(scenario):
            clock.at(request.arrives_s, self._arrive, request)

    def run(self, watch: Callable[[], None] | None = None) -> list[Measured]:
        """Until every request has ended."""
        self.clock.run(watch)
        return self.measured

    def _arrive(self, request: Request) -> None:
        self.arrived += 1
        self._waiting.append(request)
        self._dispatch()

    def _dispatch(self) -> None:
        """Requests wait in one queue for a prefill node and a place in a decode node's batch."""
        while self._waiting and self._idle:
            sink = min(self.decode, key=lambda node: self._active[node.name])
            if self._active[sink.name] >= self.scenario.batch:
                return
            journey = Journey(self, self._waiting.popleft(), self._idle.popleft(), sink)
            self._active[sink.name] += 1
            self._bytes[sink.name] += journey.request.tokens * self.scenario.token_bytes
            self.most_bytes = max(self.most_bytes, self._bytes[sink.name])
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            journey.start()

    def prefilled(self, source: Node) -> None:
        """A prefill node can take the next request."""
        self._idle.append(source)
        self._dispatch()

    def finished(self, journey: Journey) -> None:
        """A request has ended; its place in the batch is free."""
        self._active[journey.sink.name] -= 1
        self._bytes[journey.sink.name] -= journey.request.tokens * self.scenario.token_bytes
        self.running -= 1
        self.measured.append(journey.measured)
        self._dispatch()
