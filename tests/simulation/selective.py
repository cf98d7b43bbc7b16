"""How a node carries out the instructions of selective transfer, and the rules that are checked on the way."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import kvd_kernels
import numpy as np

from kvd.errors import FabricError, InvalidArgument, KvdError, LeaseExpired
from kvd.importance.matrix import ALWAYS_LAYERS
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer import serving
from kvd.transfer.gathering import fetch_entries, landing_descriptors
from kvd.transfer.part import SourcePart
from kvd.transfer.queue import SendQueue
from kvd.types import Path, Role
from kvd.wire import messages as wire
from kvd_client.spec import MASK_LOCAL

from . import checks
from .links import End, FetchAnswer, MetadataWrite, Record, Violation
from .memory import Bytes, every, some

if TYPE_CHECKING:
    from .node import Node


# --- at the source ----------------------------------------------------------------------------------------------------


def check_tokens(node: Node, record: Record, end: End, path: Path, layer: int, tokens: int) -> None:
    """What may not be written now, whatever its bytes are."""
    lease, part = record.lease, node.core.parts[record.transfer]
    assert isinstance(part, SourcePart)
    assert part.queue is not None
    policy = part.queue.policy
    if path is Path.SPECULATIVE:
        if end.serving:
            raise Violation(
                f"{node.name}: part {record.transfer} sends speculatively while {end.serving} fetches are served",
                record.request,
            )
        if part.mode != "speculative":
            raise Violation(f"{node.name}: {record.transfer} sends speculatively in mode {part.mode}", record.request)
        record.speculated += tokens
        # a block that is larger than its share goes in whole, and what follows waits for it
        allowed = part.queue.windows_used * policy.share * sum(record.lengths) + record.attempt.plan.grain - 1
        if not policy.adaptive and record.speculated > allowed + 1e-6:
            raise Violation(
                f"{node.name}: part {record.transfer} sends {record.speculated} tokens speculatively, and windows "
                f"allowed {allowed}",
                record.request,
            )
    elif policy.until_finish and part.finished and layer >= ALWAYS_LAYERS:
        raise Violation(
            f"{node.name}: part {record.transfer} pushes layer {layer} after the first token",
            record.request,
        )
    if some(lease.metadata_known > lease.metadata_sent):
        raise Violation(f"{node.name}: part {record.transfer} sends tokens before its metadata", record.request)


def rank(node: Node, event: ev.BlocksRanked) -> None:
    """A ranking changes the order of what is unsent, and nothing else: no token is lost or comes back, none changes its
    path, and nothing waits for it."""
    part = node.core.parts.get(event.transfer)
    queue = part.queue if isinstance(part, SourcePart) else None
    before = None if queue is None else (queue.pending_tokens, queue.path, unsent(queue))
    since = node.instructions
    node.feed(event)
    if node.instructions != since:
        raise Violation(f"{node.name}: a ranking of part {event.transfer} led to instructions")
    if queue is not None and before != (queue.pending_tokens, queue.path, unsent(queue)):
        raise Violation(f"{node.name}: a ranking of part {event.transfer} changed what is to be sent, not its order")


def unsent(queue: SendQueue) -> list[set[tuple[int, int, int]]]:
    """By path, every (layer, row, token) that has not been handed out."""
    found = []
    for work in (queue._proactive, queue._rest):
        pieces = [(layer, *piece) for layer, piece in work]
        if queue._out is not None:  # dropped tokens stay in their pieces, and restored ones may be in two
            pieces = [
                (layer, row, *gap)
                for layer, row, start, stop in pieces
                for gap in queue._out.gaps(layer, row, start, stop)
            ]
        tokens = {(layer, row, token) for layer, row, start, stop in pieces for token in range(start, stop)}
        if queue._out is None and sum(stop - start for _, _, start, stop in pieces) != len(tokens):
            raise Violation(f"a token is queued twice: {pieces}")
        found.append(tokens)
    if sum(map(len, found)) != queue.pending_tokens:
        raise Violation(f"{queue.pending_tokens} tokens are said to be pending, and {sum(map(len, found))} are")
    return found


def write_metadata(node: Node, instruction: do.WriteMetadata) -> None:
    record = node.live(instruction.transfer, "WriteMetadata")
    lease, layer = record.lease, instruction.layer
    end = checks.write(node, record, instruction, turn=lease.layout.metadata_stride)
    if instruction.nbytes != lease.layout.metadata_stride:
        raise Violation(f"{node.name}: {instruction} says the wrong number of bytes", record.request)
    if not lease.metadata_known[layer]:
        raise Violation(f"{node.name}: {instruction}, but this metadata was never announced", record.request)
    if lease.metadata_sent[layer]:
        raise Violation(f"{node.name}: part {record.transfer} sends metadata of layer {layer} twice", record.request)
    lease.metadata_sent[layer] = True
    if record.sink is not None:
        record.sink.metadata_sent[layer] = True
    node.begin(MetadataWrite(record, end, instruction.write, instruction.nbytes, layer))


def serve_fetch(node: Node, instruction: do.ServeFetch) -> None:
    """Gather a little later, as a task does, then write; the session or the part may be gone by then."""
    record, end = node.records.get(instruction.transfer), node.ends.get(instruction.session)
    if record is None or record.freed or record.bound != instruction.session:
        raise Violation(f"{node.name}: {instruction} for a part that is freed, or another's")
    if end is None:
        raise Violation(f"{node.name}: {instruction} on a session that is lost", record.request)
    end.serving += 1
    _drop(record, instruction.message)
    node.later(node.world.rng.choice((0.0, 0.0, 0.005, 0.1)), _gather, node, record, end, instruction)


def _drop(record: Record, message: wire.Fetch) -> None:
    """What the sink keeps of a fetch counts as sent, once, unless it was or the sink holds it."""
    lease, sink = record.lease, record.sink
    if not message.keep or sink is None:
        return
    if lease.layout.heads > 1 or record.attempt.plan.sink_placement is not None:
        raise Violation(f"part {record.transfer}: a fetch of single heads is to be kept", record.request)
    try:
        places, _ = fetch_entries(lease.layout, record.lengths, message.counts, message.index)
    except InvalidArgument as error:
        raise Violation(f"part {record.transfer}: a fetch that can't be served is: {error}", record.request) from error
    row, token = np.divmod(np.unique(places), lease.layout.capacity)
    new = ~lease.sent[message.layer, row, token] & ~sink.known[message.layer, row, token]
    row, token = row[new], token[new]
    lease.sent[message.layer, row, token] = sink.sent[message.layer, row, token] = True
    record.dropped[message.fetch] = message.layer, row * lease.layout.capacity + token


def _gather(node: Node, record: Record, end: End, instruction: do.ServeFetch) -> None:
    message, layout = instruction.message, record.lease.layout
    try:
        if record.freed:
            raise LeaseExpired("the lease has been released; nothing new may read or write it")
        if end.number not in node.ends:
            raise FabricError("the connection broke")
        entries, counts = fetch_entries(layout, record.lengths, message.counts, message.index)
    except KvdError as error:
        end.serving -= 1
        served = ev.FetchServed(record.transfer, instruction.session, message.fetch, instruction.sink, 0, error)
        record.served(message.fetch, error)
        node.feed(served)
        return
    start = layout.layer_offset(message.layer)
    staged = np.empty(len(entries) * layout.entry_bytes, np.uint8)
    kvd_kernels.gather(
        record.lease.memory[start : start + layout.layer_bytes], layout.entry_bytes, entries.astype(np.int64), staged
    )
    descriptors = landing_descriptors(
        counts, layout.entry_bytes, source=0, target=message.offset, stride=message.stride
    )
    number, node.next_fetch = -node.next_fetch, node.next_fetch + 1
    node.begin(FetchAnswer(record, end, number, len(staged), message.fetch, instruction.sink, staged, descriptors))


# --- at the sink ------------------------------------------------------------------------------------------------------


def fill_fetch(node: Node, instruction: do.FillFetch) -> None:
    record = node.records.get(instruction.transfer)
    if record is None or record.freed or record.code != "OK":
        raise Violation(f"{node.name}: {instruction} for a part that is not delivered, or freed")
    for row, length in enumerate(record.lengths):
        if not every(record.lease.mask[:, row, :length] == MASK_LOCAL):
            raise Violation(f"{node.name}: {instruction}, but row {row} is not all here", record.request)
    error: KvdError | None = None
    try:
        serving.fill_fetch(
            instruction.request,
            layout=record.lease.layout,
            lengths=record.lengths,
            lease=record.lease,  # type: ignore[arg-type]
        )
    except InvalidArgument as wrong:
        error = wrong
    _answer(node, record, instruction.request.fetch, error)


def keep_fetched(node: Node, instruction: do.KeepFetched) -> None:
    """At once, or a little later as a worker thread does; the part may be gone by then."""
    record = node.live(instruction.transfer, "KeepFetched")
    request = record.attempt.pending.get(instruction.fetch)
    if record.role is not Role.SINK or request is None or request.layer != instruction.layer:
        raise Violation(f"{node.name}: {instruction} for no fetch of part {record.transfer}", record.request)
    rng = random.Random(f"{node.world.seed} {record.transfer} {instruction.fetch}")  # so that seeds mean the same
    delay = rng.choice((0.0, 0.0, 0.02, 0.2))
    if not delay:
        _keep(node, record, instruction)
    else:
        node.later(delay, _keep, node, record, instruction)


def _keep(node: Node, record: Record, instruction: do.KeepFetched) -> None:
    if not record.freed:
        node.world.dirty.append(record.lease.slab)
        serving.keep_fetched(instruction, layout=record.lease.layout, lease=record.lease)  # type: ignore[arg-type]
    node.feed(ev.FetchKept(record.transfer, instruction.fetch))


def fetch_ended(node: Node, instruction: do.FetchEnded) -> None:
    record = node.records.get(instruction.transfer)
    if record is None or record.freed:
        raise Violation(
            f"{node.name}: fetch {instruction.fetch} of part {instruction.transfer} is answered, and the part is freed",
            record.request if record else "",
        )
    _answer(node, record, instruction.fetch, instruction.error)


def _answer(node: Node, record: Record, fetch: int, error: KvdError | None) -> None:
    request = record.attempt.pending.pop(fetch, None)
    if request is None:
        raise Violation(
            f"{node.name}: part {record.transfer} hears of fetch {fetch}, which it never began or which was answered",
            record.request,
        )
    plan = record.attempt.plan
    undisturbed = record.attempt.as_ == "sink" and not plan.rival and not plan.disturbed
    plan.answers[error.code if error else "OK"] += 1
    if error is None:
        wrong = _wrong_landing(record, request)
        if wrong:
            raise Violation(f"{node.name}: part {record.transfer}, fetch {fetch}: {wrong}", record.request)
    elif undisturbed and error.code not in ("INVALID_ARGUMENT", "LEASE_EXPIRED"):
        raise Violation(f"{node.name}: nothing disturbed {plan.request}, and a fetch ended with {error}", plan.request)


def _wrong_landing(record: Record, request: ev.FetchRequested) -> str:
    """How the landing rows differ from the source's entries; empty if they do not."""
    lease, layout = record.lease, record.lease.layout
    size = layout.entry_bytes
    tokens = iter(np.frombuffer(request.index, np.int32).tolist())
    for group, count in enumerate(np.frombuffer(request.counts, np.int32).tolist()):
        row, head = divmod(group, layout.heads)
        for place in range(count):
            token = next(tokens)
            if not 0 <= token < record.lengths[row]:
                return f"token {token} of row {row} does not exist, and still it was fetched"
            at = np.s_[request.layer, row, token, head * size : (head + 1) * size]
            expected: list[Bytes] = [lease.expected[at]]
            if lease.known[request.layer, row, token] and record.source is not None:
                expected.append(record.source.lease.expected[at])  # the sink held its own
            start = request.offset + group * request.stride + place * size
            landed = lease.memory[start : start + size]
            if not any(every(landed == one) for one in expected):
                return (
                    f"token {token}, row {row}, head {head}, layer {request.layer} landed as {landed.tolist()} "
                    f"instead of {expected[0].tolist()}"
                )
    return ""


def want_windows(node: Node, instruction: do.WantWindows) -> None:
    record = node.live(instruction.transfer, "WantWindows")
    if record.role is not Role.SINK or record.wants_windows == instruction.wanted:
        raise Violation(f"{node.name}: {instruction} again, or not for a sink", record.request)
    record.wants_windows = instruction.wanted
