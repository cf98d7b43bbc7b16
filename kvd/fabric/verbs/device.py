"""One RDMA device as the fabric uses it: its port, address, limits, registrations and queue pairs."""

from __future__ import annotations

import errno
import mmap
import os
from typing import Any

from kvd.errors import FabricError, InvalidArgument
from kvd.fabric.verbs import binding as ib
from kvd.fabric.verbs import neighbour
from kvd.fabric.verbs.advice import NO_DMABUF, NO_DMABUFS, by_distance, choose_gid, dmabuf_error, registration_error
from kvd.fabric.verbs.wire import Hello

SEND_DEPTH = 128
"""Work requests outstanding on a queue pair."""
INLINE_BYTES = 64
"""Up to this size a request carries its bytes itself, which spares the device a read of memory."""
ACK_TIMEOUT, RETRIES = 14, 6
"""67 ms, and 6 retries: a peer that is silent for about half a second is gone. For rxe, 7 means for ever."""
RNR_FOREVER = 7


class Device:
    """An opened device. ``name`` "": the nearest that has an active port. ``gid_index`` -1: as
    :func:`~kvd.fabric.verbs.advice.choose_gid` says.

    Raises :class:`FabricError` where there is no device, port or address.
    """

    def __init__(self, name: str = "", port: int = 1, gid_index: int = -1) -> None:
        self.port = port
        self.name = name or _first_active(port)
        self.context, self.events = ib.open_device(self.name)
        try:
            self._open(gid_index)
        except ib.PyverbsError as error:
            self.context.close()
            raise FabricError(
                f"the RDMA device {self.name!r} can't be used at port {port}: {error}; choose another with "
                "fabric.device and fabric.port",
                device=self.name,
            ) from None
        except FabricError:
            self.context.close()
            raise

    def _open(self, gid_index: int) -> None:
        port = self.context.query_port(self.port)
        if port.state != ib.PORT_ACTIVE:
            raise FabricError(
                f"port {self.port} of the RDMA device {self.name!r} is not active (state {port.state}); set its "
                "network interface up, or start the subnet manager of an InfiniBand network",
                device=self.name,
            )
        self.lid, self.mtu = int(port.lid), int(port.active_mtu)
        self.infiniband = port.link_layer == ib.LINK_LAYER_INFINIBAND
        self.max_message = int(port.max_msg_sz)
        limits = self.context.query_device()
        self.reads_out = min(16, int(limits.max_qp_init_rd_atom))
        self.reads_in = min(16, int(limits.max_qp_rd_atom))
        self.max_region = int(limits.max_mr_size)
        table = [
            (int(entry.gid_index), entry.gid_str(), entry.gid_type == ib.GID_ROCE_V2)
            for entry in self.context.query_gid_table(port.gid_tbl_len)
            if entry.port_num == self.port
        ]
        self.gid_index, self.gid = choose_gid(table, gid_index, infiniband=self.infiniband, device=self.name)
        self.interface = neighbour.interface_of(self.name, self.port, self.gid_index)
        self.domain = ib.PD(self.context)

    def register(self, address: int, nbytes: int, *, remote_write: bool = False, remote_read: bool = False) -> Any:
        """An MR over memory that the caller keeps; raises :class:`FabricError` with the limit, the need and the fix."""
        access = self._access(nbytes, remote_write, remote_read)
        try:
            return ib.MR(self.domain, nbytes, access, address=address)
        except ib.PyverbsError as error:
            raise registration_error(self.name, nbytes, ib.error_number(error), str(error)) from None

    def _access(self, nbytes: int, remote_write: bool, remote_read: bool) -> int:
        """The rights of an MR; raises :class:`FabricError` for more bytes than one may have."""
        if nbytes > self.max_region:
            raise FabricError(
                f"{nbytes} bytes can't be granted at once, since the device {self.name!r} registers {self.max_region} "
                'at most; divide the model over more ranks, or set fabric.name = "tcp"',
                need=nbytes,
                limit=self.max_region,
            )
        access: int = ib.ACCESS_LOCAL_WRITE
        access |= ib.ACCESS_REMOTE_WRITE if remote_write else 0
        return access | (ib.ACCESS_REMOTE_READ if remote_read else 0)

    def register_pieces(self, address: int, nbytes: int, descriptor: int = -1) -> list[Any]:
        """MRs for local use, each over the next ``max_region`` bytes, of the dma-buf ``descriptor`` if there is one;
        raises as :meth:`register` and :meth:`register_dmabuf`."""
        made: list[Any] = []
        try:
            for at in range(0, nbytes, self.max_region):
                size = min(self.max_region, nbytes - at)
                if descriptor < 0:
                    made.append(self.register(address + at, size))
                else:
                    made.append(self.register_dmabuf(descriptor, address + at, size))
        except FabricError:
            for registration in made:
                registration.close()
            raise
        return made

    def register_dmabuf(
        self, descriptor: int, offset: int, nbytes: int, *, remote_write: bool = False, remote_read: bool = False
    ) -> Any:
        """An MR over ``nbytes`` at ``offset`` of the dma-buf ``descriptor``: another device's memory, whose owner
        exported it. Requests then address it by the offset in the dma-buf.

        Raises :class:`InvalidArgument` for a range that can't be, and :class:`FabricError` where the kernel, the
        driver or the exporter does not support it, with what does.
        """
        if descriptor < 0 or offset < 0 or nbytes <= 0 or offset + nbytes >= 1 << 64:
            raise InvalidArgument(
                f"a dma-buf {descriptor} with {nbytes} bytes at {offset} can't be registered; give an open descriptor, "
                "an offset of at least 0 and at least one byte",
                descriptor=descriptor,
                offset=offset,
                nbytes=nbytes,
            )
        access = self._access(nbytes, remote_write, remote_read)
        try:
            return ib.DmaBufMR(self.domain, nbytes, access, dmabuf=descriptor, offset=offset)
        except ib.PyverbsError as error:
            raise dmabuf_error(self.name, nbytes, ib.error_number(error), str(error)) from None

    @property
    def takes_dmabufs(self) -> bool | None:
        """Whether the kernel and the device's driver register dma-bufs; None: they say neither. Found out with a
        descriptor that is none: only a driver that takes some looks at it."""
        descriptor = os.memfd_create("kvd-no-dma-buf", os.MFD_CLOEXEC)
        try:
            os.truncate(descriptor, mmap.PAGESIZE)
            self.register_dmabuf(descriptor, 0, mmap.PAGESIZE).close()
        except FabricError as error:
            number = error.fields["errno"]
            return True if number in NO_DMABUF else False if number in NO_DMABUFS else None
        finally:
            os.close(descriptor)
        return None

    @property
    def details(self) -> str:
        """For people."""
        return f"{self.name} port {self.port}, GID {self.gid_index} ({self.gid}), MTU {128 << self.mtu}"

    def queue_pair(self, cq: Any, receives: int) -> Any:
        """A connected queue pair's first half: in INIT, ready to take receive buffers."""
        capacity = ib.QPCap(
            max_send_wr=SEND_DEPTH,
            max_recv_wr=receives,
            max_send_sge=1,
            max_recv_sge=1,
            max_inline_data=INLINE_BYTES,
        )
        try:
            qp = ib.QP(self.domain, ib.QPInitAttr(qp_type=ib.QPT_RC, scq=cq, rcq=cq, cap=capacity, sq_sig_all=0))
            self.initialise(qp)
        except ib.PyverbsError as error:
            raise FabricError(
                f"the device {self.name!r} makes no further queue pair: {error}; connect fewer peers, or raise the "
                "memlock limit",
                device=self.name,
            ) from None
        return qp

    def initialise(self, qp: Any) -> None:
        """From RESET to INIT; raises PyverbsError."""
        attributes = ib.QPAttr(port_num=self.port)
        attributes.qp_access_flags = ib.ACCESS_LOCAL_WRITE | ib.ACCESS_REMOTE_WRITE | ib.ACCESS_REMOTE_READ
        attributes.pkey_index = 0
        qp.to_init(attributes)

    def fail(self, qp: Any) -> None:
        """To the error state, in which the device gives every request back; raises PyverbsError."""
        qp.modify(ib.QPAttr(qp_state=ib.QPS_ERROR, port_num=self.port), ib.QP_STATE)

    def reset(self, qp: Any) -> None:
        """From the error state to RESET; raises PyverbsError."""
        qp.modify(ib.QPAttr(qp_state=ib.QPS_RESET, port_num=self.port), ib.QP_STATE)

    def can_reach(self, peer: Hello) -> bool:
        """Whether :meth:`connect` would not have to wait for the peer's link address, which it does with the GIL held.
        Where it would, the address is asked for now, and soon known or still not."""
        if self._by_lid(peer) or not self.interface:
            return True
        return neighbour.known(self.interface, self.gid, peer.gid)

    def unreachable(self, peer: Hello) -> FabricError:
        """What to say of a peer that :meth:`can_reach` has denied for too long."""
        return FabricError(
            f"no queue pair from {self.gid} of {self.name!r} to {peer.gid}: nobody on {self.interface} answers for "
            "that address; check that both are on one network, or choose another address with fabric.gid_index",
            gid=self.gid,
            peer_gid=peer.gid,
            errno=errno.EHOSTUNREACH,
        )

    def _by_lid(self, peer: Hello) -> bool:
        return self.infiniband and peer.infiniband

    def connect(self, qp: Any, lane: int, mine: Hello, peer: Hello) -> None:
        """Bring a queue pair from INIT to RTS; raises :class:`FabricError`. See :meth:`can_reach`."""
        attributes = ib.QPAttr(port_num=self.port)
        attributes.path_mtu = min(mine.mtu, peer.mtu)
        attributes.dest_qp_num = peer.qpns[lane]
        attributes.rq_psn = peer.psns[lane]
        attributes.max_dest_rd_atomic = self.reads_in
        attributes.min_rnr_timer = 12
        try:
            if self._by_lid(peer):
                attributes.ah_attr = ib.AHAttr(port_num=self.port, is_global=0, dlid=peer.lid, sl=0)
            else:
                route = ib.GlobalRoute(dgid=ib.GID(peer.gid), sgid_index=self.gid_index, hop_limit=64)
                attributes.ah_attr = ib.AHAttr(port_num=self.port, is_global=1, gr=route, sl=0)
            qp.to_rtr(attributes)
            attributes.timeout = ACK_TIMEOUT
            attributes.retry_cnt = RETRIES
            attributes.rnr_retry = RNR_FOREVER
            attributes.sq_psn = mine.psns[lane]
            attributes.max_rd_atomic = max(1, min(self.reads_out, peer.reads))
            qp.to_rts(attributes)
        except ib.PyverbsError as error:
            raise FabricError(
                f"no queue pair from {self.gid} of {self.name!r} to {peer.gid}: {error}; check that both are on one "
                "network, or choose another address with fabric.gid_index",
                gid=self.gid,
                peer_gid=peer.gid,
                errno=ib.error_number(error),
            ) from None

    def close(self) -> None:
        self.domain.close()
        self.context.close()


def _first_active(port: int) -> str:
    names = by_distance(ib.device_names())
    if not names:
        raise ib.no_device()
    for name in names:
        context, _ = ib.open_device(name)
        try:
            if context.query_port(port).state == ib.PORT_ACTIVE:
                return name
        except ib.PyverbsError:  # this device has no such port
            continue
        finally:
            context.close()
    raise FabricError(
        f"no RDMA device ({', '.join(names)}) has an active port {port}; set its network interface up, or choose the "
        "port with fabric.port",
        devices=names,
    )
