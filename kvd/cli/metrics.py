"""``kvd metrics``: the daemon's numbers for Prometheus and its like, once or to whoever asks.

They come over the local API, as ``kvd status`` does: the daemon listens to nobody else for them, and a process that
scrapers reach holds no key and no memory of the pool. Units are in the names (seconds, bytes); ``_total`` never falls
while the daemon's boot id is the same. Labels are node ids, codes, roles, paths and devices, all bounded.
"""

from __future__ import annotations

import contextlib
import errno
import socket as sockets
import socketserver
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import typer

from kvd.addresses import split_address
from kvd.cli.status import find_socket
from kvd.errors import AddressInUse, Busy, ConfigError, DaemonLost, DaemonUnreachable, KvdError
from kvd.notify import Notifier
from kvd_client import Client
from kvd_client.protocol import Status

TYPE = "text/plain; version=0.0.4; charset=utf-8"
RUNNING = ("waiting", "connecting", "opening", "running")
"""States of a transfer that has not ended."""
REQUEST_S = 5.0
"""How long a scraper may take for its request."""

Labels = Mapping[str, str]
Sample = tuple[Labels, float]


def metrics(socket: str | None, config: Path | None, *, listen: str | None) -> int:
    """Write the daemon's metrics, or serve them over HTTP at ``listen`` until interrupted; 0.

    Raises :class:`DaemonUnreachable` without ``listen``; :class:`ConfigError` and :class:`AddressInUse` for an address
    that can't be had.
    """
    path = find_socket(socket, config)
    if listen is None:
        with Client(path, name="kvd metrics") as client:
            typer.echo(text_of(client.status()), nl=False)
        return 0
    with Client(path, name="kvd metrics") as client, server(listen, client) as found:
        typer.echo(f"metrics at http://{listen}/metrics", err=True)
        Notifier.from_environment().ready()
        found.serve_forever()
    return 0


def text_of(status: Status | None) -> str:
    """The exposition format's text; ``None``: no daemon answers."""
    lines: list[str] = []
    for name, kind, what, samples in _families(status):
        found = list(samples)
        if found:
            lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_labels(labels)} {_number(value)}" for labels, value in found]
    return "\n".join(lines) + "\n"


