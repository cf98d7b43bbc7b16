"""Addresses as users write them: ``host:port``."""

from __future__ import annotations

import ipaddress


def split_address(text: str) -> tuple[str, int]:
    """``"host:port"`` or ``"[v6]:port"`` to its two parts; raises :class:`ValueError` with a sentence."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    if not colon or not bare or (":" in host and not bracketed) or any(c in "[]/@ \t\n" for c in bare):
        raise ValueError(f'"{text}" is not host:port, such as "10.0.0.7:7440" or "[fd00::7]:7440"')
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f'"{text}" has no port between 0 and 65535 behind its last colon')
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Whether an address stays on this machine. A name other than localhost counts as beyond it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def is_wildcard(host: str) -> bool:
    """Whether an address means all of this machine's addresses."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
