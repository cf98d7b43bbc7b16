"""How a node carries out the instructions of tensors in a layout of their own, and the rules checked on the way.

Which byte goes where is the business of :mod:`kvd.layout`; here a sink's tensors are as its lease has them, and what is
modelled is time and loss: regrouping takes a while, staging memory can be taken away, reads and writes can be too late.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvd.errors import FabricError, KvdError, RemoteAccessError
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.delivery import BATCHES
from kvd.transfer.part import SourcePart
from kvd.types import Path
from kvd.wire.messages import LayerRanges, Staged, TensorsArrived
from kvd_client.layouts import UNITS, Placement, Target
from kvd_client.spec import MASK_LOCAL, PartLayout, TokenRange

from . import checks, selective
from .links import End, Record, Violation, Write
from .memory import Bytes

if TYPE_CHECKING:
    from .node import Node

Layers = tuple[tuple[int, tuple[TokenRange, ...]], ...]


def draw_placement(rng: random.Random, entry_bytes: int) -> Placement:
    """Blocks of a few tokens, whose entries are opaque."""
    block = rng.choice((1, 2, 3, 5))
    order = f'order = "l || B | s h d"\naxes = {{ t = "B:* s:{block}" }}\nname = "sim"\ntable = "B"\n'
    codec = f"raw:{entry_bytes}"
    return Placement(layout=f'{order}codec = "{codec}"\n', block_tokens=block, tensors=1, dtype=codec)


def target_of(placement: Placement, unit: str, pull: bool, layout: PartLayout) -> Target:
    blocks = layout.rows * -(-layout.capacity // placement.block_tokens)
    size = blocks * placement.block_tokens * layout.token_bytes
    bases = (np.arange(layout.layers) * size).astype("<i8").tobytes()
    return Target(placement=placement, channels=1, alignment=1, blocks=blocks, bases=bases, unit=unit, pull=pull)


def draw_unit(rng: random.Random, mode: str) -> str:
    return rng.choice(("", *UNITS) if mode == "full" else ("", "chunk"))


@dataclasses.dataclass(eq=False)
class Batch(Write):
    """Tokens of some layers: regrouped into staging memory, written in two halves, then their masks, then the word."""

    layers: Layers
    path: Path
    token: bytes
    pulled: bool
    staged: dict[tuple[int, TokenRange], Bytes] = dataclasses.field(default_factory=dict, init=False)

    def regroup(self) -> None:
        lease = self.record.lease
        for layer, ranges in self.layers:
            for r in ranges:
                self.staged[layer, r] = lease.data[layer, r.row, r.start : r.stop].copy()

    def stages(self) -> list[Callable[[], None]]:
        return [lambda: self._place(0), lambda: self._place(1), self.place_masks, self.notify]

    def _place(self, half: int) -> None:
        lease = self._lease()
        if lease is not None:
            for (layer, r), values in list(self.staged.items())[half::2]:
                lease.data[layer, r.row, r.start : r.stop] = values

    def place_masks(self) -> None:
        lease = self._lease()
        if lease is not None:
            for layer, ranges in self.layers:
                for r in ranges:
                    lease.mask[layer, r.row, r.start : r.stop] = MASK_LOCAL

    def news(self, number: ev.SessionId) -> ev.Event:
        layers = [LayerRanges(layer, list(ranges)) for layer, ranges in self.layers]
        return ev.TokensArrived(number, TensorsArrived(self.record.sink_transfer, layers, self.path.value))


def write_tensors(node: Node, instruction: do.WriteTensors) -> None:
    record = node.live(instruction.transfer, "WriteTensors")
    end = _check(node, record, instruction)
    part = node.core.parts[record.transfer]
    assert isinstance(part, SourcePart)
    token = f"stage {node.name}/{node.life}/{instruction.write}".encode()
    batch = Batch(
        record, end, instruction.write, instruction.nbytes, instruction.layers, instruction.path, token, part.pulled
    )
    node.register(batch)
    node.later(node.world.rng.choice((0.0, 0.001, 0.05)), _regrouped, node, batch)


def _check(node: Node, record: Record, instruction: do.WriteTensors) -> End:
    """What holds for every batch, beside what holds for every write."""
    name, layout, part = node.name, record.lease.layout, node.core.parts[record.transfer]
    assert isinstance(part, SourcePart)
    assert part.queue is not None
    grain, unit = record.attempt.plan.grain, part.queue.unit
    turn = max(node.settings.chunk, grain * layout.token_bytes)
    if unit == "layer" and len(part.writes) > BATCHES:
        raise Violation(f"{name}: part {record.transfer} has {len(part.writes)} batches at once", record.request)
    end = checks.write(node, record, instruction, turn=turn if unit == "chunk" else 1 << 30)
    if unit == "chunk" and instruction.nbytes > turn:
        raise Violation(f"{name}: {instruction} exceeds a chunk", record.request)
    tokens = 0
    for layer, ranges in instruction.layers:
        selective.check_tokens(node, record, end, instruction.path, layer, sum(r.stop - r.start for r in ranges))
        for r in ranges:
            piece = np.s_[layer, r.row, r.start : r.stop]
            tokens += r.stop - r.start
            if r.start % grain or (r.stop % grain and r.stop != record.lengths[r.row]):
                raise Violation(f"{name}: part {record.transfer} sends {r}, no whole blocks of {grain}", record.request)
            checks.sent(node, record, layer, r, piece)
    if instruction.nbytes != tokens * layout.token_bytes:
        raise Violation(f"{name}: {instruction} says the wrong number of bytes", record.request)
    if unit == "whole" and {layer for layer, _ in instruction.layers} != set(range(layout.layers)):
        raise Violation(f"{name}: part {record.transfer} sends a part of the whole", record.request)
    return end


def _regrouped(node: Node, batch: Batch) -> None:
    if batch.dead or batch.end.session.broken:
        return  # cancelled, or about to be
    batch.regroup()
    node.feed(ev.Regrouped(batch.record.transfer, batch.write))
    if batch.dead:
        return
    if batch.pulled:
        node.stages[batch.token] = batch
        node.feed(ev.Staged(batch.record.transfer, batch.write, batch.token, len(batch.staged)))
    else:
        node.schedule(batch)


def end_stage(node: Node, instruction: do.EndStage) -> None:
    for batch in list(node.stages.values()):
        if batch.write == instruction.write:
            node.later(node.world.delay(), node.complete, batch, instruction.error)
            return
    raise Violation(f"{node.name}: {instruction}, but nothing is staged so")


def pull_tensors(node: Node, instruction: do.PullTensors) -> None:
    record = node.live(instruction.transfer, "PullTensors")
    if instruction.session not in node.ends:
        raise Violation(f"{node.name}: PullTensors on a session that is lost", record.request)
    record.operations.add(-1 - instruction.message.stage)  # its memory stays until the read has ended
    node.later(node.world.delay(), _read, node, record, node.ends[instruction.session], instruction.message, 0)


def _read(node: Node, record: Record, end: End, message: Staged, half: int) -> None:
    """Half of a stage, if it is still there; then the masks."""
    source = end.peer
    batch = source.node.stages.get(message.grant) if source.node.life == source.life else None
    error: KvdError | None = None
    if end.session.broken:
        error = FabricError("the connection broke")
    elif batch is None:
        error = RemoteAccessError("the far side refused a read: the memory is not granted any more")
    if error is not None or batch is None:
        _read_ended(node, record, end, message, error)
        return
    for (layer, r), values in list(batch.staged.items())[half::2]:
        record.lease.data[layer, r.row, r.start : r.stop] = values
    node.world.dirty.append(record.lease.slab)
    if half == 0:
        node.later(node.world.delay(), _read, node, record, end, message, 1)
        return
    for one in message.layers:
        for r in one.ranges:
            record.lease.mask[one.layer, r.row, r.start : r.stop] = MASK_LOCAL
    _read_ended(node, record, end, message, None)


def _read_ended(node: Node, record: Record, end: End, message: Staged, error: KvdError | None) -> None:
    record.operations.discard(-1 - message.stage)
    if record.freed and not record.operations:
        node.give_back(record)
    node.feed(ev.PullCompleted(record.transfer, end.number, message, error))
