"""Whether a configuration makes sense, in itself and on this host.

Each broken rule gives a :class:`Problem`: a sentence that says what is wrong and what to do. Errors keep the
daemon from starting; warnings don't.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

from kvd.addresses import is_loopback, is_wildcard, split_address
from kvd.config import MIN_ARENA, NODE_ID, Config, Npu
from kvd.errors import ConfigError
from kvd.host import Host
from kvd.importance.learning import HalfLife
from kvd.keys import read_keys
from kvd.memory.windows import PAGE, WINDOW, parse_noc
from kvd.units import about, format_size

MAX_SOCKET_PATH = 107
MIN_CHUNK = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    level: Literal["error", "warning"]
    key: str
    """Path of the key in the file, such as ``$.peers.listen``."""
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


def check(config: Config, host: Host | None = None, *, fabrics: Collection[str] = ()) -> list[Problem]:
    """All problems of a resolved configuration, errors first. ``fabrics``: the known names; empty: any."""
    host = host or Host.read()
    problems = [
        *_node(config),
        *_api(config, host),
        *_peers(config),
        *_security(config),
        *_memory(config, host),
        *_transfer(config),
        *_profile(config),
        *_fabric(config, fabrics),
        *_npu(config, host),
    ]
    return sorted(problems, key=lambda problem: problem.level)


def _error(key: str, message: str) -> Problem:
    return Problem("error", f"$.{key}", message)


def _warning(key: str, message: str) -> Problem:
    return Problem("warning", f"$.{key}", message)


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:100]}…"


def _node(config: Config) -> Iterator[Problem]:
    if not NODE_ID.fullmatch(config.node.id):
        yield _error("node.id", f'"{_shortened(config.node.id)}" must be 1 to 64 of the characters A-Z a-z 0-9 . _ -')


def _api(config: Config, host: Host) -> Iterator[Problem]:
    path = config.api.socket
    parent = os.path.dirname(path)
    if not os.path.isabs(path):
        yield _error("api.socket", f"{path} must be an absolute path")
    elif len(os.fsencode(path)) > MAX_SOCKET_PATH:
        yield _error(
            "api.socket",
            f"{_shortened(path)} has {len(os.fsencode(path))} bytes; Linux allows {MAX_SOCKET_PATH}, so name a "
            "shorter one",
        )
    elif not os.path.isdir(parent) and path != host.default_socket:
        yield _error(
            "api.socket",
            f"the directory {parent} doesn't exist; make it, or use RuntimeDirectory= of the unit",
        )
    if config.api.group:
        gid = host.group_id(config.api.group)
        if gid is None:
            yield _error(
                "api.group",
                f"there is no group {config.api.group}; make it with: groupadd --system {config.api.group}",
            )
        elif host.uid != 0 and gid not in host.groups:
            yield _error(
                "api.group",
                f"user {host.uid} isn't a member of {config.api.group} and can't give it the socket; add it "
                "to the group, or run as root",
            )


def _peers(config: Config) -> Iterator[Problem]:
    peers = config.peers
    listen = _address("peers.listen", peers.listen)
    advertise = _address("peers.advertise", peers.advertise) if peers.advertise else listen
    static = {node: _address(f"peers.static.{node}", address) for node, address in peers.static.items()}
    addresses = listen, *([advertise] if peers.advertise else []), *static.values()
    yield from (found for found in addresses if isinstance(found, Problem))
    remote = sorted(n for n, a in static.items() if not isinstance(a, Problem) and not is_loopback(a[0]))

    if isinstance(listen, tuple):
        if is_wildcard(listen[0]):
            yield _warning(
                "peers.listen",
                f"{peers.listen} listens on every network of this host; name the address that peers use",
            )
        if not peers.key_file and not is_loopback(listen[0]):
            yield _error(
                "peers.key_file",
                f"peers.listen is {peers.listen}, which other hosts can reach, so peers must prove a shared "
                "key; name its file here, or listen on 127.0.0.1",
            )
    if remote and not peers.key_file and isinstance(listen, tuple) and is_loopback(listen[0]):
        yield _error(
            "peers.key_file",
            f"peer {remote[0]} is on another host, where kvd asks for the shared key; name its file here",
        )
    if isinstance(advertise, tuple):
        key = "peers.advertise" if peers.advertise else "peers.listen"
        if peers.advertise and (is_wildcard(advertise[0]) or advertise[1] == 0):
            yield _error(key, f"{peers.advertise} can't be dialled; set this host's own address and port")
        elif is_loopback(advertise[0]) and remote:
            yield _error(
                key,
                f"peers would be told {advertise[0]}, where each of them finds itself, and {remote[0]} is on "
                "another host; set peers.advertise to an address that it can reach",
            )
    for node, address in static.items():
        if not NODE_ID.fullmatch(node):
            yield _error(f"peers.static.{node}", "a node id has 1 to 64 of the characters A-Z a-z 0-9 . _ -")
        if node == config.node.id:
            yield _error(f"peers.static.{node}", "this is the node's own id; list only the others, or set node.id")
        if isinstance(address, tuple) and (address[1] == 0 or is_wildcard(address[0])):
            yield _error(
                f"peers.static.{node}",
                f"{peers.static[node]} can't be dialled; give the peer's address and port",
            )
    if peers.heartbeat_s >= peers.timeout_s:
        yield _error(
            "peers.timeout_s",
            f"{peers.timeout_s:g} s is not above heartbeat_s ({peers.heartbeat_s:g} s), so healthy peers "
            "would count as lost; three heartbeats or more are sensible",
        )
    elif peers.timeout_s < 2 * peers.heartbeat_s:
        yield _warning("peers.timeout_s", "less than two heartbeats: one late packet loses a peer")
    if peers.key_file:
        try:
            read_keys(peers.key_file)
        except ConfigError as error:
            yield _error("peers.key_file", error.message)


def _security(config: Config) -> Iterator[Problem]:
    level = config.security.level
    if level == "plain":
        if not config.security.checksums and config.fabric.name != "verbs":
            yield _warning("security.checksums", "off: bytes that change on the way are not noticed")
        return
    if not config.peers.key_file:
        yield _error("security.level", f'"{level}" needs a shared key; name its file in peers.key_file')
    if config.fabric.name != "tcp":
        yield _error(
            "security.level",
            f'"{level}" is what the tcp fabric can do; set fabric.name to "tcp", or the level to "plain"',
        )


def _memory(config: Config, host: Host) -> Iterator[Problem]:
    memory = config.memory
    if memory.pool > host.memory:
        yield _error(
            "memory.pool",
            f"{format_size(memory.pool)} is more than the {about(host.memory)} that this host (or control "
            f"group) has; set at most {format_size(host.memory * 3 // 4 >> 20 << 20)}",
        )
    elif memory.pool > host.memory * 9 // 10:
        yield _warning(
            "memory.pool",
            f"{format_size(memory.pool)} leaves under a tenth of the host's {about(host.memory)} to all else",
        )
    if memory.arena < MIN_ARENA:
        yield _error("memory.arena", f"{format_size(memory.arena)} is less than {format_size(MIN_ARENA)}, the least")
    if memory.arena > memory.pool:
        yield _error(
            "memory.arena",
            f"{format_size(memory.arena)} is more than memory.pool, {format_size(memory.pool)}; lower it, or raise the "
            "pool",
        )
    if memory.client_limit > memory.pool:
        yield _warning("memory.client_limit", "more than memory.pool, so it limits nobody")
    if memory.huge_pages == "always" and host.huge_page_bytes < memory.pool:
        yield _error(
            "memory.huge_pages",
            f'"always" needs {format_size(memory.pool)} of huge pages and the system has set aside '
            f'{format_size(host.huge_page_bytes)}; raise vm.nr_hugepages, or use "auto"',
        )


def _transfer(config: Config) -> Iterator[Problem]:
    transfer = config.transfer
    if transfer.chunk < MIN_CHUNK:
        yield _error(
            "transfer.chunk", f"{format_size(transfer.chunk)} is less than {format_size(MIN_CHUNK)}, the least"
        )
    if transfer.chunk > transfer.window:
        yield _error(
            "transfer.chunk",
            f"{format_size(transfer.chunk)} is more than transfer.window, {format_size(transfer.window)}; lower it, or "
            "raise the window",
        )
    if transfer.rendezvous_s > transfer.deadline_s:
        yield _warning(
            "transfer.rendezvous_s",
            f"{transfer.rendezvous_s:g} s is longer than deadline_s ({transfer.deadline_s:g} s), which ends "
            "the wait first",
        )


def _profile(config: Config) -> Iterator[Problem]:
    profile = config.profile
    try:
        HalfLife.parse(profile.half_life)
    except ValueError as error:
        yield _error("profile.half_life", str(error))
    if profile.state and not os.path.isabs(profile.state):
        yield _error("profile.state", f"{profile.state} must be an absolute path")
    elif profile.learn and profile.state and os.path.exists(profile.state) and not os.path.isdir(profile.state):
        yield _error("profile.state", f"{profile.state} is no folder; name one, or leave it to StateDirectory=")
    elif profile.learn and profile.state:
        yield from _folder("profile.state", profile.state)
    if config.selective.profiles:
        yield from _folder("selective.profiles", config.selective.profiles)


def _folder(key: str, path: str) -> Iterator[Problem]:
    """A folder that the daemon writes to, and makes if need be; it does without if it can't."""
    found = os.path.abspath(path)
    while not os.path.exists(found):  # which says no where this user may not look
        found = os.path.dirname(found)
    if not os.path.isdir(found):
        yield _warning(key, f"{found} is no folder, so nothing is kept in {path}")
    elif not os.access(found, os.R_OK | os.W_OK | os.X_OK):
        yield _warning(key, f"user {os.geteuid()} may not write to {found}, so nothing is kept in {path}")


