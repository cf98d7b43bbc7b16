"""Channel memory: one base in all channels, balance, refusals that name the channel, nothing lost in a long run."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvd.errors import FabricError, InvalidArgument, KvdError, LeaseExpired, OutOfMemory, ShuttingDown
from kvd.memory.channels import ChannelSpace
from kvd.memory.device import ChannelLease, HostBacking, NpuDevice
from tests.unit.memory_helpers import Registrar

BLACKHOLE = (8, 4_278_190_080, 64)
WORMHOLE = (12, 1_073_741_824, 32)
ODD = (7, 1_000_003, 96)


def device(channels: int = 3, channel_bytes: int = 8192, alignment: int = 64, **more: Any) -> NpuDevice:
    backing = HostBacking(channels, channel_bytes)
    return NpuDevice("npu0", backing, channels=channels, channel_bytes=channel_bytes, alignment=alignment, **more)


# --- space --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "nbytes", "alignment"), [BLACKHOLE, WORMHOLE, ODD])
def test_a_tensor_has_the_same_base_in_all_channels(channels: int, nbytes: int, alignment: int) -> None:
    space = ChannelSpace(channels, nbytes, alignment)
    first, second = space.take(alignment + 1), space.take(2048)
    assert (first, second) == (0, 2 * alignment)
    # Shards and flat tensors stay out of the way of those in all channels.
    shards = space.take(1000, range(channels - 1))
    assert shards % alignment == 0
    assert shards + space.rounded(1000) == space.channel_bytes
    assert space.largest() == shards - 2 * alignment - space.rounded(2048)
    assert [space.used(c) for c in range(channels)] == [
        *[2 * alignment + space.rounded(2048) + space.rounded(1000)] * (channels - 1),
        2 * alignment + space.rounded(2048),
    ]
    # A flat tensor goes beside the shards, where the space of all channels is broken already.
    assert space.take(900, [channels - 1]) >= shards
    space.give(first, alignment + 1)
    assert space.take(2 * alignment) == first


def test_what_one_channel_lacks_is_named() -> None:
    space = ChannelSpace(4, 1000, 10)
    space.take(300, [2])
    with pytest.raises(OutOfMemory, match="channel 2 has 700 bytes free of the 800") as caught:
        space.take(795)
    assert caught.value.fields == {
        "channel": 2,
        "need": 800,
        "free": 700,
        "largest_free": 700,
        "largest_common": 700,
        "largest_tensor": 800,
    }
    low, _, high = space.take(300, [1]), space.take(100, [1]), space.take(300, [1])
    space.give(low, 300, [1])
    space.give(high, 300, [1])
    with pytest.raises(OutOfMemory, match=r"channel 1 has 900 .* 700 .* only 600 in one piece") as caught:
        space.take(700)
    assert caught.value.fields["channel"] == 1
    assert caught.value.fields["largest_free"] == 600


def test_channels_that_agree_on_no_base_are_told_from_full_ones() -> None:
    space = ChannelSpace(2, 100, 1)
    space.take(60, [0])  # at the top
    pad, low = space.take(40, [1]), space.take(60, [1])
    assert (pad, low) == (60, 0)
    space.give(pad, 40, [1])
    assert space.largest([0]) == space.largest([1]) == 40
    with pytest.raises(OutOfMemory, match="channels 0, 1 have only 0 in one piece at the same base") as caught:
        space.take(10)
    assert caught.value.fields["largest_common"] == 0
    assert caught.value.fields["largest_free"] == 40


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ChannelSpace(0, 100), "1 to 64 channels, not 0"),
        (lambda: ChannelSpace(65, 100), "1 to 64 channels, not 65"),
        (lambda: ChannelSpace(2, 63, 64), "channels of 63 bytes hold nothing"),
        (lambda: ChannelSpace(2, 64, 0), "the alignment must be positive"),
        (lambda: ChannelSpace(2, 64).take(0), "a tensor of 0 bytes"),
        (lambda: ChannelSpace(2, 64).take(1, [2]), "channel 2 is named twice or does not exist"),
        (lambda: ChannelSpace(2, 64).take(1, [-1]), "channel -1 is named"),
        (lambda: ChannelSpace(2, 64).take(1, [1, 1]), "channel 1 is named twice"),
        (lambda: ChannelSpace(2, 64).take(1, []), "at least one channel"),
        (lambda: ChannelSpace(2, 64).take_all([]), "each tensor needs a positive size"),
        (lambda: ChannelSpace(2, 64).take_all([8, 0]), "each tensor needs a positive size"),
        (lambda: ChannelSpace(2, 64).give(0, 8), "are not taken as a whole"),
        (lambda: ChannelSpace(2, 64).give(-8, 8), "are not taken as a whole"),
        (lambda: ChannelSpace(2, 64).give(60, 8), "are not taken as a whole"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        call()


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 5),
    st.sampled_from([1, 4]),
    st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 1 << 30)),
        max_size=40,
    ),
)
def test_space_agrees_with_bitmaps(channels: int, grain: int, steps: list[tuple[bool, list[int], int]]) -> None:
    size = 64
    space = ChannelSpace(channels, size, grain)
    taken = [[False] * size for _ in range(channels)]
    pieces: list[tuple[list[int], list[int], list[int]]] = []
    for take, sizes, pick in steps:
        rounded = [space.rounded(n) for n in sizes]
        if take or not pieces:
            named = [c for c in range(channels) if pick >> c & 1] or list(range(channels))
            try:
                bases, fields = space.take_all(sizes, named), None
            except OutOfMemory as error:
                bases, fields = [], error.fields
            if fields is not None:
                channel, common = fields["channel"], [not any(taken[c][i] for c in named) for i in range(size)]
                assert channel in named
                assert fields["free"] == taken[channel].count(False)
                assert fields["need"] == sum(rounded)
                assert fields["largest_free"] == longest([not b for b in taken[channel]])
                assert fields["largest_common"] == longest(common)
                # One tensor is refused only if no place is left for it.
                assert len(sizes) > 1 or longest(common) < rounded[0]
                continue
            for base, n in zip(bases, rounded, strict=True):
                assert base % grain == 0
                for c in named:
                    assert not any(taken[c][base : base + n])
                    taken[c][base : base + n] = [True] * n
            pieces.append((bases, sizes, named))
        else:
            bases, sizes, named = pieces.pop(pick % len(pieces))
            for base, n in zip(bases, sizes, strict=True):
                space.give(base, n, named)
                with pytest.raises(InvalidArgument):
                    space.give(base, n, named)
                for c in named:
                    taken[c][base : base + space.rounded(n)] = [False] * space.rounded(n)
        assert [space.used(c) for c in range(channels)] == [bits.count(True) for bits in taken]
        assert [space.largest([c]) for c in range(channels)] == [longest([not b for b in bits]) for bits in taken]
        assert space.largest() == longest([not any(bits) for bits in zip(*taken, strict=True)])
    for bases, sizes, named in pieces:
        for base, n in zip(bases, sizes, strict=True):
            space.give(base, n, named)
    assert space.empty


def longest(bits: list[bool]) -> int:
    best = run = 0
    for bit in bits:
        run = run + 1 if bit else 0
        best = max(best, run)
    return best


def test_tensors_lie_end_to_end_where_there_is_room_and_in_few_pieces_where_not() -> None:
    space = ChannelSpace(2, 100, 1)
    assert space.take_all([10, 20, 5]) == [0, 10, 30]
    space.take(10)
    space.give(10, 20)
    assert space.take_all([15, 5, 40, 5]) == [10, 25, 45, 85]
    with pytest.raises(OutOfMemory):
        space.take_all([5, 11])
    assert space.gaps() == [(90, 10)]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_long_run_of_requests_refuses_nothing_that_there_is_room_for(seed: int) -> None:
    """KV caches of 128 to 8,192 tokens, 16 layers of K and V, in random order, with up to 95 % of all bytes taken."""
    rng, space = random.Random(seed), ChannelSpace(8, 256 << 20, 64)
    running: list[tuple[list[int], int]] = []
    used = pieces = 0
    for _ in range(1500):
        tokens = -(-int(math.exp(rng.uniform(math.log(128), math.log(8192)))) // 32) * 32
        nbytes = tokens * 128  # one head of 128 in bf16 for each of four cards, over 8 channels
        while used + 32 * nbytes > 0.95 * space.channel_bytes:
            bases, size = running.pop(rng.randrange(len(running)))
            for base in bases:
                space.give(base, size)
            used -= 32 * size
        bases = space.take_all([nbytes] * 32)
        pieces += 1 + sum(b != a + nbytes for a, b in itertools.pairwise(bases))
        running.append((bases, nbytes))
        used += 32 * nbytes
        assert {space.used(c) for c in range(8)} == {used}
    assert pieces < 3 * 1500
    for bases, size in running:
        for base in bases:
            space.give(base, size)
    assert space.empty
    assert space.gaps() == [(0, 256 << 20)]


# --- device -------------------------------------------------------------------------------------------------------


def test_each_channel_is_memory_and_a_region_of_its_own() -> None:
    tcp, loopback = Registrar(), Registrar("loopback")
    npu = device(channels=3, fabrics=[tcp, loopback])
    assert len(tcp.regions) == len(loopback.regions) == 3
    lease = npu.lease(1000, "A")
    for channel in range(3):
        lease.memory(channel)[:4] = bytes([channel + 1] * 4)
        assert lease.memory(channel).nbytes == 1000
        region = lease.region(channel, "tcp")
        assert region is npu.region(channel, "tcp")
        assert region.nbytes == 8192
        assert bytes(region.memory[lease.base : lease.base + 4]) == bytes([channel + 1] * 4)
        with open(lease.fd(channel), "rb", closefd=False) as file:
            assert file.read()[lease.base : lease.base + 4] == bytes([channel + 1] * 4)
    assert lease.address == npu.origin + lease.base
    npu.close()
    npu.close()
    assert tcp.regions == loopback.regions == []


def test_a_lease_of_shards_has_nothing_elsewhere() -> None:
    npu = device()
    shards, flat = npu.lease(100, "A", channels=[0, 1]), npu.lease(100, "A", channels=[2])
    assert (shards.channels, flat.channels) == ((0, 1), (2,))
    with pytest.raises(InvalidArgument, match="nothing in channel 2 of 'npu0', only in 0, 1"):
        shards.memory(2)
    with pytest.raises(InvalidArgument, match=r"fabric 'tcp'.*registered with no fabric"):
        shards.region(0, "tcp")
    npu.close()


def test_tensors_of_a_request_share_a_lease() -> None:
    npu = device()
    lease = npu.lease_tensors([1000, 2048, 64], "A")
    assert lease.bases == (0, 1024, 3072)
    assert lease.nbytes == 3112
    assert lease.extents == [(0, 1000), (1024, 2112)]
    lease.memory(1, tensor=1)[:] = b"\7" * 2048
    assert bytes(npu.memory(1)[1024:3072]) == b"\7" * 2048
    lease.release()
    assert npu.status().used == [0, 0, 0]
    npu.close()


def test_late_data_never_lands_in_memory_that_somebody_else_has() -> None:
    npu = device(channel_bytes=8192)
    lease = npu.lease(8192, "A")
    lease.hold()
    lease.release()
    assert npu.leases("A") == [lease]
    with pytest.raises(OutOfMemory, match="device 'npu0': channel 0 has 0 bytes free") as caught:
        npu.lease(64, "B")
    assert caught.value.fields["device"] == "npu0"
    lease.memory(0)[:] = b"\1" * 8192  # what was under way
    with pytest.raises(LeaseExpired):
        lease.hold()
    lease.unhold()
    after = npu.lease(64, "B")
    assert after.base == lease.base
    assert after.generation > lease.generation
    for touch in (lambda: lease.memory(0), lambda: lease.region(0, "tcp"), lambda: lease.fd(0)):
        with pytest.raises(LeaseExpired):
            touch()
    lease.release()
    assert npu.leases("B") == [after]
    npu.close()


def test_a_fabric_that_has_no_room_leaves_nothing_behind() -> None:
    tcp, verbs = Registrar(), Registrar("verbs", room=2)
    with pytest.raises(FabricError):
        device(fabrics=[tcp, verbs])
    assert tcp.regions == verbs.regions == []
    npu = device(fabrics=[tcp])
    with pytest.raises(FabricError):
        npu.add_fabric(verbs)
    assert verbs.regions == []
    assert len(tcp.regions) == 3
    npu.close()
    with pytest.raises(ShuttingDown, match="'npu0' is closed"):
        npu.lease(1, "A")


def test_channels_that_the_system_has_no_memory_for_leave_nothing_behind() -> None:
    made: list[Any] = []

    class Arena:
        closed = False

        def close(self) -> None:
            self.closed = True

    def make(nbytes: int) -> Any:
        if len(made) == 2:
            raise OutOfMemory("no memory", need=nbytes)
        made.append(Arena())
        return made[-1]

    with pytest.raises(OutOfMemory):
        HostBacking(3, 4096, make_arena=make)
    assert [arena.closed for arena in made] == [True, True]


def test_status_has_the_numbers_of_each_channel() -> None:
    npu = device(channels=2, channel_bytes=8192)
    npu.lease(1024, "A")
    npu.lease(1024, "A", channels=[1])
    status = npu.status()
    assert (status.name, status.backing, status.channel_bytes, status.alignment) == ("npu0", "host", 8192, 64)
    assert (status.used, status.largest_free, status.largest_common) == ([1024, 2048], [7168, 6144], 6144)
    assert status.leases == 2
    npu.close()


class DeviceMachine(RuleBasedStateMachine):
    """Leases, holds and processes that die, in any order, on 7 channels."""

    CHANNELS, SIZE = 7, 4096

    def __init__(self) -> None:
        super().__init__()
        self.npu = NpuDevice(
            "npu0", HostBacking(self.CHANNELS, self.SIZE), channels=self.CHANNELS, channel_bytes=self.SIZE, alignment=32
        )
        self.kept: list[ChannelLease] = []
        self.generations: set[int] = set()

    @rule(
        sizes=st.lists(st.integers(1, 900), min_size=1, max_size=4),
        owner=st.sampled_from("ABC"),
        mask=st.one_of(st.none(), st.integers(1, 127)),
    )
    def lease(self, sizes: list[int], owner: str, mask: int | None) -> None:
        channels = None if mask is None else [c for c in range(self.CHANNELS) if mask >> c & 1]
        try:
            lease = self.npu.lease_tensors(sizes, owner, channels=channels)
        except OutOfMemory:
            assert self.kept
            return
        assert lease.generation not in self.generations
        self.generations.add(lease.generation)
        for channel in lease.channels:
            for tensor in range(len(sizes)):
                lease.memory(channel, tensor)[:] = bytes([lease.generation % 251]) * sizes[tensor]
        self.kept.append(lease)

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), what=st.sampled_from(["hold", "unhold", "release"]))
    def touch(self, data: Any, what: str) -> None:
        lease = data.draw(st.sampled_from(self.kept))
        allowed = {"hold": not lease.released, "unhold": lease.holds > 0, "release": True}[what]
        try:
            getattr(lease, what)()
        except KvdError:
            assert not allowed
        else:
            assert allowed

    @rule(owner=st.sampled_from("ABC"))
    def dies(self, owner: str) -> None:
        for lease in self.npu.leases(owner):
            lease.release()
        assert all(lease.holds for lease in self.npu.leases(owner))

    @invariant()
    def bytes_are_counted_and_nobody_elses(self) -> None:
        self.kept = [lease for lease in self.kept if not lease.free]
        for lease in self.kept:
            for channel in lease.channels:
                for tensor, nbytes in enumerate(lease.sizes):
                    assert bytes(lease.memory(channel, tensor)) == bytes([lease.generation % 251]) * nbytes
        status = self.npu.status()
        for channel in range(self.CHANNELS):
            there = [lease for lease in self.kept if channel in lease.channels]
            assert status.used[channel] == sum(-(-n // 32) * 32 for lease in there for n in lease.sizes)
        assert status.leases == len(self.kept)
        assert sorted(lease.generation for owner in "ABC" for lease in self.npu.leases(owner)) == sorted(
            lease.generation for lease in self.kept
        )

    def teardown(self) -> None:
        for lease in self.kept:
            while lease.holds:
                lease.unhold()
            lease.release()
        status = self.npu.status()
        assert (status.used, status.largest_common) == ([0] * self.CHANNELS, self.SIZE)
        self.npu.close()


DeviceMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
TestDevice = DeviceMachine.TestCase
