"""One request on its way through the cluster: prefill, transfer, decode; and what was measured of it."""

from __future__ import annotations

import bisect
import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvd.blocks import block_bounds
from kvd.errors import KvdError
from kvd.importance.matrix import ALWAYS_LAYERS
from kvd.sim.node import Node, Part
from kvd.sim.workload import Request, wanted
from kvd.transfer import events as ev
from kvd.types import Role
from kvd_client.spec import MetadataSpec, TokenRange, part_layout

if TYPE_CHECKING:
    from kvd.sim.cluster import Cluster


@dataclasses.dataclass(slots=True)
class Measured:
    """Times in seconds from the request's arrival; 0 until known."""

    request: Request
    ttft_s: float = 0.0
    ttst_s: float = 0.0
    done_s: float = 0.0
    local_s: float = 0.0
    """When everything was at the sink."""
    queued_s: float = 0.0
    """How long it waited for a prefill node."""
    prefill_s: float = 0.0
    fetched: float = 0.0
    """Entries."""
    fetched_first: float = 0.0
    """Those of the first step."""
    selected_first: float = 0.0
    code: str = ""

    @property
    def tbt_s(self) -> float:
        """Mean time between tokens from the second on."""
        more = self.request.output - 2
        return (self.done_s - self.ttst_s) / more if more > 0 else 0.0


