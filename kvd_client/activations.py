"""Single tensors by name: what operator-level disaggregation hands from one operator to another (HAWK, section 4.5.2).

A tensor of shape (..., width) is a transfer of one layer with one head, whose entries are its rows; its name is the
request id. So it takes the same way as a KV cache, into a device's layout and out of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvd_client.arguments import whole, whole_numbers
from kvd_client.client import Client
from kvd_client.errors import InvalidArgument
from kvd_client.layouts import Placement
from kvd_client.spec import MAX_ENTRY_BYTES, KVSpec

if TYPE_CHECKING:
    from kvd_client.decode import DecodeTransfer
    from kvd_client.prefill import PrefillTransfer


def tensor_spec(shape: Sequence[int], dtype: str, item_bytes: int) -> tuple[KVSpec, int]:
    """The spec of a tensor, and its rows; both sides must name the same shape and dtype.

    Raises :class:`InvalidArgument` for a tensor without axes or elements, and for rows longer than 1 MiB.
    """
    shape = whole_numbers("shape", shape)
    if not shape or min(shape) < 1:
        raise InvalidArgument(f"a tensor of shape {list(shape)} has nothing to move", shape=list(shape))
    nbytes = shape[-1] * whole("item_bytes", item_bytes)
    if nbytes > MAX_ENTRY_BYTES:
        raise InvalidArgument(
            f"the tensor's innermost axis has {nbytes} bytes; {MAX_ENTRY_BYTES} is the most, so reshape it",
            nbytes=nbytes,
        )
    named = "x".join(map(str, shape))
    spec = KVSpec(layers=1, kv_heads=1, entry_bytes=nbytes, dtype=dtype, model=f"tensor {named}")
    return spec, math.prod(shape[:-1])


def send_tensor(
    client: Client,
    name: str,
    value: Any,
    *,
    dtype: str,
    sink: str = "",
    placement: Placement | None = None,
    deadline_s: float = 0.0,
) -> PrefillTransfer:
    """Offer an array or a torch tensor of any shape under a name. Leave it (or ``finish`` it) as a transfer.

    ``dtype`` is the elements' name in placements (``bf16``, ``f32`` …). With ``placement`` the tensor lies on a device
    of this node before it is sent. Raises as :func:`tensor_spec` and :meth:`kvd_client.Client.prefill`.
    """
    from kvd_client.arrays import bytes_of

    data, shape = bytes_of(value), np.shape(value)
    spec, rows = tensor_spec(shape, dtype, data.shape[-1] // max(1, shape[-1]))
    transfer = client.prefill(name, spec, [rows], sink=sink, placement=_single(placement, dtype), deadline_s=deadline_s)
    try:
        transfer.put_layer(0, entries=data.reshape(1, rows, 1, spec.entry_bytes))
    except BaseException:
        transfer.release()
        raise
    return transfer


def receive_tensor(
    client: Client,
    name: str,
    shape: Sequence[int],
    *,
    dtype: str,
    item_bytes: int,
    source: str = "",
    placement: Placement | None = None,
    pull: bool = False,
    deadline_s: float = 0.0,
) -> DecodeTransfer:
    """Ask for a tensor by name. Its ``wait_ready`` waits for it; with ``placement`` it lies in ``tensors`` then, else
    ``layer(0)`` has its rows as bytes. Raises as :func:`tensor_spec` and :meth:`kvd_client.Client.decode`."""
    spec, rows = tensor_spec(shape, dtype, item_bytes)
    return client.decode(
        name, spec, [rows], source=source, placement=_single(placement, dtype), pull=pull, deadline_s=deadline_s
    )


def _single(placement: Placement | None, dtype: str) -> Placement | None:
    return None if placement is None else msgspec.structs.replace(placement, tensors=1, dtype=dtype)
