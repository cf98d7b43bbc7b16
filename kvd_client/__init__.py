"""What an inference process imports to move KV caches through its node's daemon.

The prefill node's process, as a request's source::

    spec = KVSpec(layers=32, kv_heads=8, entry_bytes=512, dtype="float16", model="a model")
    with Client() as client, client.prefill("request-1", spec, [1000]) as transfer:
        for layer in range(32):
            ...  # compute the layer
            transfer.put_layer(layer, k=k, v=v)  # (rows, heads, tokens, dim), torch or NumPy

The decode node's, as its sink; either may come first::

    with Client() as client, client.decode("request-1", spec, [1000], source="prefill-0") as transfer:
        for layer in range(32):
            transfer.wait_ready(layer)
            k, v = transfer.k(layer, "float16"), transfer.v(layer, "float16")  # views of shared memory

Every error is a :class:`KvdError` with a stable ``code`` (:mod:`kvd_client.errors`; ``kvd errors`` prints what each
means for memory and for trying again). :mod:`kvd_client.parallel` is for ends of different tensor-parallel degrees,
:mod:`kvd_client.activations` for single tensors, :mod:`kvd_client.selectors` for KV selection algorithms, and
:mod:`kvd_client.engines` has engines that use all of it.

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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name == "DecodeTransfer":
        from kvd_client.decode import DecodeTransfer

        return DecodeTransfer
    if name == "PrefillTransfer":
        from kvd_client.prefill import PrefillTransfer

        return PrefillTransfer
    raise AttributeError(f"module 'kvd_client' has no attribute {name!r}")
