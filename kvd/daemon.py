"""One daemon: its parts put together, its start and its end."""

from __future__ import annotations

import asyncio
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
from kvd.errors import ConfigError, ShuttingDown
from kvd.fabric import choice, registry
from kvd.fabric.base import Fabric
from kvd.importance.learning import HalfLife
from kvd.keys import read_keys
from kvd.learnt import Learner
from kvd.learnt_exchange import LearntExchange
from kvd.memory.device import Backing, HostBacking, NpuDevice
from kvd.memory.pool import Pool
from kvd.memory.tenstorrent import TenstorrentBacking
from kvd.peers.config import PeersConfig
from kvd.peers.local import connect_local
from kvd.peers.manager import Peers
from kvd.placing import Placing
from kvd.profiles import Profiles
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
        self._keys_trouble = ""
        """Why the keys in use are not those of the file, until they are; status shows it."""
        self._profiles = _make_profiles(config)
        core = TransferCore(self.node, self.boot, _transfer_settings(config, self._profiles))
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
        learner = self._profiles.learner
        self._learnt = LearntExchange(learner, self._peers.sessions) if learner is not None else None
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
        if self._learnt is not None:
            self._learnt.start()
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
            self._keys_trouble = f"keys not reloaded, the earlier ones stay in use: {error.message}"
        else:
            log.info("keys reloaded", file=path)
            self._keys_trouble = ""

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
        if self._learnt is not None:
            await self._learnt.close()
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
        elif self._learnt is not None:
            self._learnt.hear(session, message)

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
        learnt_trouble = self._learnt.trouble if self._learnt is not None else ""
        reasons += [trouble for trouble in (logs.trouble(), self._keys_trouble, learnt_trouble) if trouble]
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


def _make_profiles(config: Config) -> Profiles:
    """Those of the configured folder, with a learner where the daemon is to learn."""
    folder, state = config.selective.profiles, config.profile.state
    profiles = Profiles(Path(folder) if folder else None)
    if config.profile.learn:
        profiles.learner = Learner(
            HalfLife.parse(config.profile.half_life),
            blocks=config.selective.blocks,
            start=profiles.start,
            folder=Path(state) if state else None,
            now=time.time(),
        )
    return profiles


def _transfer_settings(config: Config, profiles: Profiles) -> Settings:
    transfer, selective = config.transfer, config.selective
    return Settings(
        rendezvous_s=transfer.rendezvous_s,
        chunk=transfer.chunk,
        window=transfer.window,
        bulk_delay_s=selective.fetch_delay_s,
        selective=Selective(
            mode=selective.mode,
            budget=selective.budget,
            speculative=selective.speculative,
            share=selective.share,
            blocks=selective.blocks,
        ),
        profiled=profiles.known,
    )


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
