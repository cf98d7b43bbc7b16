"""The daemon's configuration: TOML, checked by type, every key with a default.

An empty file, or none at all, is a working configuration for one machine. What depends on the machine (the
node's name, the socket of a user without root) is filled in by :func:`resolve`; whether the values make sense
together and on this host is the business of :mod:`kvd.config_check`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import replace

from kvd.errors import ConfigError
from kvd.host import Host
from kvd.units import Rate, Size, parse_rate, parse_size

SYSTEM_FILE = Path("/etc/kvd/kvd.toml")
DEFAULT_POOL = 4 << 30
MIN_ARENA = 1 << 20
MAX_FILE = 1 << 20
"""Most bytes of a configuration file."""
NODE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Node(_Section, frozen=True, kw_only=True):
    id: str = ""
    """The node's name among its peers; empty: the host's name."""


class Api(_Section, frozen=True, kw_only=True):
    socket: str = ""
    """Path of the Unix socket; empty: ``/run/kvd/kvd.sock``, without root in ``$XDG_RUNTIME_DIR``."""
    group: str = ""
    """The group whose members may connect; empty: only the daemon's own user and root."""
    max_clients: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 256
    max_requests_s: Annotated[float, msgspec.Meta(ge=0)] = 20000.0
    """Requests a second taken of one client; more wait in its socket. 0: no limit."""


class Peers(_Section, frozen=True, kw_only=True):
    listen: str = "127.0.0.1:7440"
    """``host:port``; port 0 takes any free one."""
    advertise: str = ""
    """``host:port`` at which peers reach this node; empty: ``listen``."""
    key_file: str = ""
    """File with the keys shared by all peers, one a line; the first proves, each is accepted. Relative names
    are looked up among systemd's credentials first, then beside the configuration file."""
    connect_timeout_s: Seconds = 5.0
    handshake_timeout_s: Seconds = 5.0
    heartbeat_s: Seconds = 1.0
    """How often a silent session is probed."""
    timeout_s: Seconds = 5.0
    """A peer that has been silent for so long is lost."""
    redial_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 5.0
    """How soon a peer in ``static`` that is down is dialled again though no transfer needs it; each further attempt
    waits twice as long, up to a minute. 0: only when a transfer needs it."""
    max_messages_s: Annotated[float, msgspec.Meta(ge=0)] = 20000.0
    """Control messages a second taken of one peer; more wait in its connection. 0: no limit."""
    static: dict[str, str] = {}
    """Node id to ``host:port``."""


class Security(_Section, frozen=True, kw_only=True):
    level: Literal["plain", "authentic", "secret"] = "plain"
    """How KV caches cross the network, the same on all nodes. ``plain``: as they are. ``authentic``: with codes that
    only the two ends can compute. ``secret``: encrypted."""
    checksums: bool = True
    """With ``plain``, a checksum of every frame."""


class Memory(_Section, frozen=True, kw_only=True):
    pool: Size = Size(0)
    """Most memory that the daemon lends out; 0: 4 GiB, or half of what the host has if that is less."""
    arena: Size = Size(256 << 20)
    """The pool grows and shrinks in pieces of this size; a larger part of a transfer gets one of its own. A smaller
    pool is one piece."""
    huge_pages: Literal["auto", "never", "always"] = "auto"
    client_limit: Size = Size(0)
    """Most memory that one client can hold at a time; 0: no limit but the pool."""


class Transfer(_Section, frozen=True, kw_only=True):
    deadline_s: Seconds = 300.0
    """A transfer must be delivered within so long, unless its client says otherwise."""
    rendezvous_s: Seconds = 30.0
    """How long one side waits for the other to open the transfer."""
    chunk: Size = Size(1 << 20)
    """Largest piece handed to the fabric at once."""
    window: Size = Size(8 << 20)
    """Most bytes in flight to one peer."""


class Selective(_Section, frozen=True, kw_only=True):
    mode: Literal["full", "partial", "profile", "parallel", "speculative"] = "full"
    """What is pushed when, where neither process of a transfer says so."""
    budget: Literal["deadline", "fixed"] = "deadline"
    """``deadline``: push by importance until the first token exists. ``fixed``: so many blocks as equation 2 allows."""
    speculative: Literal["adaptive", "windows"] = "adaptive"
    """``adaptive``: as fast as ``fetch_delay_s`` allows. ``windows``: a share in each idle window."""
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.1
    """Of all blocks, in the idle windows of one decode iteration."""
    fetch_delay_s: Annotated[float, msgspec.Meta(gt=0, le=10)] = 0.01
    """Most time that bulk bytes under way may keep a link from a fetch."""
    blocks: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 1000
    """KV blocks a layer, where no profile says otherwise."""
    profiles: str = ""
    """Folder with profile files; those installed through the API go there too. Empty: none are kept."""


class Profile(_Section, frozen=True, kw_only=True):
    learn: bool = True
    """Importance follows what this node's decode processes select, and what peers tell."""
    half_life: str = "64 requests"
    """After how many requests, or decoded ``tokens``, what was learnt counts one half."""
    state: str = ""
    """Folder in which it outlives a restart; empty: systemd's ``StateDirectory``, or else nowhere."""


