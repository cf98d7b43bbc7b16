"""What the processes do: requests with their sources and sinks, well-behaved or not."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np

from kvd.errors import Aborted, AlreadyExists, InvalidArgument, ShuttingDown
from kvd.transfer import events as ev
from kvd.transfer.handle import Handle
from kvd.types import Role
from kvd_client.spec import MASK_LOCAL, KVSpec, MetadataSpec, part_layout

from . import selective
from .decoding import Decode
from .links import Record, Violation
from .memory import Bytes, Lease
from .node import Node
from .plans import MISFITS, Plan
from .tensors import target_of

if TYPE_CHECKING:
    from .world import World


class Attempt:
    """One process's go at one rank of a request, in one role: open, ring, finish, wait for the end, release."""

    def __init__(self, world: World, plan: Plan, role: Role, rank: int, client: int, as_: str) -> None:
        self.world = world
        self.plan = plan
        self.role = role
        self.rank = rank
        self.client = client
        self.as_ = as_
        """``source``, ``sink``, ``misfit`` or ``rival``."""
        self.request = plan.request if role is Role.SOURCE else plan.sink_request
        name = plan.source if role is Role.SOURCE else plan.rival if as_ == "rival" else plan.sink
        self.node: Node = world.nodes[name]
        self.record: Record | None = None
        self.dead = False
        self.waits = 0
        self.pending: dict[int, ev.FetchRequested] = {}
        """Fetches that have not been answered."""
        self.decode: Decode | None = None

    # --- opening ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        world, plan, node = self.world, self.plan, self.node
        if self.dead:
            return
        if not node.up:
            world.disturb(plan, "node is down")
            return
        if self.role is Role.SINK and plan.way == "handle" and self.rank not in plan.handles:
            self.waits += 1
            if self.waits < 40:  # the router has no handle yet
                node.later(0.5, self.open)
            return
        event = self._event(node.next_transfer)
        try:
            node.core.check_open(event)
        except AlreadyExists:
            world.disturb(plan, "opened twice")
            return
        except ShuttingDown:
            world.disturb(plan, "draining")
            return
        lease = node.memory.take(event.layout, event.lengths, None)
        if lease is None:
            world.disturb(plan, "out of memory")
            return
        node.next_transfer += 1
        record = Record(event.transfer, self.role, self, lease, event.lengths, world.now + event.deadline_s)
        lease.owner = record
        lease.sink = self.role is Role.SINK
        self.record = node.records[event.transfer] = record
        content = np.frombuffer(world.rng.randbytes(lease.data.size), np.uint8).reshape(lease.data.shape)
        if self.role is Role.SOURCE:
            lease.expected[:] = content
            lease.metadata_expected[:] = self._metadata_content(lease)
            plan.handles[self.rank] = event.handle
        for r in event.held:  # the process's own bytes, which nobody may replace
            piece = np.s_[:, r.row, r.start : r.stop]
            lease.data[piece] = lease.expected[piece] = content[piece]
            lease.known[piece] = True
            lease.mask[piece] = MASK_LOCAL
        if self.role is Role.SINK:
            self.decode = Decode(self)
        node.feed(event)
        if self.role is Role.SOURCE:
            self._script_rings()

    def _metadata_content(self, lease: Lease) -> Bytes:
        rng, shape = self.world.rng, lease.metadata.shape
        return np.frombuffer(rng.randbytes(lease.metadata.size), np.uint8).reshape(shape)

    def _event(self, transfer: int) -> ev.PartOpened:
        plan, node, rng = self.plan, self.node, self.world.rng
        source = self.role is Role.SOURCE
        spec, lengths, ranks, head_start = plan.spec, plan.lengths, plan.ranks, self.rank * plan.heads
        capacity = plan.source_room if source else plan.sink_room
        held, metadata, mode = plan.held, plan.metadata, plan.source_mode if source else plan.sink_mode
        if self.as_ == "misfit":
            held = ()
            if plan.misfit in ("model", "revision", "dtype"):
                spec = KVSpec(**{**_fields(spec), plan.misfit: "another"})
            elif plan.misfit == "lengths":
                lengths = (lengths[0] + 1, *lengths[1:])
                capacity += 1
            elif plan.misfit == "ranks":
                ranks += 1
            elif plan.misfit == "metadata":
                metadata = metadata[1:] if metadata else (MetadataSpec(name="another", layer_bytes=8),)
            elif plan.misfit == "mode":
                mode = "fastest"
            else:
                head_start += 1
        if source:
            handle = str(Handle(node.name, node.boot, transfer, f"{rng.getrandbits(64):016x}"))
            peer = plan.sink if plan.way in ("announce", "both") else ""
        else:
            handle = plan.handles[self.rank] if plan.way == "handle" else ""
            peer = "" if plan.way == "announce" else plan.source
        layout = part_layout(
            spec, heads=plan.heads, rows=len(lengths), capacity=capacity, metadata=metadata,
            landing_entries=0 if source else plan.landing[0], landing_slots=0 if source else plan.landing[1],
        )  # fmt: skip
        target = None
        if not source and plan.sink_placement is not None:
            target = target_of(plan.sink_placement, plan.unit, plan.pull, layout)
        return ev.PartOpened(
            transfer=transfer, role=self.role, client=self.client, request=self.request, rank=self.rank, ranks=ranks,
            head_start=head_start, spec=spec, lengths=lengths, handle=handle, peer=peer,
            layout=layout, placement=plan.source_placement if source else None, target=target,
            held=() if source else held, deadline_s=plan.deadline_s, mode=mode,
            selector=plan.request if source else "", prefill_s=plan.prefill_s if source else 0.0,
        )  # fmt: skip

    # --- ringing ------------------------------------------------------------------------------------------------------

    def _script_rings(self) -> None:
        """Chunked prefill, layer by layer, with some rings twice, overlapping, late or in another order."""
        rng, plan = self.world.rng, self.plan
        longest = max(plan.lengths)
        step = rng.choice((longest, longest, max(1, longest // 2), 3, 1))
        rings: list[tuple[int, int | None, int, int]] = []
        for start in range(0, longest, step):
            for layer in range(plan.spec.layers):
                stop = min(start + step, longest)
                if rng.random() < 0.5:
                    rings.append((layer, None, start, stop))
                else:
                    rings += [
                        (layer, row, min(start, length), min(stop, length)) for row, length in enumerate(plan.lengths)
                    ]
                if rng.random() < 0.15:
                    rings.append((layer, None, rng.randint(0, start), stop))
        if rng.random() < 0.15:
            rng.shuffle(rings)
        now = 0.0
        for ring in rings:
            now += rng.choice((0.0, 0.01, 0.05))
            self.node.later(now, self._ring, *ring)
            if rng.random() < 0.1:
                self.node.later(now + rng.choice((0.0, 0.3, 5.0)), self._ring, *ring)
        if plan.metadata:
            for layer in range(plan.spec.layers):
                when = rng.choice((0.0, now, rng.uniform(0, now)))
                self.node.later(when, self._announce_metadata, layer)
                if rng.random() < 0.1:
                    self.node.later(when + rng.choice((0.0, 1.0)), self._announce_metadata, layer)
        self._script_rankings(now)
        self.node.later(now + rng.choice((0.0, 0.0, 0.2, 3.0)), self._finish)

    def _script_rankings(self, over: float) -> None:
        """What the prompt's last queries select, in time, late, twice, or of some layers only. Drawn apart, so that
        seeds mean the same with and without it."""
        rng, plan = random.Random(f"{self.world.seed} {self.request} {self.rank}"), self.plan
        if rng.random() < 0.4:
            return
        for layer in range(plan.spec.layers):
            for _ in range(rng.choice((0, 1, 1, 1, 2))):
                self.node.later(rng.choice((over, rng.uniform(0, over), over + 1.0)), self._rank, layer, rng)

    def _rank(self, layer: int, rng: random.Random) -> None:
        record = self.record
        assert record is not None
        if self.dead or record.released:
            return
        blocks = rng.choice((1, 3, max(record.lengths)))
        draw = (0.0, 0.2, 0.21, rng.random(), 1.0)
        shares = [[rng.choice(draw) for _ in range(blocks)] for _ in record.lengths]
        event = ev.BlocksRanked(record.transfer, layer, np.array(shares, np.float32), rng.choice((0.0, 2 / 3, 1.0)))
        selective.rank(self.node, event)

    def _announce_metadata(self, layer: int) -> None:
        record = self.record
        assert record is not None
        if self.dead or record.released:
            return
        record.lease.metadata[layer] = record.lease.metadata_expected[layer]
        record.lease.metadata_known[layer] = True
        self.node.feed(ev.MetadataReady(record.transfer, layer))

    def _ring(self, layer: int, row: int | None, start: int, stop: int) -> None:
        record = self.record
        assert record is not None
        if self.dead or record.released:
            return
        lease = record.lease
        for r in range(len(record.lengths)) if row is None else (row,):
            piece = np.s_[layer, r, start : min(stop, record.lengths[r])]
            lease.data[piece] = lease.expected[piece]
            lease.known[piece] = True
        self.node.feed(ev.LayerReady(record.transfer, layer, row, start, stop))

    def _finish(self) -> None:
        record = self.record
        assert record is not None
        if self.dead or record.released:
            return
        try:
            self.node.core.check_finish(record.transfer)
        except InvalidArgument as error:
            raise Violation(f"everything was rung, and still: {error}", self.plan.request) from None
        self.node.feed(ev.SourceFinished(record.transfer))

    # --- ending -------------------------------------------------------------------------------------------------------

    def on_progress(self) -> None:
        if self.decode is not None:
            self.decode.begin()

    def on_end(self, record: Record) -> None:
        self.plan.codes.setdefault(self.as_, []).append(record.code)
        if self.as_ == "misfit" and not self.plan.disturbed:
            wanted = MISFITS[self.plan.misfit]
            if record.code != wanted:
                raise Violation(
                    f"a sink that differs in {self.plan.misfit} ended with {record.code}", self.plan.request
                )
        self.node.later(self.world.rng.choice((0.0, 0.01, 0.2, 2.0)), self.release)

    def release(self, enough: bool = False) -> None:
        """``enough``: the decode is over and needs no more of the cache, which is no failure."""
        record = self.record
        if record is None or self.dead or record.released:
            return
        if record.code == "" and not enough:
            self.world.disturb(self.plan, "released early")
        record.released = True
        rng = self.world.rng
        if rng.random() < 0.1 and not enough:
            self.kill()
            return
        self.node.feed(ev.ReleaseRequested(record.transfer))
        if rng.random() < 0.3:
            self.node.later(rng.random(), self.node.feed, ev.ReleaseRequested(record.transfer))

    def on_freed(self, record: Record) -> None:
        """The daemon has forgotten the part: the process may open the request once more."""
        plan, world = self.plan, self.world
        if self.as_ == "misfit":
            world.start_attempt(plan, Role.SINK, self.rank, self.client, "sink", 0.1)
        elif record.code not in ("OK", "") and plan.retries:
            plan.retries -= 1
            world.start_attempt(plan, self.role, self.rank, world.new_client(), self.as_, world.rng.random())

    def ring_nonsense(self) -> None:
        """An idle window, or metadata, of a layer that there is not."""
        if self.record is None or self.dead or self.record.released:
            return
        event = ev.IdleWindow if self.role is Role.SINK else ev.MetadataReady
        ended = bool(self.record.code)
        self.node.feed(event(self.record.transfer, self.world.rng.choice((-1, self.plan.spec.layers))))
        if not ended and self.record.code != "INVALID_ARGUMENT":
            raise Violation(f"nonsense was rung and the part ended so: {self.record.code!r}", self.plan.request)

    def abort(self) -> None:
        if self.record is None or self.dead or self.record.released:
            return
        event = ev.AbortRequested(self.record.transfer, Aborted("the process gave it up", request=self.request))
        self.node.feed(event)
        self.node.later(self.world.rng.choice((0.0, 0.2)), self._abort_again, event)

    def _abort_again(self, event: ev.AbortRequested) -> None:
        self.node.feed(event)

    def kill(self) -> None:
        """The process dies; with it, all that it has open."""
        if self.dead:
            return
        for attempt in self.world.attempts:
            if attempt.client == self.client and attempt.node is self.node:
                attempt.dead = True
                if attempt.record is not None:
                    attempt.record.released = True
                if attempt.record is None or not attempt.record.code:
                    self.world.disturb(attempt.plan, "its process died")
        self.node.feed(ev.ClientLost(self.client))


def _fields(spec: KVSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__struct_fields__}
