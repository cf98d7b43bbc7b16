"""What an inference process imports to move KV caches through its node's daemon.

Importing this needs neither torch nor NumPy; opening a transfer imports NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd_client.client import Client
from kvd_client.errors import KvdError
from kvd_client.layouts import Placement
from kvd_client.spec import KVSpec, MetadataSpec, PartLayout, TokenRange

if TYPE_CHECKING:
    from kvd_client.decode import DecodeTransfer
    from kvd_client.prefill import PrefillTransfer

__all__ = [
    "Client",
    "DecodeTransfer",
    "KVSpec",
    "KvdError",
    "MetadataSpec",
    "PartLayout",
    "Placement",
    "PrefillTransfer",
    "TokenRange",
]


def __getattr__(name: str) -> object:
    if name == "DecodeTransfer":
        from kvd_client.decode import DecodeTransfer

        return DecodeTransfer
    if name == "PrefillTransfer":
        from kvd_client.prefill import PrefillTransfer

        return PrefillTransfer
    raise AttributeError(f"module 'kvd_client' has no attribute {name!r}")
