"""One daemon: its parts put together, its start and its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import secrets
import time
from pathlib import Path

import kvd_kernels
import structlog

import kvd
from kvd import log as logs
from kvd import notify
from kvd.api.server import ApiLimits, ApiServer
from kvd.config import Config, Npu
from kvd.errors import ConfigError, InvalidArgument, KvdError, ShuttingDown
from kvd.fabric import choice, registry
from kvd.fabric.base import Fabric
from kvd.importance.learning import HalfLife
from kvd.keys import read_keys
from kvd.learnt import Learner
from kvd.memory.device import Backing, HostBacking, NpuDevice
from kvd.memory.pool import Pool
from kvd.memory.tenstorrent import TenstorrentBacking
from kvd.peers.config import PeersConfig
from kvd.peers.local import connect_local
from kvd.peers.manager import Peers
from kvd.placing import Placing
from kvd.profiles import Profiles
from kvd.profiling.files import replace_file
from kvd.service import Service
from kvd.transfer.core import Settings, TransferCore
from kvd.transfer.engine import Engine
from kvd.transfer.events import DrainRequested, StopRequested
from kvd.transfer.parties import Session
from kvd.transfer.policy import Selective
from kvd.types import NodeId
from kvd.wire.messages import WIRE_VERSION, Learnt, PeerMessage
from kvd_client import protocol as api
from kvd_client.statuses import TransferStatus

log = structlog.get_logger("kvd.daemon")

LAYOUT_VERSION = 2
"""Version of the arrangement of a lease (:mod:`kvd_client.spec`) and of tensors (:mod:`kvd.layout`): both daemons
compute addresses in it. History: 1, leases; 2, tensors in layouts of their own."""

TELL_S, SAVE_S = 1.0, 30.0
"""How often sources are told what was learnt, and how often it is written down."""

FAREWELL_S = 1.0
"""How long a stopping daemon waits for its last messages to leave."""


class Daemon:
    """All parts of one daemon, from an already checked configuration (:mod:`kvd.config_check`)."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.node: NodeId = config.node.id
        self.boot = secrets.token_hex(8)
        self.hurry = asyncio.Event()
        """Set to cut :meth:`drain` short."""
        self._started = time.monotonic()
        self._local: Session | None = None
        self._local_lock = asyncio.Lock()
        self._fabrics: list[Fabric] = choice.choose(
            config.fabric.name,
            rate=float(config.fabric.rate),
            device=config.fabric.device,
            port=config.fabric.port,
            gid_index=config.fabric.gid_index,
            memory=config.memory.pool,
            level=config.security.level,
            checksums=config.security.checksums,
            log=log,
        )
        self._loopback: Fabric = registry.create("loopback")
        self._pool = Pool(
            config.memory.pool,
            config.memory.arena,
            config.memory.huge_pages,
            [*self._fabrics, self._loopback],
            client_limit=config.memory.client_limit,
        )
        self._devices = {name: self._make_device(name, npu) for name, npu in config.npu.items()}
        selective = config.selective
        self._profiles = Profiles(Path(selective.profiles) if selective.profiles else None)
        if config.profile.learn:
            self._profiles.learner = Learner(
                HalfLife.parse(config.profile.half_life),
                blocks=selective.blocks,
                start=self._profiles.start,
                folder=Path(config.profile.state) if config.profile.state else None,
                now=time.time(),
            )
        self._learning: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[str] | None = None
        self._troubles: dict[str, str] = {}
        """What is wrong until it is done again, a sentence each; status shows it."""
        settings = Settings(
            rendezvous_s=config.transfer.rendezvous_s,
            chunk=config.transfer.chunk,
            window=config.transfer.window,
            bulk_delay_s=selective.fetch_delay_s,
            selective=Selective(
                mode=selective.mode,
                budget=selective.budget,
                speculative=selective.speculative,
                share=selective.share,
                blocks=selective.blocks,
            ),
            profiled=self._profiles.known,
        )
        core = TransferCore(self.node, self.boot, settings)
        self._engine = Engine(core=core, node=self.node, boot=self.boot, pool=self._pool, connect=self.connect)
        self._peers = Peers(
            node=self.node,
            boot=self.boot,
            config=_peers_config(config),
            fabrics=self._fabrics,
            fingerprint=fingerprint(config),
            on_message=self._peer_message,
            on_fabric_message=self._engine.fabric_message,
            on_lost=self._engine.session_lost,
            log=structlog.get_logger("kvd.peers"),
        )
        self._service = Service(
            engine=self._engine,
            connect=self.connect,
            deadline_s=config.transfer.deadline_s,
            status=self.status,
            profiles=self._profiles,
            placing=Placing(self._pool, self._devices),
        )
        activated = [passed.fd for passed in notify.listen_fds() if passed.name == "api"]
        self._api = ApiServer(
            config.api.socket,
            self._service,
            group=config.api.group or None,
            node=self.node,
            boot=self.boot,
            log=structlog.get_logger("kvd.api"),
            limits=ApiLimits(clients=config.api.max_clients, requests_s=config.api.max_requests_s),
            listen_fd=activated[0] if activated else None,
        )

    def _make_device(self, name: str, npu: Npu) -> NpuDevice:
        """Raises :class:`~kvd.errors.OutOfMemory` or what the card's driver refuses."""
        nbytes = int(npu.channel_bytes)
        if npu.backing == "host":
            backing: Backing = HostBacking(npu.channels, nbytes)
        else:
            backing = TenstorrentBacking(npu.path, npu.channels, nbytes, origin=int(npu.origin), noc=npu.noc)
        return NpuDevice(
            name,
            backing,
            channels=npu.channels,
            channel_bytes=nbytes,
            alignment=npu.alignment,
            fabrics=[*self._fabrics, self._loopback],
        )

    @property
    def unfinished(self) -> int:
        """Parts of transfers that have not ended."""
        return self._engine.core.unfinished

    @property
    def _offered(self) -> str:
        return ", ".join(fabric.name for fabric in self._fabrics)

    @property
    def _details(self) -> str:
        return ", ".join(fabric.details for fabric in self._fabrics if fabric.details)

    @property
    def listening(self) -> str:
        """Where peers can connect, ports filled in; empty: nowhere."""
        return self._peers.listening

    async def start(self) -> None:
        """Listen to peers and to local processes; raises a KvdError that names the port or path that is taken."""
        await self._peers.start()
        await self._api.start()
        if self._profiles.learner is not None:
            self._learning = asyncio.create_task(self._keep_learnt(self._profiles.learner))
        self._pool.prepare(min(self.config.memory.arena, self.config.memory.pool))
        kernels = kvd_kernels.implementation()
        if kernels == "numpy":
            log.warning("kernels: NumPy reference, several times slower", reason=kvd_kernels.why_not_native())
        # Everything made so far lives as long as the daemon: keep the collector from walking it again and again.
        gc.freeze()
        log.info(
            "ready",
            node=self.node,
            boot=self.boot,
            socket=self.config.api.socket,
            listen=self.listening,
            fabric=self._offered,
            **({"device": self._details} if self._details else {}),
            kernels=kernels,
            pid=os.getpid(),
        )

    def reload_keys(self) -> None:
        """Read the shared keys again. Sessions go on with what they have; new ones use the new keys. A file that
        can't be used changes nothing, and is logged."""
        path = self.config.peers.key_file
        try:
            self._peers.accept_keys(read_keys(path) if path else [])
        except ConfigError as error:
            log.error("keys not reloaded; the earlier ones stay in use", reason=error.message)
            self._troubles["keys"] = f"keys not reloaded, the earlier ones stay in use: {error.message}"
        else:
            log.info("keys reloaded", file=path)
            self._troubles.pop("keys", None)

    async def drain(self) -> None:
        """Refuse new transfers; return when the running ones have ended, or when :attr:`hurry` is set."""
        log.info("draining", transfers=self.unfinished)
        self._engine.submit(DrainRequested())
        waits = [
            asyncio.create_task(self._engine.wait_unfinished()),
            asyncio.create_task(self.hurry.wait()),
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def close(self) -> None:
        """End everything that still runs with ``SHUTTING_DOWN``, and give everything back."""
        left = self.unfinished
        self._engine.submit(StopRequested(ShuttingDown(f"the daemon of node {self.node!r} was stopped; retry")))
        await self._api.close()
        if self._learning is not None and self._profiles.learner is not None:
            self._learning.cancel()
            await asyncio.wait([self._learning, *([self._saving] if self._saving else [])])
            _save(self._profiles.learner.unsaved())
        try:
            await asyncio.wait_for(self._peers.close(), FAREWELL_S)
        except TimeoutError:
            log.warning("peers did not take the last messages", seconds=FAREWELL_S)
        for fabric in self._fabrics:
            await fabric.close()
        await self._loopback.close()
        await self._engine.close()
        for device in self._devices.values():
            device.close()
        self._pool.close()
        log.info("stopped", unfinished=left)

    async def connect(self, node: NodeId) -> Session:
        """A session with a node; with this one itself over the loopback fabric."""
        if node != self.node:
            return await self._peers.session(node)
        async with self._local_lock:
            if self._local is None:
                self._local = await connect_local(
                    self.node, self._loopback, self._peer_message, self._engine.fabric_message
                )
        return self._local

    def _peer_message(self, session: Session, message: PeerMessage) -> None:
        """What peers have learnt is no transfer's business; the rest is the engine's."""
        if not isinstance(message, Learnt):
            self._engine.session_message(session, message)
        elif self._profiles.learner is not None:
            learner = self._profiles.learner
            try:
                learner.hear(session.node, message, time.time())
            except InvalidArgument as error:
                learner.counters["learnt_refused"] += 1
                log.warning("what a peer learnt is not used", peer=session.node, reason=error.message)

    async def _keep_learnt(self, learner: Learner) -> None:
        """Tell the sources what was learnt, and now and then write it down."""
        saved = time.monotonic()
        while True:
            await asyncio.sleep(TELL_S)
            if learner.waiting:
                live = {session.node: session for session in self._peers.sessions()}
                for node, message in learner.outgoing():
                    if node in live:
                        with contextlib.suppress(KvdError):  # its session has ended; it learns what comes next
                            live[node].send(message)
            if time.monotonic() - saved >= SAVE_S:
                saved = time.monotonic()
                self._saving = asyncio.create_task(asyncio.to_thread(_save, learner.unsaved()))
                self._troubles["learnt"] = await asyncio.shield(self._saving)

    def summary(self) -> str:
        """One line for ``systemctl status``."""
        memory = self._pool.status()
        peers = sum(peer.state == "connected" for peer in self._peers.statuses())
        return (
            f"{self.unfinished} transfers running, {len(self._api.clients)} clients, {peers} peers connected, "
            f"{memory.in_use >> 20} of {memory.limit >> 20} MiB lent"
        )

    def status(self) -> api.Status:
        """What ``kvd status`` shows."""
        now = time.monotonic()
        core = self._engine.core
        peers = self._peers.statuses()
        reasons = [f"peer {peer.node!r}: {peer.error}" for peer in peers if peer.state != "connected" and peer.error]
        reasons += [peer.trouble for peer in peers if peer.trouble]
        reasons += [trouble for trouble in (logs.trouble(), *self._troubles.values()) if trouble]
        if core.draining:
            reasons.append("draining: new transfers are refused")
        counters = dict(core.counters)
        counters["bytes_sent"] = self._engine.bytes_sent
        counters["bytes_received"] = self._engine.bytes_received
        learner = self._profiles.learner
        counters |= learner.counters if learner is not None else {}
        counters |= {f"requests_failed_{code}": count for code, count in self._api.failures.items()}
        counters |= self._peers.counters
        counters["checksum_errors"] = sum(fabric.checksum_errors for fabric in self._fabrics)
        return api.Status(
            node=self.node,
            boot=self.boot,
            version=kvd.__version__,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started,
            health="degraded" if reasons else "ok",
            reasons=reasons,
            fabric=self._offered,
            device=self._details,
            kernels=kvd_kernels.implementation(),
            listen=self.listening,
            socket=self.config.api.socket,
            clients=len(self._api.clients),
            draining=core.draining,
            memory=self._pool.status(),
            peers=peers,
            transfers=[
                TransferStatus(
                    transfer=part.transfer,
                    request=part.request,
                    role=part.role.value,
                    state=part.code if part.ended and part.code != "OK" else part.state.value,
                    peer=part.peer,
                    rank=part.rank,
                    ranks=part.ranks,
                    bytes_total=part.bytes_total,
                    bytes_done=part.bytes_done,
                    age_s=now - part.opened,
                    mode=part.mode,
                    mask=part.layout.mask_by,
                    paths={name: count for name, count in part.paths.items() if count},
                    budget_bytes=part.paths["budget_tokens"] * part.layout.token_bytes,
                )
                for part in core.parts.values()
            ],
            counters=counters,
            profiles=self._profiles.installed(),
            recordings=self._profiles.recorded(),
            learnt=learner.statuses(time.time()) if learner is not None else [],
            devices=[device.status() for device in self._devices.values()],
            security=self._security(),
        )

    def _security(self) -> str:
        security = self.config.security
        if all(fabric.name != "tcp" for fabric in self._fabrics):
            return ""
        return security.level if security.level != "plain" else "checksums" if security.checksums else "unchecked"


def _save(unsaved: list[tuple[Path, bytes]]) -> str:
    """Write state files, each in one step; what went wrong, in a sentence, or nothing."""
    trouble = ""
    for path, data in unsaved:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, data)
        except (OSError, InvalidArgument) as error:
            log.warning("learnt importance not saved", file=str(path), reason=str(error))
            trouble = f"what was learnt is not saved and would not outlive a restart: {error}"
    return trouble


def fingerprint(config: Config) -> dict[str, str | int]:
    """What must be equal on two nodes before they talk, besides the level of security."""
    return {
        "wire": WIRE_VERSION,
        "layout": LAYOUT_VERSION,
        "checksums": "on" if config.security.checksums else "off",
    }


def _peers_config(config: Config) -> PeersConfig:
    peers = config.peers
    return PeersConfig(
        listen=peers.listen,
        advertise=peers.advertise,
        peers=dict(peers.static),
        keys=read_keys(peers.key_file) if peers.key_file else [],
        connect_timeout_s=peers.connect_timeout_s,
        handshake_timeout_s=peers.handshake_timeout_s,
        heartbeat_s=peers.heartbeat_s,
        timeout_s=peers.timeout_s,
        level=config.security.level,
        messages_s=peers.max_messages_s,
        redial_s=peers.redial_s,
    )