def server(listen: str, client: Client) -> ThreadingHTTPServer:
    """An HTTP server that asks ``client`` for every request to ``/metrics``. The caller serves and closes it."""
    try:
        host, port = split_address(listen)
    except ValueError as error:
        raise ConfigError(f"--listen: {error}") from None
    asking = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_S
        server_version, sys_version = "kvd", ""

        def do_GET(self) -> None:
            if self.path.split("?")[0] != "/metrics":
                self.send_error(404, "only /metrics is here")
                return
            found: Status | None = None
            with asking, contextlib.suppress(DaemonUnreachable, DaemonLost, Busy):
                found = client.status()
            body = text_of(found).encode()
            self.send_response(200)
            self.send_header("Content-Type", TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A line for each scrape helps nobody."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def server_bind(self) -> None:
            socketserver.TCPServer.server_bind(self)  # HTTPServer's own asks a name server who this host is
            self.server_name, self.server_port = host, port

        def handle_error(self, request: object, client_address: object) -> None:
            """A scraper that leaves in the middle is no news."""

    if ":" in host:
        Server.address_family = sockets.AF_INET6
    try:
        return Server((host, port), Handler)
    except OSError as error:
        kind: type[KvdError] = AddressInUse if error.errno == errno.EADDRINUSE else ConfigError
        raise kind(f"--listen: can't listen on {listen}: {(error.strerror or str(error)).lower()}") from None


def _families(status: Status | None) -> Iterator[tuple[str, str, str, Iterable[Sample]]]:
    """Name, type, help, samples."""
    yield "kvd_up", "gauge", "Whether the daemon answers.", [({}, float(status is not None))]
    if status is None:
        return
    info = {"node": status.node, "version": status.version, "fabric": status.fabric, "kernels": status.kernels}
    yield "kvd_info", "gauge", "What runs.", [({**info, "security": status.security}, 1.0)]
    yield "kvd_healthy", "gauge", "1: ok, 0: degraded; kvd status says why.", [({}, float(status.health == "ok"))]
    yield "kvd_draining", "gauge", "Whether new transfers are refused.", [({}, float(status.draining))]
    yield "kvd_uptime_seconds", "gauge", "Since the start.", [({}, status.uptime_s)]
    yield "kvd_clients", "gauge", "Processes that are connected.", [({}, status.clients)]
    memory = status.memory
    yield "kvd_memory_limit_bytes", "gauge", "Most that the pool lends.", [({}, memory.limit)]
    yield "kvd_memory_registered_bytes", "gauge", "What the pool has of the system.", [({}, memory.registered)]
    yield "kvd_memory_lent_bytes", "gauge", "What leases hold of the pool.", [({}, memory.in_use)]
    yield "kvd_memory_leases", "gauge", "Leases of the pool.", [({}, memory.leases)]
    yield from _peers(status)
    yield from _transfers(status)
    yield from _devices(status)


def _peers(status: Status) -> Iterator[tuple[str, str, str, Iterable[Sample]]]:
    peers = [({"peer": peer.node}, peer) for peer in status.peers]
    connected = [(labels, float(peer.state == "connected")) for labels, peer in peers]
    yield "kvd_peer_connected", "gauge", "Whether there is a session.", connected
    down = [(labels, peer.down_s) for labels, peer in peers]
    yield "kvd_peer_down_seconds", "gauge", "Since it was lost or first not reached; 0: nothing is wrong.", down
    sent = [(labels, float(peer.bytes_sent)) for labels, peer in peers]
    yield "kvd_peer_sent_bytes_total", "counter", "Payload sent to it.", sent
    received = [(labels, float(peer.bytes_received)) for labels, peer in peers]
    yield "kvd_peer_received_bytes_total", "counter", "Payload received of it.", received


def _transfers(status: Status) -> Iterator[tuple[str, str, str, Iterable[Sample]]]:
    running = Counter(part.role for part in status.transfers if part.state in RUNNING)
    roles = [{"role": role} for role in ("source", "sink")]
    live = [(role, float(running[role["role"]])) for role in roles]
    yield "kvd_transfers_running", "gauge", "Parts of transfers that have not ended.", live
    ages = [
        (role, max((part.age_s for part in status.transfers if part.role == role["role"]), default=0.0))
        for role in roles
    ]
    yield "kvd_transfers_oldest_seconds", "gauge", "Age of the oldest part that holds memory.", ages
    counters = status.counters
    opened = [(role, float(counters.get(f"transfers_opened_{role['role']}", 0))) for role in roles]
    yield "kvd_transfers_opened_total", "counter", "Parts of transfers that were opened.", opened
    ended = [
        ({"role": role["role"], "code": name.removeprefix(prefix)}, float(count))
        for role in roles
        for prefix in [f"transfers_ended_{role['role']}_"]
        for name, count in sorted(counters.items())
        if name.startswith(prefix)
    ]
    yield "kvd_transfers_ended_total", "counter", "By the code with which they ended; OK: delivered.", ended
    yield "kvd_sent_bytes_total", "counter", "Bytes of KV caches written.", [({}, float(counters.get("bytes_sent", 0)))]
    arrived: list[Sample] = [({}, float(counters.get("bytes_received", 0)))]
    yield "kvd_received_bytes_total", "counter", "Bytes of KV caches that arrived and were marked.", arrived
    paths = [
        ({"path": name.removeprefix("bytes_sent_")}, float(count))
        for name, count in sorted(counters.items())
        if name.startswith("bytes_sent_")
    ]
    yield "kvd_sent_by_path_bytes_total", "counter", "The same by what made them go.", paths
    regrouped: list[Sample] = [({}, counters["regroup_us"] / 1e6)] if "regroup_us" in counters else []
    yield "kvd_regroup_seconds_total", "counter", "Time that regrouping for device layouts took.", regrouped
    failed = [
        ({"code": name.removeprefix("requests_failed_")}, float(count))
        for name, count in sorted(counters.items())
        if name.startswith("requests_failed_")
    ]
    yield "kvd_requests_failed_total", "counter", "Requests of local processes that failed, by code.", failed
    shown = ("transfers_", "bytes_", "regroup_us", "requests_failed_")
    for name, count in sorted(counters.items()):
        if not name.startswith(shown):
            yield f"kvd_{name}_total", "counter", f"The daemon's counter {name}.", [({}, float(count))]


def _devices(status: Status) -> Iterator[tuple[str, str, str, Iterable[Sample]]]:
    channels = [
        ({"device": device.name, "channel": str(number)}, device, number)
        for device in status.devices
        for number in range(len(device.used))
    ]
    size = [({"device": device.name}, float(device.channel_bytes)) for device in status.devices]
    yield "kvd_device_channel_bytes", "gauge", "Size of each channel.", size
    used = [(labels, float(device.used[number])) for labels, device, number in channels]
    yield "kvd_device_used_bytes", "gauge", "What is taken of a channel.", used
    largest = [(labels, float(device.largest_free[number])) for labels, device, number in channels]
    yield "kvd_device_largest_free_bytes", "gauge", "Largest free extent of a channel.", largest
    common = [({"device": device.name}, float(device.largest_common)) for device in status.devices]
    yield "kvd_device_largest_common_bytes", "gauge", "Largest extent free at one place in all channels.", common
    leases = [({"device": device.name}, float(device.leases)) for device in status.devices]
    yield "kvd_device_leases", "gauge", "Tensors and caches on the device.", leases


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    escaped = (
        (name, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")) for name, value in labels.items()
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(round(value, 6))