class Fabric(_Section, frozen=True, kw_only=True):
    name: str = "tcp"
    """``tcp``; ``verbs`` for RDMA; ``auto`` for verbs with the peers that have it, where this host has a device, else
    tcp."""
    device: str = ""
    """The RDMA device of ``verbs``. Empty: of those that have an active port, the one nearest to the process's CPUs,
    then to a GPU."""
    port: Annotated[int, msgspec.Meta(ge=1, le=255)] = 1
    """The RDMA device's port."""
    gid_index: Annotated[int, msgspec.Meta(ge=-1, le=65535)] = -1
    """The RDMA port's address; -1: the first RoCE v2 one with an IPv4 address, else a global IPv6 one."""
    rate: Rate = Rate(0)
    """Limit of each link; 0: none."""


class Npu(_Section, frozen=True, kw_only=True):
    """``[npu.NAME]``: a device of this node whose memory is channels."""

    backing: Literal["host", "tenstorrent"] = "host"
    """``host``: shared memory of this host stands for the channels. ``tenstorrent``: windows of a card."""
    channels: Annotated[int, msgspec.Meta(ge=1, le=32)] = 8
    channel_bytes: Size = Size(256 << 20)
    """What kvd manages of each channel."""
    alignment: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 64
    """Of pages in a channel, in bytes: p150 64, Wormhole 32."""
    path: str = ""
    """The card's device file."""
    origin: Size = Size(0)
    """The card's own address of the first byte that kvd manages of each channel."""
    noc: list[str] = []
    """Coordinates of each channel on the card, ``X-Y``."""


class Log(_Section, frozen=True, kw_only=True):
    format: Literal["auto", "console", "json"] = "auto"
    """``auto``: console on a terminal, JSON everywhere else."""
    level: Literal["debug", "info", "warning", "error"] = "info"


class Config(_Section, frozen=True, kw_only=True):
    node: Node = Node()
    api: Api = Api()
    peers: Peers = Peers()
    security: Security = Security()
    memory: Memory = Memory()
    transfer: Transfer = Transfer()
    selective: Selective = Selective()
    profile: Profile = Profile()
    fabric: Fabric = Fabric()
    npu: dict[str, Npu] = {}
    log: Log = Log()


