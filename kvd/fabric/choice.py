"""Which fabrics a daemon offers its peers: the one that its configuration names, or for ``auto`` all that work here."""

from __future__ import annotations

from typing import Any, Protocol

from kvd.errors import ConfigError, FabricError
from kvd.fabric import registry
from kvd.fabric.base import Fabric


class Log(Protocol):
    """What :func:`choose` needs of a structlog logger."""

    def info(self, event: str, **fields: Any) -> Any: ...


def choose(
    name: str,
    *,
    rate: float,
    device: str,
    port: int,
    gid_index: int,
    memory: int = 0,
    level: str = "plain",
    checksums: bool = True,
    log: Log,
) -> list[Fabric]:
    """Make the fabrics of ``name``, the preferred one first; ``device``, ``port``, ``gid_index`` and
    ``memory``, the bytes that are going to be registered, are for verbs, ``level`` and ``checksums`` for tcp.

    ``auto`` offers verbs and tcp, for peers without RDMA, or tcp alone with one line in the log that says why. Any
    other name is taken at its word: ``verbs`` raises :class:`~kvd.errors.FabricError` without a usable device,
    or where the memory can't be locked (:class:`~kvd.errors.ConfigError` without pyverbs), and ``tcp`` opens no device.
    """
    verbs = {"device": device, "port": port, "gid_index": gid_index, "memory": memory}
    tcp = {"level": level, "checksums": checksums}
    if name == "auto":
        always = registry.create("tcp", rate=rate, **tcp)
        try:
            return [registry.create("verbs", rate=rate, **verbs), always]
        except (ConfigError, FabricError) as error:
            log.info("fabric auto: tcp, since verbs can't be used", reason=error.message)
            return [always]
    return [registry.create(name, rate=rate, **{"verbs": verbs, "tcp": tcp}.get(name, {}))]