def _fabric(config: Config, fabrics: Collection[str]) -> Iterator[Problem]:
    name = config.fabric.name
    if fabrics and name != "auto" and name not in fabrics:
        yield _error("fabric.name", f'there is no fabric "{name}"; known are auto, {", ".join(sorted(fabrics))}')


def _npu(config: Config, host: Host) -> Iterator[Problem]:
    lent = int(config.memory.pool)
    for name, npu in config.npu.items():
        if not NODE_ID.fullmatch(name):
            yield _error(f"npu.{name}", "a device's name has 1 to 64 of the characters A-Z a-z 0-9 . _ -")
        if npu.channel_bytes < npu.alignment or npu.channel_bytes % npu.alignment:
            yield _error(
                f"npu.{name}.channel_bytes",
                f"{format_size(npu.channel_bytes)} is no multiple of alignment, {npu.alignment}",
            )
        if npu.backing == "tenstorrent":
            yield from _card(f"npu.{name}", npu)
        if npu.backing == "host":
            unused = [key for key in ("path", "origin", "noc") if getattr(npu, key)]
            if unused:
                yield _warning(f"npu.{name}.{unused[0]}", 'does nothing with backing = "host"')
            lent += npu.channels * int(npu.channel_bytes)
            if lent > host.memory:
                yield _error(
                    f"npu.{name}.channel_bytes",
                    f"{npu.channels} channels and memory.pool are together more than the {about(host.memory)} that "
                    "this host (or control group) has; take smaller ones",
                )

    yield from _overlaps(config.npu)