def find(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file to read when none is named: ``$KVD_CONFIG``, the system's, or ``None`` for the defaults."""
    if named := environ.get("KVD_CONFIG"):
        return Path(named)
    return SYSTEM_FILE if os.path.exists(SYSTEM_FILE) else None


def load(path: Path | str) -> Config:
    """Read a file; raises :class:`ConfigError` that names the file and the key."""
    try:
        with open(path, "rb") as file:  # /dev/zero has no end
            data = file.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise ConfigError(f"{path}: has more than {MAX_FILE} bytes; that is no configuration", file=str(path))
        text = data.decode()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{path}: can't be read: {reason}", file=str(path)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; TOML must be", file=str(path)) from None
    return parse(text, name=str(path))


def parse(text: str, *, name: str = "kvd.toml") -> Config:
    """TOML text to a configuration; ``name`` stands for the file in the :class:`ConfigError` raised."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not TOML: {error}", file=name) from None
    except RecursionError:
        raise ConfigError(f"{name}: not TOML: its brackets are nested too deeply", file=name) from None
    except ValueError:  # what Python refuses of a number that the grammar allows
        raise ConfigError(f"{name}: not TOML: a number has thousands of digits", file=name) from None
    _walk(Config, tree, "$", name)
    try:
        return msgspec.convert(tree, Config, dec_hook=_from_text)
    except msgspec.ValidationError as error:
        what, _, where = str(error).rpartition(" - at ")
        key = where.strip("`")
        if key.startswith("$.npu[...]"):  # of several devices, which
            key = f"$.npu.{_first_wrong(tree['npu'])}{key.removeprefix('$.npu[...]')}"
        what = what.replace("`", "").replace("object", "table").replace("got dict", "got table")
        raise ConfigError(f"{name}: {key}: {what[0].lower()}{what[1:]}", file=name, key=key) from None


def resolve(
    config: Config,
    *,
    path: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    host: Host | None = None,
) -> Config:
    """Fill in what depends on the machine: node id, socket, pool, state, and ``key_file`` as an absolute path.

    ``path`` is the file that the configuration came from. ``$KVD_SOCKET`` replaces the socket.
    """
    host = host or Host.read(environ)
    node, api, peers, memory = config.node, config.api, config.peers, config.memory
    profile = config.profile
    if not profile.state and (state := environ.get("STATE_DIRECTORY")):
        profile = replace(profile, state=state.split(":")[0])
    if not node.id:
        node = replace(node, id=host.name)
    if environ.get("KVD_SOCKET") or not api.socket:
        api = replace(api, socket=environ.get("KVD_SOCKET") or host.default_socket)
    if peers.key_file and not os.path.isabs(peers.key_file):
        beside = path.absolute().parent if path else Path.cwd()
        credential = Path(environ.get("CREDENTIALS_DIRECTORY", "/nonexistent"), peers.key_file)
        found = credential if os.path.exists(credential) else beside / peers.key_file
        peers = replace(peers, key_file=str(found))
    if not memory.pool:
        half = host.memory // 2 >> 20 << 20
        memory = replace(memory, pool=Size(min(DEFAULT_POOL, half)))
    if memory.arena == Memory().arena and memory.pool < memory.arena:
        # Whoever asks for a small pool has not asked for an arena that does not fit into it.
        memory = replace(memory, arena=Size(max(memory.pool, MIN_ARENA)))
    return replace(config, node=node, api=api, peers=peers, memory=memory, profile=profile)


def to_builtins(config: Config) -> dict[str, Any]:
    """Plain tables as they stand in a file: sizes and rates as text; of the keys, only their file's name."""
    tree: dict[str, Any] = msgspec.to_builtins(config, enc_hook=_to_text)
    return tree


def to_toml(config: Config) -> str:
    """The configuration as a file that :func:`parse` reads back to the same."""
    lines: list[str] = []
    for section, values in to_builtins(config).items():
        lines += [
            f"[{section}]",
            *(f"{k} = {_toml(v)}" for k, v in values.items() if not isinstance(v, dict)),
            "",
        ]
        for name, table in values.items():
            if isinstance(table, dict) and table:
                key = name if _BARE_KEY.fullmatch(name) else _toml(name)
                lines += [f"[{section}.{key}]", *(f"{_toml(k)} = {_toml(v)}" for k, v in table.items()), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _toml(value: str | int | float | list[str]) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str | bool):
        # JSON's escapes are a subset of a TOML basic string's, except that JSON leaves DEL alone
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _from_text(kind: type, value: Any) -> Any:
    if kind is Size:
        if isinstance(value, int) and not isinstance(value, bool):
            if 0 <= value < 1 << 62:
                return Size(value)
            raise ValueError(f"{value} is not a size in bytes")
        if isinstance(value, str):
            return parse_size(value) if value else Size(0)
        raise ValueError(f'expected a size, such as "4GiB", got {type(value).__name__}')
    if kind is Rate:
        if isinstance(value, str):
            return parse_rate(value) if value else Rate(0)
        raise ValueError(f'expected a rate, such as "200mbit", got {type(value).__name__}')
    raise TypeError(f"no text form of {kind}")


def _to_text(value: Any) -> str:
    if isinstance(value, Size | Rate):
        return str(value) if value else ""
    raise TypeError(f"no text form of {type(value)}")


def _walk(struct: type[msgspec.Struct], tree: Any, path: str, name: str) -> None:
    """What msgspec says less well: a key nobody knows, a choice that is none, a wrong value in a free table."""
    if not isinstance(tree, dict):
        return
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in tree.items():
        here = f"{path}.{key}"
        kind = fields.get(key)
        wrong = None
        if kind is None:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.6)
            wrong = f"no such key; {f'did you mean {near[0]}?' if near else 'known here: ' + ', '.join(fields)}"
            if isinstance(value, dict) and path.count(".") > 1:
                wrong += _dotted(f"{path.rpartition('.')[2]}.{key}", value)
        elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            _walk(kind, value, here, name)
        elif typing.get_origin(kind) is Literal and value not in typing.get_args(kind):
            wrong = f"{_toml_or_type(value)} is none of {', '.join(map(_toml, typing.get_args(kind)))}"
        elif typing.get_origin(kind) is dict and isinstance(value, dict) and typing.get_args(kind)[1] is not str:
            for name_of, table in value.items():
                _walk(typing.get_args(kind)[1], table, f"{here}.{name_of}", name)
        elif typing.get_origin(kind) is dict and isinstance(value, dict):
            bad = next((k for k, v in value.items() if not isinstance(v, str)), None)
            if bad is not None:
                here, wrong = (
                    f"{here}.{bad}",
                    f"expected str, got {_toml_or_type(value[bad])}{_dotted(bad, value[bad])}",
                )
        if wrong is not None:
            raise ConfigError(f"{name}: {here}: {wrong}", file=name, key=here)


def _first_wrong(devices: dict[str, Any]) -> str:
    for name, table in devices.items():
        try:
            msgspec.convert(table, Npu, dec_hook=_from_text)
        except msgspec.ValidationError:
            return name
    return "[...]"


def _dotted(name: str, value: Any) -> str:
    """A name with a dot that lacks its quotes is a table in a table to TOML."""
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        if isinstance(value, dict) or (isinstance(value, str) and ":" in value):  # not a key of the section itself
            name = f"{name}.{key}"
    return f'; a name with a dot needs quotes, such as "{name}"' if "." in name else ""


def _toml_or_type(value: Any) -> str:
    if isinstance(value, dict):
        return "a table"
    return _toml(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"
