"""The pool under any order of leases, releases, late data and growth (a state machine of hypothesis)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvd.errors import Busy, LeaseExpired, OutOfMemory
from kvd.memory.arena import PAGE
from kvd.memory.leases import Lease
from tests.unit.memory_helpers import ARENA, Registrar, small_pool


class PoolMachine(RuleBasedStateMachine):
    """Any order of leases, holds and releases: no two leases share a byte, and nothing is lost."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.fabric = Registrar()
        self.pool = small_pool(3, fabrics=[self.fabric], client_limit=2 * ARENA)
        self.alive: dict[int, Lease] = {}
        self.generations: set[int] = set()

    @rule(target=leases, nbytes=st.integers(1, 2 * ARENA + PAGE), owner=st.integers(0, 2))
    def lease(self, nbytes: int, owner: int) -> Lease | None:
        held = sum(lease.mapped_bytes for lease in self.pool.leases(owner))
        if held + nbytes > 2 * ARENA or nbytes > self.pool.largest_free:
            with pytest.raises((Busy, OutOfMemory)):
                self.pool.lease(nbytes, owner)
            return None
        lease = self.pool.lease(nbytes, owner)
        assert lease.generation not in self.generations
        self.generations.add(lease.generation)
        self.alive[lease.generation] = lease
        mark = lease.generation % 251
        lease.memory[0] = lease.memory[nbytes - 1] = mark
        return lease

    @rule(lease=leases)
    def hold(self, lease: Lease | None) -> None:
        if lease is not None:
            if lease.released:
                with pytest.raises(LeaseExpired):
                    lease.hold()
            else:
                lease.hold()

    @rule(lease=leases)
    def unhold(self, lease: Lease | None) -> None:
        if lease is not None and lease.holds:
            lease.unhold()

    @rule(lease=leases)
    def release(self, lease: Lease | None) -> None:
        if lease is not None:
            lease.release()

    @rule(owner=st.integers(0, 2))
    def lose_process(self, owner: int) -> None:
        for lease in self.pool.leases(owner):
            lease.release()
        assert all(lease.holds and lease.released for lease in self.pool.leases(owner))

    @invariant()
    def nothing_overlaps_and_nothing_is_lost(self) -> None:
        for generation, lease in list(self.alive.items()):
            assert lease.free == (lease.released and not lease.holds)
            if lease.free:
                del self.alive[generation]
            else:
                mark = generation % 251
                assert lease.memory[0] == lease.memory[lease.nbytes - 1] == mark
        spans = sorted((lease.fd, lease.offset, lease.offset + lease.mapped_bytes) for lease in self.alive.values())
        for (fd, _, end), (next_fd, start, _) in itertools.pairwise(spans):
            assert fd != next_fd or end <= start
        assert self.pool.in_use == sum(lease.mapped_bytes for lease in self.alive.values())
        assert self.pool.status().leases == len(self.alive)
        assert self.pool.registered <= self.pool.limit
        assert sum(region.nbytes for region in self.fabric.regions) == self.pool.registered

    def teardown(self) -> None:
        self.pool.close()
        assert self.fabric.regions == []


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
