"""The pool: leases that wait for late data, limits, fabrics."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from kvd.errors import Busy, FabricError, InvalidArgument, LeaseExpired, OutOfMemory, ShuttingDown
from kvd.memory import limits
from kvd.memory.arena import PAGE, Arena, create_arena
from kvd.memory.leases import Lease
from kvd.memory.pool import Pool
from tests.unit.memory_helpers import ARENA, Registrar, small_pool

# --- leases -------------------------------------------------------------------------------------------------------


def test_a_lease_is_memory_at_a_page_boundary() -> None:
    pool = small_pool()
    first, second = pool.lease(PAGE + 1, "a"), pool.lease(10, "b")
    assert (first.nbytes, len(first.memory), first.mapped_bytes) == (PAGE + 1, PAGE + 1, 2 * PAGE)
    assert second.offset % second.page_size == 0
    first.memory[:] = b"\x01" * (PAGE + 1)
    assert not any(second.memory)
    assert first.generation != second.generation
    status = pool.status()
    assert (status.limit, status.registered, status.in_use, status.leases) == (4 * ARENA, ARENA, 3 * PAGE, 2)
    assert not status.huge_pages
    pool.close()


def test_memory_comes_back_only_when_nothing_may_still_write_to_it() -> None:
    pool = small_pool(1)
    lease = pool.lease(ARENA, "a")
    lease.hold()
    with lease.holding() as memory:
        lease.release()
        memory[0] = 9  # late data of an operation that was under way
        with pytest.raises(OutOfMemory):
            pool.lease(1, "b")
    assert pool.in_use == ARENA
    assert not lease.free
    with pytest.raises(LeaseExpired):
        lease.hold()
    assert lease.memory[0] == 9
    lease.unhold()
    assert (pool.in_use, lease.free, lease.holds) == (0, True, 0)
    lease.release()
    assert (pool.in_use, lease.free, lease.holds) == (0, True, 0), "releasing twice does nothing the second time"
    assert pool.lease(ARENA, "b").generation > lease.generation


def test_a_lease_that_has_gone_back_can_not_be_used() -> None:
    pool = small_pool()
    lease = pool.lease(1, "a")
    lease.release()
    for use in (lambda: lease.memory, lambda: lease.fd, lambda: lease.region("tcp"), lease.hold):
        with pytest.raises(LeaseExpired) as caught:
            use()
        assert caught.value.fields["generation"] == lease.generation
    with pytest.raises(InvalidArgument):
        lease.unhold()


def test_what_a_dead_process_held_comes_back() -> None:
    pool = small_pool()
    mine = [pool.lease(PAGE, "dead") for _ in range(3)]
    other = pool.lease(PAGE, "alive")
    mine[1].hold()
    for lease in pool.leases("dead"):
        lease.release()
    assert pool.leases("dead") == [mine[1]]
    assert pool.in_use == 2 * PAGE
    mine[1].unhold()
    assert pool.leases("dead") == []
    assert pool.leases("alive") == [other]
    assert pool.in_use == PAGE


# --- limits -------------------------------------------------------------------------------------------------------


def test_no_room_says_what_there_is() -> None:
    pool = small_pool(2)
    keep = pool.lease(ARENA - 4 * PAGE, "a")
    pool.lease(ARENA - 2 * PAGE, "a")
    with pytest.raises(OutOfMemory) as caught:
        pool.lease(5 * PAGE, "b")
    assert caught.value.fields == {
        "need": 5 * PAGE,
        "free": 6 * PAGE,
        "largest_free": 4 * PAGE,
        "limit": 2 * ARENA,
        "retry_after_s": 0.5,
    }
    keep.release()
    assert pool.lease(5 * PAGE, "b").nbytes == 5 * PAGE
    with pytest.raises(OutOfMemory, match=r"raise memory\.pool") as caught:
        pool.lease(2 * ARENA + 1, "b")
    assert "retry_after_s" not in caught.value.fields  # waiting does not help


def test_the_hint_when_to_come_back_follows_from_how_long_leases_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("kvd.memory.holdings.time.monotonic", lambda: now[0])
    pool = small_pool(2)
    for _ in range(3):
        lease = pool.lease(PAGE, "a")
        now[0] += 2.0
        lease.release()
    assert pool.retry_after_s == 2.0
    leases = [pool.lease(PAGE, "a") for _ in range(4)]
    assert pool.retry_after_s == 0.5  # one of four that live 2 s each
    now[0] += 1000.0
    for lease in leases:
        lease.release()
    assert pool.retry_after_s == 5.0


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_lease_of_nothing_is_refused(nbytes: int) -> None:
    with pytest.raises(InvalidArgument):
        small_pool().lease(nbytes, "a")


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        Pool(PAGE - 1)


def test_one_process_can_not_take_everything() -> None:
    pool = small_pool(4, client_limit=ARENA)
    first = pool.lease(ARENA - PAGE, "greedy")
    with pytest.raises(Busy) as caught:
        pool.lease(2 * PAGE, "greedy")
    assert caught.value.fields == {"need": 2 * PAGE, "held": ARENA - PAGE, "limit": ARENA, "retry_after_s": 0.5}
    with pytest.raises(OutOfMemory, match="client_limit"):
        pool.lease(ARENA + 1, "other")
    assert pool.lease(2 * PAGE, "other").nbytes == 2 * PAGE
    first.release()
    assert pool.lease(2 * PAGE, "greedy").nbytes == 2 * PAGE


def test_a_large_lease_gets_an_arena_of_its_own_and_returns_it() -> None:
    pool = small_pool(8, keep_bytes=3 * ARENA)
    pool.lease(1, "a")
    large = pool.lease(3 * ARENA, "a")
    assert pool.registered == 4 * ARENA
    large.release()
    assert pool.registered == ARENA
    kept = pool.lease(ARENA + PAGE, "a")
    kept.release()
    assert pool.registered == 2 * ARENA + PAGE, "within keep_bytes it stays for the next one"
    assert pool.lease(ARENA + PAGE, "a").mapped_bytes == ARENA + PAGE
    assert pool.registered == 2 * ARENA + PAGE


def test_empty_arenas_make_way_for_a_large_lease() -> None:
    fabric = Registrar()
    pool = small_pool(4, fabrics=[fabric])
    leases = [pool.lease(ARENA, "a") for _ in range(4)]
    for lease in leases[1:]:
        lease.release()
    assert pool.registered == 4 * ARENA
    assert pool.largest_free == 3 * ARENA
    assert pool.lease(3 * ARENA, "b").nbytes == 3 * ARENA
    assert pool.registered == 4 * ARENA
    assert len(fabric.regions) == 2


def test_the_last_arena_may_be_a_short_one() -> None:
    pool = Pool(ARENA + 3 * PAGE, ARENA, "never")
    pool.lease(ARENA, "a")
    pool.lease(PAGE, "a")
    assert pool.registered == pool.limit
    pool.lease(2 * PAGE, "a")
    with pytest.raises(OutOfMemory):
        pool.lease(1, "a")


def test_prepare_makes_arenas_ahead() -> None:
    pool = Pool(2 * ARENA + PAGE, ARENA, "never")
    pool.prepare(ARENA + 1)
    assert pool.registered == 2 * ARENA
    pool.prepare(1 << 60)
    assert pool.registered == pool.limit


def test_a_long_run_of_leases_fragments_nothing_for_good() -> None:
    rng, pool = random.Random(7), small_pool(4)
    leases: list[Lease] = []
    granted = refused = 0
    for _ in range(20_000):
        if leases and rng.random() < 0.5:
            leases.pop(rng.randrange(len(leases))).release()
            continue
        nbytes = rng.choice([1, PAGE, 2 * PAGE, 3 * PAGE, rng.randrange(1, ARENA), rng.randrange(1, 3 * ARENA)])
        if nbytes <= pool.largest_free:
            leases.append(pool.lease(nbytes, rng.randrange(5)))
            granted += 1
        else:
            with pytest.raises(OutOfMemory):
                pool.lease(nbytes, 0)
            refused += 1
    assert granted > 1000
    assert refused > 100
    for lease in leases:
        lease.release()
    assert (pool.in_use, pool.status().leases) == (0, 0)
    assert pool.lease(4 * ARENA, "all").nbytes == 4 * ARENA
    pool.close()


# --- fabrics ------------------------------------------------------------------------------------------------------


def test_each_arena_is_registered_once_with_each_fabric() -> None:
    tcp, verbs = Registrar("tcp"), Registrar("verbs")
    pool = small_pool(4, fabrics=[tcp, verbs])
    one, two, three = pool.lease(ARENA, "a"), pool.lease(PAGE, "a"), pool.lease(ARENA, "a")
    assert (tcp.made, verbs.made) == (3, 3)
    for lease in (one, two, three):
        for name in ("tcp", "verbs"):
            region = lease.region(name)
            lease.memory[0] = lease.generation
            assert region.memory[lease.offset] == lease.generation
    with pytest.raises(InvalidArgument, match="loopback"):
        one.region("loopback")
    pool.close()
    assert tcp.regions == verbs.regions == []


def test_a_fabric_that_refuses_an_arena_leaves_nothing_behind() -> None:
    tcp, verbs = Registrar("tcp"), Registrar("verbs", room=1)
    pool = small_pool(4, fabrics=[tcp, verbs])
    pool.lease(ARENA, "a")
    with pytest.raises(FabricError, match="LimitMEMLOCK"):
        pool.lease(ARENA, "a")
    assert len(tcp.regions) == 1
    assert pool.registered == ARENA
    verbs.room = 2
    assert pool.lease(ARENA, "a").region("verbs") is verbs.regions[1]


def test_closing_ends_everything_also_what_is_held() -> None:
    tcp = Registrar()
    pool = small_pool(4, fabrics=[tcp])
    held = pool.lease(1, "a")
    held.hold()
    pool.lease(1, "a")
    pool.close()
    pool.close()
    assert tcp.regions == []
    with pytest.raises(ShuttingDown):
        pool.lease(1, "a")
    held.unhold()
    assert held.free
    assert pool.in_use == 0


# --- arenas made in a worker thread -------------------------------------------------------------------------------


async def test_many_that_wait_for_memory_share_the_arena_that_is_made() -> None:
    tcp = Registrar()
    pool = small_pool(4, fabrics=[tcp])
    leases = await asyncio.gather(*(pool.lease_soon(PAGE, n) for n in range(20)))
    assert len({lease.generation for lease in leases}) == 20
    assert tcp.made == 2
    assert (await pool.lease_soon(2 * ARENA, "big")).nbytes == 2 * ARENA
    with pytest.raises(OutOfMemory):
        await pool.lease_soon(ARENA, "late")
    pool.close()


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1])
async def test_a_lease_of_less_than_a_page_makes_one_arena(nbytes: int) -> None:
    """Small fetches are gathered in such leases; with huge pages on "auto" no arena was ever good enough for them."""
    pool = Pool(4 * ARENA, ARENA, "auto")
    lease = await pool.lease_soon(nbytes, "x")
    assert (lease.nbytes, pool.registered) == (nbytes, ARENA)
    assert pool.lease(nbytes, "x").nbytes == nbytes
    assert pool.registered == ARENA
    pool.close()


async def test_what_the_daemon_needs_for_itself_is_not_limited_as_clients_are() -> None:
    pool = small_pool(4, client_limit=ARENA)
    await pool.lease_soon(ARENA, "staging", limited=False)
    await pool.lease_soon(ARENA, "staging", limited=False)
    with pytest.raises(Busy):
        await pool.lease_soon(PAGE, "staging")
    pool.close()


async def test_a_cancelled_wait_leaves_a_usable_arena() -> None:
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()
    started = asyncio.Event()

    def slow(nbytes: int, **more: Any) -> Arena:
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        return create_arena(nbytes, **more)

    pool = small_pool(2, make_arena=slow)
    first = asyncio.create_task(pool.lease_soon(PAGE, "a"))
    await started.wait()
    second = asyncio.create_task(pool.lease_soon(PAGE, "b"))
    await asyncio.sleep(0)
    first.cancel()
    gate.set()
    lease = await second
    assert first.cancelled()
    assert pool.registered == ARENA
    assert pool.leases("b") == [lease]
    pool.close()


async def test_an_arena_that_can_not_be_made_fails_those_who_asked() -> None:
    def refuse(nbytes: int, **more: Any) -> Arena:
        raise OutOfMemory(f"the machine has no {nbytes} bytes", need=nbytes)

    pool = small_pool(2, make_arena=refuse)
    results = await asyncio.gather(*(pool.lease_soon(PAGE, n) for n in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [OutOfMemory] * 3
    assert (pool.registered, pool.in_use) == (0, 0)


# --- huge pages ---------------------------------------------------------------------------------------------------


@pytest.fixture
def with_huge_pages(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Callable[..., Arena]]:
    """Pretends that the system has huge pages of 8 small ones, and makes arenas that say so."""
    page = 8 * PAGE

    def setup(count: int) -> Callable[..., Arena]:
        left = [count]

        def make(nbytes: int, *, huge_page: int = 0, transparent: bool = False) -> Arena:
            arena = create_arena(nbytes)
            if huge_page:
                assert nbytes % page == 0
                left[0] -= nbytes // page
                arena.page_size, arena.kind = page, "hugetlb"
            return arena

        monkeypatch.setattr(limits, "huge_page_size", lambda: page)
        monkeypatch.setattr(limits, "free_huge_pages", lambda size: left[0])
        return make

    return setup


def test_huge_pages_serve_large_leases_and_normal_ones_small_leases(
    with_huge_pages: Callable[[int], Callable[..., Arena]],
) -> None:
    pool = Pool(8 * ARENA, ARENA, "auto", make_arena=with_huge_pages(2))
    large, small = pool.lease(9 * PAGE, "a"), pool.lease(PAGE, "a")
    assert (large.page_size, large.mapped_bytes) == (8 * PAGE, 16 * PAGE)
    assert (small.page_size, small.mapped_bytes) == (PAGE, PAGE)
    assert pool.status().huge_pages
    fallback = pool.lease(ARENA, "a")
    assert fallback.page_size == PAGE, "auto goes on with normal pages when no huge one is free"


def test_small_leases_take_huge_pages_rather_than_fail(
    with_huge_pages: Callable[[int], Callable[..., Arena]],
) -> None:
    pool = Pool(ARENA, ARENA, "auto", make_arena=with_huge_pages(100))
    pool.lease(8 * PAGE, "a")
    assert pool.lease(1, "a").mapped_bytes == 8 * PAGE
    with pytest.raises(OutOfMemory):
        pool.lease(1, "a")


def test_always_takes_nothing_but_huge_pages(with_huge_pages: Callable[[int], Callable[..., Arena]]) -> None:
    pool = Pool(8 * ARENA, ARENA, "always", make_arena=with_huge_pages(100))
    assert pool.lease(1, "a").page_size == 8 * PAGE
    assert pool.lease(3 * ARENA, "a").page_size == 8 * PAGE


def test_prepare_never_exceeds_the_limit_for_a_whole_huge_page(
    with_huge_pages: Callable[[int], Callable[..., Arena]],
) -> None:
    pool = Pool(ARENA + 9 * PAGE, ARENA, "always", make_arena=with_huge_pages(100))
    pool.prepare(1 << 60)
    assert pool.registered == ARENA + 8 * PAGE
    with pytest.raises(OutOfMemory):
        pool.lease(ARENA + 9 * PAGE, "a")
    pool.close()


def test_always_without_huge_pages_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "huge_page_size", lambda: 0)
    with pytest.raises(OutOfMemory, match="auto"):
        Pool(8 * ARENA, ARENA, "always")
