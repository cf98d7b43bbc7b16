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
from kvd.fabric.verbs import binding as ib
from kvd.fabric.verbs.fabric import CHAIN_LINKS, VerbsFabric
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


def main() -> None:
    items = [(ib.WRITE, 0, 4096 * n, 512, 7, 8192 * n, 9) for n in range(CHAIN_LINKS)]
    chain = ib.Chain(CHAIN_LINKS)
    before = cost(lambda: naive(NoPost(), items))
    after = cost(lambda: chain.post(NoPost(), items, 1, 4))
    print(f"construction, naive               {before:10.0f}")
    print(f"construction, reused chain        {after:10.0f}   {after / before:.2f} of the naive one")
    print(f"write with mask, to completion    {asyncio.run(posted(1000)):10.0f}")


if __name__ == "__main__":
    main()
