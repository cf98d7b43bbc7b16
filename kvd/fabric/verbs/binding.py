"""All that kvd uses of pyverbs, releases 44 to 59, in one place; importing it needs pyverbs but no device."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from typing import Any, TypeAlias

from kvd.errors import FabricError

_handlers = list(logging.root.handlers)

from pyverbs.addr import GID, AHAttr, GlobalRoute  # noqa: E402
from pyverbs.cq import CQ, CompChannel  # noqa: E402
from pyverbs.device import Context, get_device_list  # noqa: E402
from pyverbs.mr import MR, DmaBufMR  # noqa: E402
from pyverbs.pd import PD  # noqa: E402
from pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError  # noqa: E402
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr  # noqa: E402
from pyverbs.wr import SGE, RecvWR, SendWR  # noqa: E402

logging.root.handlers[:] = _handlers  # the import of pyverbs configures the root logger

__all__ = [
    "CQ",
    "GID",
    "MR",
    "PD",
    "QP",
    "SGE",
    "AHAttr",
    "CompChannel",
    "Context",
    "DmaBufMR",
    "GlobalRoute",
    "PyverbsError",
    "PyverbsRDMAError",
    "QPAttr",
    "QPCap",
    "QPInitAttr",
    "RecvWR",
    "SendWR",
]


def _enums() -> Any:
    for name in ("pyverbs.libibverbs_enums", "pyverbs.enums"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "IBV_QPT_RC") or hasattr(module, "ibv_qp_type"):
            return module
    raise ImportError("pyverbs has neither libibverbs_enums nor enums; kvd knows its releases 44 to 59")


_module = _enums()


def _constant(name: str) -> int:
    """A constant of libibverbs, whether the release has it in the module or in an enumeration of the module."""
    if hasattr(_module, name):
        return int(getattr(_module, name))
    for value in vars(_module).values():
        if isinstance(value, type) and hasattr(value, name):
            return int(getattr(value, name))
    raise ImportError(f"pyverbs has no constant {name}; kvd knows its releases 44 to 59")


ACCESS_LOCAL_WRITE = _constant("IBV_ACCESS_LOCAL_WRITE")
ACCESS_REMOTE_WRITE = _constant("IBV_ACCESS_REMOTE_WRITE")
ACCESS_REMOTE_READ = _constant("IBV_ACCESS_REMOTE_READ")
GID_ROCE_V2 = _constant("IBV_GID_TYPE_ROCE_V2")
PORT_ACTIVE = _constant("IBV_PORT_ACTIVE")
QPT_RC = _constant("IBV_QPT_RC")
SIGNALED = _constant("IBV_SEND_SIGNALED")
INLINE = _constant("IBV_SEND_INLINE")
WRITE = _constant("IBV_WR_RDMA_WRITE")
READ = _constant("IBV_WR_RDMA_READ")
SEND = _constant("IBV_WR_SEND")
SUCCESS = _constant("IBV_WC_SUCCESS")
FLUSHED = _constant("IBV_WC_WR_FLUSH_ERR")
REMOTE_ACCESS = _constant("IBV_WC_REM_ACCESS_ERR")
FATAL = _constant("IBV_WC_FATAL_ERR")
QPS_RESET = _constant("IBV_QPS_RESET")
QPS_ERROR = _constant("IBV_QPS_ERR")
QP_STATE = _constant("IBV_QP_STATE")
EVENT_DEVICE_FATAL = _constant("IBV_EVENT_DEVICE_FATAL")
LINK_LAYER_INFINIBAND = 1
"""``IBV_LINK_LAYER_INFINIBAND``: addressed by LID. Ethernet, which is 2, is addressed by GID."""

_CAUSES = {
    "LOC_LEN_ERR": "a message longer than the receive buffer or the device's limit",
    "LOC_QP_OP_ERR": "a work request that the device can't execute",
    "LOC_PROT_ERR": "local memory that is not, or no longer, registered",
    "WR_FLUSH_ERR": "an earlier error of the queue pair",
    "BAD_RESP_ERR": "an answer of the peer's device that makes no sense",
    "LOC_ACCESS_ERR": "local memory that is registered without the right to write",
    "REM_INV_REQ_ERR": "a request that the peer's device does not support or has no resources for",
    "REM_ACCESS_ERR": "a key that the peer has revoked, or bytes outside of what it granted",
    "REM_OP_ERR": "a failure of the peer's device",
    "RETRY_EXC_ERR": "no answer from the peer's device: the process ended, the link is down, or the GID has no route",
    "RNR_RETRY_EXC_ERR": "no receive buffer at the peer: its daemon hangs",
    "RESP_TIMEOUT_ERR": "no response of the peer's device in time",
    "FATAL_ERR": "a fatal error of the local device; look at the kernel log",
}

REQUEST_ERRORS = frozenset(
    _constant(f"IBV_WC_{name}")
    for name in (
        "LOC_LEN_ERR",
        "LOC_PROT_ERR",
        "LOC_ACCESS_ERR",
        "REM_INV_REQ_ERR",
        "REM_ACCESS_ERR",
        "REM_OP_ERR",
    )
)
"""The request itself is at fault, and would fail again; after any other error it is repeated. (LOC_QP_OP_ERR is not one
of them: soft-RoCE says so while there is no route to the peer.)"""

_STATUS = {_constant(f"IBV_WC_{name}"): name for name in _CAUSES}


def describe_status(status: int) -> str:
    """A work completion's status by name and number, with its usual cause."""
    name = _STATUS.get(status)
    if name is None:
        return f"verbs status {status}"
    return f"verbs status {status} (IBV_WC_{name}), usually {_CAUSES[name]}"