def _overlaps(npus: Mapping[str, Npu]) -> Iterator[Problem]:
    """Two devices that would give out the same bytes of a card."""
    cards = [(name, npu) for name, npu in npus.items() if npu.backing == "tenstorrent" and npu.path]
    for (one, first), (other, second) in itertools.combinations(cards, 2):
        shared = sorted({*first.noc} & {*second.noc})
        apart = (
            first.origin + first.channel_bytes <= second.origin or second.origin + second.channel_bytes <= first.origin
        )
        if shared and not apart and os.path.realpath(first.path) == os.path.realpath(second.path):
            yield _error(
                f"npu.{other}.origin",
                f"tile {shared[0]} of {second.path} is managed by {one} already, from {int(first.origin)} to "
                f"{first.origin + first.channel_bytes}; two devices would give out the same bytes",
            )


def _card(key: str, npu: Npu) -> Iterator[Problem]:
    """What only a card needs; whether it is there is found out when the daemon starts."""
    if not os.path.isabs(npu.path):
        yield _error(f"{key}.path", "name the card's file, such as /dev/tenstorrent/0")
    if npu.origin + npu.channel_bytes > WINDOW:
        yield _error(
            f"{key}.origin",
            f"channels from {int(npu.origin)} to {npu.origin + npu.channel_bytes} don't fit into the card's windows of "
            f"{format_size(WINDOW)}; lower origin or channel_bytes",
        )
    if npu.origin % math.lcm(PAGE, npu.alignment):
        yield _error(
            f"{key}.origin",
            f"{int(npu.origin)} is no multiple of the page size, {PAGE}, and of alignment, {npu.alignment}; processes "
            "could not map the channels",
        )
    if len(npu.noc) != npu.channels:
        yield _error(
            f"{key}.noc",
            f"{len(npu.noc)} tiles for {npu.channels} channels; give the tile of each bank, as the card's runtime "
            'reports it, such as "17-14"',
        )
    for tile in npu.noc:
        try:
            parse_noc(tile)
        except ValueError as error:
            yield _error(f"{key}.noc", str(error))


def _address(key: str, text: str) -> tuple[str, int] | Problem:
    try:
        return split_address(text)
    except ValueError as error:
        return _error(key, str(error))
