"""``kvd status``: the daemon at one moment, for people and for programs."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import typer

from kvd.cli import config as configuration
from kvd.cli.output import printable
from kvd.errors import Busy, ConfigError, DaemonLost, DaemonUnreachable
from kvd.host import SYSTEM_SOCKET, Host
from kvd.units import about
from kvd_client import Client
from kvd_client.protocol import Status
from kvd_client.statuses import (
    DeviceStatus,
    LearntStatus,
    MemoryStatus,
    PeerStatus,
    ProfileStatus,
    RecordingStatus,
    TransferStatus,
)

EXIT_OK, EXIT_DEGRADED = 0, 1
BAR = 20
MAX_TRANSFERS = 50
_REQUESTS = "requests_failed_"
MIN_WIDTH = 74
NARROWEST = 8
FINGERPRINT = 12
"""Digits of a fingerprint that are shown; --json has all."""

PATHS = {"proactive": "proactive", "on_demand": "on-demand", "speculative": "speculative", "metadata": "metadata"}
"""The keys of counts by path, and what people call them."""


def status(socket: str | None, config: Path | None, *, as_json: bool, watch_s: float | None) -> int:
    """Ask the daemon and write what it says; 0 if it is healthy, 1 if degraded. ``watch_s``: again and again over one
    connection, until it is interrupted; while a daemon that has answered is away, it says so and goes on.

    Raises :class:`~kvd.errors.DaemonUnreachable` with the socket and the way to start a daemon there.
    """
    path = find_socket(socket, config)
    terminal = sys.stdout.isatty()
    answered = False
    with Client(path, name="kvd status") as client:
        while True:
            try:
                found = client.status()
            except (DaemonUnreachable, DaemonLost, Busy) as error:
                if not answered or watch_s is None:
                    raise
                text = to_line({"error": error.code, "message": error.message}) if as_json else printable(error.message)
            else:
                answered = True
                if as_json:
                    text = to_json(found)
                else:
                    width = shutil.get_terminal_size((80, 24)).columns if terminal else 80
                    text = "\n".join(map(printable, render(found, width=max(width, MIN_WIDTH))))
                if watch_s is None:
                    typer.echo(text)
                    return EXIT_OK if found.health == "ok" else EXIT_DEGRADED
            typer.echo(f"\x1b[H\x1b[2J{text}" if terminal and not as_json else text)
            time.sleep(watch_s)


def find_socket(socket: str | None, config: Path | None) -> str:
    """The socket to ask: the option's, ``$KVD_SOCKET``'s, or the one that ``kvd serve`` would use here."""
    if socket is not None:
        return socket
    if config is None and (named := os.environ.get("KVD_SOCKET")):
        return named
    host = Host.read()
    try:
        found = configuration.read(config)[0].api.socket
    except ConfigError:
        if config is not None:
            raise
        found = host.default_socket  # a user need not be allowed to read the system's file
    if found == host.default_socket and not os.path.exists(found) and os.path.exists(SYSTEM_SOCKET):
        return SYSTEM_SOCKET
    return found


def to_json(found: Status) -> str:
    """One line of JSON with the fields of :class:`~kvd_client.protocol.Status`."""
    tree = msgspec.to_builtins(found)
    del tree["type"], tree["id"]
    return to_line(tree)


def to_line(tree: Mapping[str, object]) -> str:
    """One line of JSON."""
    return msgspec.json.encode(tree).decode()


def render(found: Status, *, width: int = 80) -> Iterator[str]:
    """Lines of at most ``width`` columns, as long as no single name exceeds its column."""
    state = "draining" if found.draining else found.health
    yield f"{found.node}  {state}  up {duration(found.uptime_s)}  kvd {found.version}  pid {found.pid}"
    for reason in found.reasons:
        yield f"  ! {reason}"
    yield f"  boot     {found.boot}"
    yield f"  listen   {found.listen}"
    yield f"  socket   {found.socket}  ({found.clients} client{'s' * (found.clients != 1)})"
    security = f" ({found.security})" if found.security else ""
    yield f"  fabric   {found.fabric}{security}, kernels {found.kernels}"
    if found.device:
        yield f"  device   {found.device}"
    if damaged := found.counters.get("checksum_errors"):
        yield f"  damaged  {damaged} frames arrived otherwise than they were sent, and were refused"
    yield from _field("memory", _memory(found.memory), width)
    yield from _field("sent", _by_path(found.counters, "bytes_sent_"), width)
    yield from _field("tensors", _moved(found.counters), width)
    yield from _field("failed", _failed(found.counters), width)
    yield ""
    yield from _peers(found.peers, width)
    yield ""
    yield from _transfers(found.transfers, width)
    if found.devices:
        yield ""
        yield from _devices(found.devices, width)
    if found.profiles:
        yield ""
        yield from _profiles(found.profiles, width)
    if found.recordings:
        yield ""
        yield from _recordings(found.recordings, width)
    if found.learnt:
        yield ""
        yield from _learnt(found.learnt, width)


def _field(name: str, items: Sequence[str], width: int) -> Iterator[str]:
    for at, line in enumerate(filled(items, width - 11)):
        yield f"  {'' if at else name:7}  {line}"


def _memory(memory: MemoryStatus) -> list[str]:
    return [
        f"{about(memory.in_use)} in use by {memory.leases} lease{'s' * (memory.leases != 1)}",
        f"{about(memory.registered)} registered of {about(memory.limit)}",
        "huge pages" if memory.huge_pages else "small pages",
    ]


def _failed(counters: Mapping[str, int]) -> list[str]:
    """What did not work since the start: transfers and requests of processes by code, dials, connections refused."""
    ended: Counter[str] = Counter()
    for name, count in counters.items():
        for prefix in ("transfers_ended_source_", "transfers_ended_sink_"):
            if name.startswith(prefix) and not name.endswith("_OK"):
                ended[name.removeprefix(prefix)] += count
    asked = {name.removeprefix(_REQUESTS): count for name, count in counters.items() if name.startswith(_REQUESTS)}
    items = [f"{code} {count}" for code, count in sorted(ended.items())]
    items += [f"requests {code} {count}" for code, count in sorted(asked.items())]
    for name, what in (("dials_failed", "dials"), ("connections_refused", "strangers")):
        if count := counters.get(name, 0):
            items.append(f"{what} {count}")
    return items


def _peers(peers: Sequence[PeerStatus], width: int) -> Iterator[str]:
    if not peers:
        yield "no peers"
        return
    rows = [("PEER", "STATE", "FABRIC", "ADDRESS", "SENT", "RECEIVED")]
    for peer in peers:
        traffic = about(peer.bytes_sent), about(peer.bytes_received)
        state = f"{peer.state} {duration(peer.down_s)}" if peer.down_s else peer.state
        rows.append((peer.node, state, peer.fabric or "-", peer.address, *traffic))
    table = columns(rows, right=(4, 5), give=(0, 3), width=width)
    yield table[0]
    for peer, line in zip(peers, table[1:], strict=True):
        yield line
        yield from (clip(f"  ! {text}", width) for text in (peer.error, peer.trouble) if text)


def _transfers(transfers: Sequence[TransferStatus], width: int) -> Iterator[str]:
    if not transfers:
        yield "no transfers"
        return
    rows = [("REQUEST", "ROLE", "PEER", "STATE", "PROGRESS", "SIZE", "AGE")]
    for part in transfers[:MAX_TRANSFERS]:
        request = part.request if part.ranks == 1 else f"{part.request}[{part.rank}/{part.ranks}]"
        rows.append(
            (
                request,
                part.role,
                part.peer or "-",
                part.state,
                bar(part.bytes_done, part.bytes_total, BAR if width >= 100 else BAR // 2),
                about(part.bytes_total),
                duration(part.age_s),
            )
        )
    table = columns(rows, right=(5, 6), give=(0, 2, 3), width=width)
    yield table[0]
    for part, line in zip(transfers, table[1:], strict=False):
        yield line
        if part.mode not in ("", "full"):
            yield from (clip(f"  {text}", width) for text in _selective(part, width - 2))
    if len(transfers) > MAX_TRANSFERS:
        yield f"and {len(transfers) - MAX_TRANSFERS} more; --json lists all"


def _selective(part: TransferStatus, width: int) -> Iterator[str]:
    """What a selective transfer was to push, and what really went which way."""
    items = _by_path(part.paths, "")
    if part.role == "source":
        items.insert(0, f"budget {about(part.budget_bytes)}" if part.budget_bytes else "no fixed budget")
    for name, unit in (("fetches", "fetch"), ("windows", "idle window")):
        if count := part.paths.get(name, 0):
            items.append(f"{count} {unit}{('es' if name == 'fetches' else 's') * (count != 1)}")
    if count := part.paths.get("ranked", 0):
        items.append(f"{count} ranking{'s' * (count != 1)} by the prompt")
    how = part.mode if part.mask == "token" else f"{part.mode} by {part.mask}"
    return filled([f"{how}: {items[0]}", *items[1:]] if items else [how], width)


def _by_path(counts: Mapping[str, int], prefix: str) -> list[str]:
    """``proactive 1.5 GiB``, ``on-demand 12 MiB`` …: the bytes that are not 0."""
    named = ((name, counts.get(f"{prefix}{path}", 0)) for path, name in PATHS.items())
    return [f"{name} {about(count)}" for name, count in named if count]


def _moved(counters: Mapping[str, int]) -> list[str]:
    """What tensors took that lie in a layout of their own at either end."""
    requests = counters.get("tensor_requests", 0)
    if not requests:
        return []
    items = [f"{requests} requests", about(counters.get("tensor_bytes", 0))]
    if regroup_us := counters.get("regroup_us", 0):
        items.append(f"regrouped in {duration(regroup_us / 1e6)}")
    return items


def filled(items: Sequence[str], width: int) -> Iterator[str]:
    """The items with commas between them, as lines of at most ``width`` columns unless one item is longer."""
    line = ""
    for item in items:
        if line and len(line) + len(item) + 3 > width:
            yield f"{line},"
            line = ""
        line = f"{line}, {item}" if line else item
    if line:
        yield line


def _profiles(profiles: Sequence[ProfileStatus], width: int) -> Iterator[str]:
    rows = [("PROFILE", "SELECTOR", "PROMPT TOKENS", "GROUPS", "SHA256")]
    for profile in profiles:
        low, high = min(low for low, _ in profile.groups), max(high for _, high in profile.groups)
        name = _model(profile.model, profile.revision)
        row = (name, profile.selector, f"{low}-{high - 1}", str(len(profile.groups)), profile.fingerprint[:FINGERPRINT])
        rows.append(row)
    yield from columns(rows, right=(3,), give=(0, 1), width=width)


def _recordings(recordings: Sequence[RecordingStatus], width: int) -> Iterator[str]:
    rows = [("RECORDED", "SELECTOR", "PROMPT TOKENS", "PROMPTS", "STEPS")]
    for one in recordings:
        name = _model(one.model, one.revision)
        rows.append((name, one.selector or "-", f"{one.low}-{one.high - 1}", str(one.prompts), str(one.steps)))
    yield from columns(rows, right=(3, 4), give=(0, 1), width=width)


def _learnt(learnt: Sequence[LearntStatus], width: int) -> Iterator[str]:
    rows = [("LEARNT", "SELECTOR", "PROMPT TOKENS", "REQUESTS", "OF PEERS", "LAST")]
    for one in learnt:
        name = _model(one.model, one.revision)
        counts = f"{one.requests:.0f}", f"{one.heard:.0f}", f"{duration(one.age_s)} ago"
        rows.append((name, one.selector or "-", f"{one.low}-{one.high - 1}", *counts))
    yield from columns(rows, right=(3, 4, 5), give=(0, 1), width=width)


def _devices(devices: Sequence[DeviceStatus], width: int) -> Iterator[str]:
    """One line for each device and channel, or for neighbouring channels that are equal."""
    rows = [("DEVICE", "BACKING", "CHANNEL", "USED", "FREE", "LARGEST", "LEASES")]
    for device in devices:
        first = True
        channels = enumerate(zip(device.used, device.largest_free, strict=True))
        for (used, largest), equal in itertools.groupby(channels, key=lambda item: item[1]):
            numbers = [number for number, _ in equal]
            span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
            sizes = (about(used), about(device.channel_bytes - used), about(largest))
            name, backing, leases = (device.name, device.backing, str(device.leases)) if first else ("", "", "")
            rows.append((name, backing, span, *sizes, leases))
            first = False
    yield from columns(rows, right=(3, 4, 5, 6), give=(0,), width=width)


def _model(model: str, revision: str) -> str:
    return f"{model} at {revision}" if revision else model


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int], give: Sequence[int], width: int) -> list[str]:
    """Rows as lines of aligned columns. Columns in ``right`` are right-aligned; where the lines would not fit, the
    widest of those in ``give`` are shortened, down to 8 characters each."""
    sizes = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    over = sum(sizes) + 2 * (len(sizes) - 1) - width
    while over > 0:
        widest = max(give, key=lambda i: sizes[i])
        if sizes[widest] <= NARROWEST:
            break
        sizes[widest] -= 1
        over -= 1
    lines = []
    for row in rows:
        cells = []
        for i, cell in enumerate(row):
            cell = clip(cell, sizes[i])
            cells.append(cell.rjust(sizes[i]) if i in right else cell.ljust(sizes[i]))
        lines.append("  ".join(cells).rstrip())
    return lines


def clip(text: str, width: int) -> str:
    """The text, or its beginning and an ellipsis, in at most ``width`` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"


def bar(done: int, total: int, width: int) -> str:
    """``[####......]  40%``; full only when all is done."""
    share = min(done / total, 1.0) if total > 0 else 1.0
    filled = int(share * width)
    return f"[{'#' * filled}{'.' * (width - filled)}] {int(share * 100):3d}%"


def duration(seconds: float) -> str:
    """``0.4s``, ``12s``, ``3m05s``, ``2h07m``, ``5d03h``."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    for large, small, unit, below in ((86400, 3600, "d", "h"), (3600, 60, "h", "m"), (60, 1, "m", "s")):
        if whole >= large:
            return f"{whole // large}{unit}{whole % large // small:02d}{below}"
    return f"{whole}s"