def error_number(error: BaseException) -> int:
    """The errno of a pyverbs error; 0 if it has none."""
    code = getattr(error, "error_code", None)
    return abs(code) if isinstance(code, int) else 0


def device_names() -> list[str]:
    """The RDMA devices that this process sees; without any, or without the kernel's support, an empty list."""
    try:
        return sorted(device.name.decode() for device in get_device_list())
    except PyverbsError:
        return []


def no_device() -> FabricError:
    """What to say where there is none."""
    return FabricError(
        "there is no RDMA device; load the driver of the NIC (lsmod, rdma link), give the process access to "
        '/dev/infiniband, or set fabric.name = "tcp"'
    )


def open_device(name: str) -> tuple[Any, int]:
    """A Context and the descriptor of its events, non-blocking; raises :class:`FabricError` where the device does not
    exist or must not be opened."""
    names = device_names()
    if not names:
        raise no_device()
    if name not in names:
        raise FabricError(
            f"there is no RDMA device {name!r} here; choose one of {', '.join(names)} with fabric.device",
            device=name,
            known=names,
        )
    before = _event_descriptors()
    try:
        context = Context(name=name)
    except PyverbsError as error:
        raise FabricError(
            f"the RDMA device {name!r} can't be opened: {error}; give the daemon's user access to "
            "/dev/infiniband/uverbs* (group rdma, and DeviceAllow=char-infiniband_verbs rw in the systemd unit)",
            device=name,
        ) from None
    descriptor = (_event_descriptors() - before).pop()
    os.set_blocking(descriptor, False)
    return context, descriptor


def device_lost(context: Any) -> bool:
    """Take the device's events that have come, if any; whether one of them says that the device is gone."""
    lost = False
    try:
        while True:
            event = context.get_async_event()
            lost = lost or int(event.event_type) == EVENT_DEVICE_FATAL
            event.ack()  # at once, for an object of which an event is unacknowledged can't be destroyed
    except PyverbsError:  # none is left
        return lost


def make_channel(context: Any) -> tuple[Any, int]:
    """A completion channel and its descriptor, non-blocking, since waiting for events would hold the GIL."""
    before = _event_descriptors()
    channel = CompChannel(context)
    descriptor = getattr(channel, "fd", None)
    if descriptor is None:  # before release 57 a channel does not tell
        descriptor = (_event_descriptors() - before).pop()
    os.set_blocking(descriptor, False)
    return channel, int(descriptor)


def _event_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except FileNotFoundError:  # the listing's own descriptor
            continue
    return found


Item: TypeAlias = tuple[int, int, int, int, int, int, int]
"""One request: opcode, flags, local address, length, lkey, remote address, rkey."""


class Chain:
    """Send work requests that are made once, linked once, and used for every post.

    The chain can't be cut (pyverbs sets the link to a next request but does not remove it), so a batch of n uses
    its last n links. Their scatter/gather entries are changed in place: neither allocations nor objects per request.
    """

    def __init__(self, links: int) -> None:
        self._entries: list[Any] = []
        self._requests: list[Any] = []
        for _ in range(links):
            entry = SGE(0, 0, 0)
            request = SendWR(0, opcode=WRITE, num_sge=1, sg=[entry], send_flags=0)
            request.close()  # frees the copy of the entry
            request.sg_list = entry  # and uses the entry itself; closing the request again would free it twice
            if self._requests:
                request.next_wr = self._requests[-1]
            self._entries.append(entry)
            self._requests.append(request)

    def __len__(self) -> int:
        return len(self._requests)

    def post(self, qp: Any, items: Sequence[Item], wr_id: int, step: int) -> None:
        """Post ``items``, at most as many as links, under ``wr_id`` and each ``step`` more; the last one is signalled.

        The device's library copies the requests, so that they are free again on return.
        """
        at = len(items)
        requests, entries = self._requests, self._entries
        for opcode, flags, address, length, lkey, remote, rkey in items:
            at -= 1
            request, entry = requests[at], entries[at]
            entry.addr, entry.length, entry.lkey = address, length, lkey
            request.wr_id = wr_id
            request.opcode = opcode
            request.send_flags = flags if at else flags | SIGNALED
            request.set_wr_rdma(rkey, remote)
            wr_id += step
        qp.post_send(requests[len(items) - 1])

    def close(self) -> None:
        for entry in self._entries:
            entry.close()
        self._entries.clear()
        self._requests.clear()