class Journey:
    """Drives one request. ``cluster`` is told when the prefill node and the decode slot are free again."""

    def __init__(self, cluster: Cluster, request: Request, source: Node, sink: Node) -> None:
        self.measured = Measured(request)
        self.request = request
        self.source, self.sink = source, sink
        self._cluster = cluster
        self._clock = cluster.clock
        scenario = cluster.scenario
        self._layers = scenario.shape.layers
        self._heads = scenario.shape.kv_heads
        self._wanted = wanted(scenario, cluster.known, request)
        blocks = min(self._wanted.shape[1], request.tokens)
        if blocks < self._wanted.shape[1]:
            self._wanted = self._wanted[:, :blocks]
        bounds = block_bounds(request.tokens, blocks)
        self._sizes = np.diff(bounds).astype(np.float64)
        self._edges: list[int] = bounds.tolist()
        self._here: npt.NDArray[np.float64] = np.zeros_like(self._wanted)
        """Share of each block's tokens that are at the sink."""
        self._missing = np.full(self._layers, request.tokens, np.int64)
        self._receiving = Part(arrived=self._arrived, ended=self._ended, metadata_arrived=self._look)
        layer_bytes = round(scenario.metadata * request.tokens * scenario.token_bytes / self._layers)
        travels = layer_bytes > 0 and scenario.mode != "full"
        self._metadata = (MetadataSpec(name="selection", layer_bytes=layer_bytes),) if travels else ()
        self._metadata_layers = self._layers if travels else 0
        self._source_transfer = self._sink_transfer = 0
        self._layer = 0
        self._fetched_layer = -1
        """Whose entries have been fetched in this step."""
        self._token = 1
        self._local = False
        self._waiting = False

    # --- prefill --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The prefill node's turn has come; the sink opens its side at the same time."""
        scenario, request, now = self._cluster.scenario, self.request, self._clock.now
        self.measured.queued_s = now - request.arrives_s
        fresh = max(1, round(request.tokens * (1 - scenario.prefix_hit)))
        held = request.tokens - fresh
        self.measured.prefill_s = took = fresh / scenario.prefill_rate
        layout = part_layout(scenario.spec, heads=self._heads, rows=1, capacity=request.tokens, metadata=self._metadata)
        self._source_transfer = self.source.open(
            Role.SOURCE, request.name, scenario.spec, layout, request.tokens, Part(), prefill_s=took
        )
        self._sink_transfer = self.sink.open(
            Role.SINK, request.name, scenario.spec, layout, request.tokens, self._receiving,
            peer=self.source.name, mode=scenario.mode,
        )  # fmt: skip
        for layer in range(self._layers):
            if held:
                self.source.feed(ev.LayerReady(self._source_transfer, layer, 0, 0, held))
            self._clock.after(took * (layer + 1) / self._layers, self._computed, layer, held)
        self._clock.after(took, self._first_token)

    def _computed(self, layer: int, held: int) -> None:
        if self._metadata:
            self.source.feed(ev.MetadataReady(self._source_transfer, layer))
        self.source.feed(ev.LayerReady(self._source_transfer, layer, 0, held, self.request.tokens))

    def _first_token(self) -> None:
        self.source.feed(ev.SourceFinished(self._source_transfer))
        self.measured.ttft_s = self._clock.now - self.request.arrives_s
        self._cluster.prefilled(self.source)
        self._step()

    # --- decode ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """A decode step begins; the first waits for the layers that decode needs whole."""
        if self.measured.code not in ("", "OK"):
            return
        if not self._may_begin():
            self._waiting = True
            return
        self._layer, self._fetched_layer = 0, -1
        if self._token > 1 and not self._local and self._receiving.wants_windows:
            windows = self._layers if self._cluster.scenario.speculative == "windows" else 1
            for layer in range(windows):
                self.sink.feed(ev.IdleWindow(self._sink_transfer, layer))
        self._attend(None)

    def _attend(self, error: KvdError | None) -> None:
        """From the current layer on: compute what needs no fetch, then fetch, and go on when the entries are there."""
        if error is not None:
            self._ended(error.code)
            return
        scenario = self._cluster.scenario
        begun = self._layer
        while self._layer < self._layers:
            if scenario.mode == "full" and self._missing[self._layer]:
                self._waiting = True  # without selection a layer is needed whole
                break
            if scenario.mode != "full" and self._entries_missing(self._layer) >= 0.5:
                break
            self._layer += 1
        computed = scenario.step_s * (self._layer - begun) / self._layers
        if self._layer == self._layers:
            self._clock.after(computed, self._next_token)
        elif not self._waiting:
            self._clock.after(computed, self._fetch)

    def _fetch(self) -> None:
        layer = self._layer
        entries = round(self._entries_missing(layer))
        # Fetched entries are kept: the next step finds this share of the block at hand.
        fresh = 1.0 if self._token == 1 else self._cluster.scenario.novelty
        self._here[layer] += fresh * self._wanted[layer] * (1.0 - self._here[layer])
        self._fetched_layer = layer
        if entries < 1:
            self._attend(None)  # what was missing has arrived while the layers before were computed
            return
        self.measured.fetched += entries
        if self._token == 1:
            self.measured.fetched_first += entries
        self.sink.fetch(self._sink_transfer, layer, entries, self._attend)

    def _entries_missing(self, layer: int) -> float:
        """How many entries this step wants of the layer and does not have, in all heads."""
        if layer < ALWAYS_LAYERS or self._local or layer == self._fetched_layer:
            return 0.0
        fresh = 1.0 if self._token == 1 else self._cluster.scenario.novelty
        return fresh * self._heads * float((self._wanted[layer] * (1.0 - self._here[layer])) @ self._sizes)

    def _next_token(self) -> None:
        self._token += 1
        now = self._clock.now - self.request.arrives_s
        if self._token == 2:
            self.measured.ttst_s = now
            self.measured.selected_first = float(self._heads * (self._wanted[ALWAYS_LAYERS:] * self._sizes).sum())
        left = self.request.output - self._token
        if left <= 0:
            self._finish()
        elif self._local:
            # Nothing of the transfer is left that could delay a step.
            self._clock.after(left * self._cluster.scenario.step_s, self._finish)
        else:
            self._step()

    def _finish(self) -> None:
        self.measured.done_s = self._clock.now - self.request.arrives_s
        self.measured.code = self.measured.code or "OK"
        self.sink.feed(ev.ReleaseRequested(self._sink_transfer))
        self.source.feed(ev.ReleaseRequested(self._source_transfer))
        self._cluster.finished(self)

    # --- what the daemons tell ------------------------------------------------------------------------------------

    def _arrived(self, layer: int, ranges: tuple[TokenRange, ...]) -> None:
        here, bounds, sizes = self._here[layer], self._edges, self._sizes
        for piece in ranges:
            self._missing[layer] -= piece.stop - piece.start
            block = bisect.bisect_right(bounds, piece.start) - 1
            at = piece.start
            while at < piece.stop:
                edge = min(bounds[block + 1], piece.stop)
                here[block] = min(1.0, here[block] + (edge - at) / sizes[block])
                at, block = edge, block + 1
        if self._missing[layer] == 0:
            self._here[layer] = 1.0
        self._look()

    def _look(self) -> None:
        if self._waiting and self._may_go_on():
            self._waiting = False
            self._clock.after(0.0, self._resume)

    def _may_begin(self) -> bool:
        """Whether what every step needs is there: the layers that are never selected from, and all metadata."""
        return self._receiving.metadata == self._metadata_layers and not self._missing[:ALWAYS_LAYERS].any()

    def _may_go_on(self) -> bool:
        if not self._may_begin():
            return False
        return self._cluster.scenario.mode != "full" or not self._missing[self._layer]

    def _resume(self) -> None:
        if self._layer:
            self._attend(None)
        else:
            self._step()

    def _ended(self, code: str) -> None:
        if self.measured.code:
            return  # the end that this request's own end brought about
        if code == "OK":
            self._local = True
            self.measured.local_s = self._clock.now - self.request.arrives_s
        else:
            self.measured.code = code
            self.source.feed(ev.ReleaseRequested(self._source_transfer))
            self.sink.feed(ev.ReleaseRequested(self._sink_transfer))
            self._cluster.finished(self)
