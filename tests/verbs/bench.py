"""What a work request costs the CPU, in instructions: naive construction against the reused chain.

    python -m tests.verbs.run --count -- python -m tests.verbs.bench

``--count`` lets the guest's clock advance by 1 ns an instruction, so that the figures repeat. Without it they are
nanoseconds. Construction is what kvd does in Python and in pyverbs; posting, which is the same for both, is apart.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

from kvd.fabric.conformance import connected, one
from kvd.fabric.regions import address_of
from kvd.fabric.verbs import binding as ib
from kvd.fabric.verbs.device import Device
from kvd.fabric.verbs.fabric import CHAIN_LINKS, VerbsFabric
from kvd.fabric.verbs.wire import VERSION, Hello
from kvd.types import Lane
from tests.verbs.devices import DEVICES

ROUNDS = 20


class NoPost:
    """Takes a chain and does nothing."""

    def post_send(self, request: Any) -> None:
        pass


def naive(qp: Any, items: list[ib.Item]) -> None:
    """An entry, a request and a post for each."""
    for opcode, flags, address, length, lkey, remote, rkey in items:
        entry = ib.SGE(address, length, lkey)
        request = ib.SendWR(1, opcode=opcode, num_sge=1, sg=[entry], send_flags=flags)
        request.set_wr_rdma(rkey, remote)
        qp.post_send(request)
        request.close()
        entry.close()


def cost(work: Callable[[], object]) -> float:
    """Of one request, when ``work`` makes ``CHAIN_LINKS`` of them; the least of several rounds."""
    least = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        work()
        least = min(least, time.perf_counter_ns() - start)
    return least / CHAIN_LINKS


async def posted(count: int) -> float:
    """Of one write with its mask through the whole fabric, submission to completion, with rxe's own work."""
    devices = itertools.cycle(DEVICES)
    async with connected(lambda: VerbsFabric(device=next(devices))) as pair:
        _, region = pair.left.memory(4096)
        _, grant = pair.right.granted(4096)
        start = time.perf_counter_ns()
        operations = [
            pair.left.endpoint.write(Lane.BULK, region, grant.token, one(0, 0, 512), then=one(4095, 4095, 1))
            for _ in range(count)
        ]
        submitted = time.perf_counter_ns()
        await asyncio.gather(*(operation.done for operation in operations))
        print(f"write with mask, submission       {(submitted - start) / count:10.0f}")
        return (time.perf_counter_ns() - start) / count


class Ends:
    """Two connected queue pairs, with memory registered at both ends, and scatter lists for receiving."""

    def __init__(self, rows: int, nbytes: int) -> None:
        self.devices = [Device(name) for name in DEVICES]
        self.queues = [ib.CQ(device.context, 256, None, None, 0) for device in self.devices]
        self.pairs = []
        for device, queue in zip(self.devices, self.queues, strict=True):
            room = ib.QPCap(max_send_wr=rows, max_recv_wr=4, max_send_sge=1, max_recv_sge=rows, max_inline_data=0)
            qp = ib.QP(device.domain, ib.QPInitAttr(qp_type=ib.QPT_RC, scq=queue, rcq=queue, cap=room, sq_sig_all=0))
            device.initialise(qp)
            self.pairs.append(qp)
        hellos = [
            Hello(
                VERSION, device.gid, 0, False, device.mtu, (qp.qp_num, 0), (1, 1), device.reads_in, 1, 4096, bytes(32)
            )
            for device, qp in zip(self.devices, self.pairs, strict=True)
        ]
        self.devices[0].connect(self.pairs[0], 0, hellos[0], hellos[1])
        self.devices[1].connect(self.pairs[1], 0, hellos[1], hellos[0])
        self.memory = [memoryview(bytearray(nbytes)) for _ in DEVICES]
        self.keys = [
            device.register(address_of(memory), nbytes, remote_write=True)
            for device, memory in zip(self.devices, self.memory, strict=True)
        ]

    def wait(self, end: int) -> None:
        """For one completion."""
        while True:
            count, completions = self.queues[end].poll(1)
            if count:
                assert completions[0].status == ib.SUCCESS, ib.describe_status(completions[0].status)
                return


def answers(rows: int, size: int) -> tuple[float, float]:
    """Of one on-demand answer of ``rows`` entries to as many places, by one WRITE each in one chain, and by one SEND
    into a scatter list that the other side has posted for it; from the first call to the completion."""
    ends = Ends(rows, 2 * rows * size)
    near, far = (address_of(memory) for memory in ends.memory)
    chain = ib.Chain(rows)
    items = [
        (ib.WRITE, 0, near + n * size, size, ends.keys[0].lkey, far + 2 * n * size, ends.keys[1].rkey)
        for n in range(rows)
    ]
    whole = ib.SGE(near, rows * size, ends.keys[0].lkey)
    message = ib.SendWR(1, opcode=ib.SEND, num_sge=1, sg=[whole], send_flags=ib.SIGNALED)
    places = [ib.SGE(far + 2 * n * size, size, ends.keys[1].lkey) for n in range(rows)]

    def write() -> None:
        chain.post(ends.pairs[0], items, 1, 4)
        ends.wait(0)

    def send() -> None:
        receive = ib.RecvWR(wr_id=2, num_sge=rows, sg=places)  # the places differ each time, and it can't be refilled
        ends.pairs[1].post_recv(receive)
        ends.pairs[0].post_send(message)
        ends.wait(0)
        ends.wait(1)
        receive.close()

    result = (cost(write) * CHAIN_LINKS, cost(send) * CHAIN_LINKS)
    assert ends.memory[1][:size] == ends.memory[0][:size]
    return result


def main() -> None:
    items = [(ib.WRITE, 0, 4096 * n, 512, 7, 8192 * n, 9) for n in range(CHAIN_LINKS)]
    chain = ib.Chain(CHAIN_LINKS)
    before = cost(lambda: naive(NoPost(), items))
    after = cost(lambda: chain.post(NoPost(), items, 1, 4))
    print(f"construction, naive               {before:10.0f}")
    print(f"construction, reused chain        {after:10.0f}   {after / before:.2f} of the naive one")
    print(f"write with mask, to completion    {asyncio.run(posted(1000)):10.0f}")
    for size in (128, 1024):
        written, sent = answers(CHAIN_LINKS, size)
        print(f"{CHAIN_LINKS} entries of {size:4d} B, one WRITE each {written:10.0f}")
        print(f"{CHAIN_LINKS} entries of {size:4d} B, one SEND       {sent:10.0f}   {sent / written:.2f} of the WRITEs")


if __name__ == "__main__":
    main()
