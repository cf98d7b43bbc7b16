"""What crosses between verbs fabrics, the choice of an address, and registration errors; needs no device."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import FabricError, ProtocolError
from kvd.fabric.verbs import advice
from kvd.fabric.verbs.wire import (
    HEADER,
    ID_BYTES,
    KEY_BYTES,
    VERSION,
    Gone,
    Header,
    Hello,
    Kind,
    Rebuild,
    Rebuilt,
    Token,
    unpack_frame,
    unpack_hello,
    unpack_token,
    unpack_told,
)

KEY = bytes(range(KEY_BYTES))
U64 = st.integers(0, 2**64 - 1)

tokens = st.builds(
    Token,
    id=st.binary(min_size=ID_BYTES, max_size=ID_BYTES),
    address=U64,
    length=U64,
    rkey=st.integers(0, 2**32 - 1),
    writable=st.booleans(),
    readable=st.booleans(),
)

HELLO = Hello(
    version=VERSION,
    gid="0000:0000:0000:0000:0000:ffff:0a4d:0001",
    lid=0,
    infiniband=False,
    mtu=3,
    qpns=(17, 18),
    psns=(1, 2),
    reads=16,
    slots=64,
    slot_bytes=4136,
    key=KEY,
)


@given(tokens)
def test_tokens(token: Token) -> None:
    packed = token.pack(KEY)
    assert len(packed) <= 64
    assert unpack_token(packed, KEY) == token


@given(tokens, st.data())
def test_a_changed_token_is_none(token: Token, data: st.DataObject) -> None:
    packed = bytearray(token.pack(KEY))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    assert unpack_token(bytes(packed), KEY) is None


@given(tokens)
def test_a_token_of_another_fabric_is_none(token: Token) -> None:
    assert unpack_token(token.pack(KEY[::-1]), KEY) is None


@given(st.binary(max_size=80))
def test_garbage_is_no_token(garbage: bytes) -> None:
    assert unpack_token(garbage, KEY) is None


def test_hello() -> None:
    assert unpack_hello(HELLO.pack()) == HELLO
    assert len(HELLO.pack()) < 4096


@given(st.binary(max_size=200))
def test_garbage_is_no_hello(garbage: bytes) -> None:
    with pytest.raises(FabricError, match="same release"):
        unpack_hello(garbage)


@pytest.mark.parametrize(
    "change",
    [
        {"version": VERSION + 1},
        {"slots": 0},
        {"slot_bytes": HEADER.size},
        {"key": b"short"},
        {"mtu": 0},
        {"mtu": 6},
        {"qpns": (17, 1 << 24)},
        {"psns": (-1, 2)},
        {"scratch": (-1, 1)},
        {"scratch": (1 << 63, 1 << 32)},
    ],
)
def test_a_hello_that_does_not_fit(change: dict[str, object]) -> None:
    fields = {name: getattr(HELLO, name) for name in HELLO.__struct_fields__}
    with pytest.raises(FabricError, match="same release"):
        unpack_hello(Hello(**{**fields, **change}).pack())


@given(st.sampled_from(Kind), st.binary(max_size=300), st.lists(U64, min_size=4, max_size=4))
def test_frames(kind: Kind, body: bytes, totals: list[int]) -> None:
    header = Header(kind, len(body), *totals)
    frame = bytearray(HEADER.size + len(body))
    header.pack_into(memoryview(frame), 0)
    frame[HEADER.size :] = body
    assert unpack_frame(memoryview(frame)) == (header, body)
    with pytest.raises(ValueError, match="frame"):
        unpack_frame(memoryview(frame + b"x"))
    with pytest.raises(ValueError, match="frame"):
        unpack_frame(memoryview(frame)[: HEADER.size - 1])


IPV4 = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
GLOBAL = "2001:0db8:0000:0000:0000:0000:0000:0001"
LINK_LOCAL = "fe80:0000:0000:0000:5054:00ff:fe12:3456"


def choose(table: list[tuple[int, str, bool]], wanted: int = -1, infiniband: bool = False) -> tuple[int, str]:
    return advice.choose_gid(table, wanted, infiniband=infiniband, device="mlx5_0")


def test_an_ipv4_address_of_roce_v2_is_preferred() -> None:
    table = [(0, LINK_LOCAL, False), (1, LINK_LOCAL, True), (2, GLOBAL, True), (3, IPV4, False), (4, IPV4, True)]
    assert choose(table) == (4, IPV4)
    assert choose(table[:4]) == (2, GLOBAL)
    assert choose(table, 3) == (3, IPV4)


def test_a_link_local_address_is_never_chosen() -> None:
    with pytest.raises(FabricError, match=r"no RoCE v2 GID that is not link-local.*1: fe80.*IP address"):
        choose([(1, LINK_LOCAL, True)])
    with pytest.raises(FabricError, match=r"no GID 7.*it has none"):
        choose([], 7)


def test_a_link_local_address_that_is_asked_for_is_refused() -> None:
    """It would connect, and carry nothing to another network."""
    table = [(0, LINK_LOCAL, True), (1, IPV4, True), (2, GLOBAL, True)]
    with pytest.raises(FabricError, match=r"link-local GID 0.*set fabric.gid_index to 1 or 2, or to -1"):
        choose(table, 0)
    with pytest.raises(FabricError, match=r"no GID 9 .*set fabric.gid_index to 1 or 2, or to -1"):
        choose(table, 9)
    assert choose(table, 2) == (2, GLOBAL)
    assert choose([(0, LINK_LOCAL, True)], 0, infiniband=True) == (0, LINK_LOCAL)


def test_infiniband_takes_the_first() -> None:
    assert choose([(0, LINK_LOCAL, False)], infiniband=True) == (0, LINK_LOCAL)


def test_memory_that_must_not_be_locked_is_refused_before_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "memlock_limit", lambda: 8 << 20)
    advice.check_memlock("mlx5_0", 8 << 20)
    with pytest.raises(
        FabricError, match=r"limit is 8388608 bytes, but the pool has 8388609, .*LimitMEMLOCK"
    ) as raised:
        advice.check_memlock("mlx5_0", (8 << 20) + 1)
    assert (raised.value.fields["need"], raised.value.fields["limit"]) == ((8 << 20) + 1, 8 << 20)
    monkeypatch.setattr(advice, "memlock_limit", lambda: None)
    advice.check_memlock("mlx5_0", 1 << 50)


def test_registration_errors_name_limit_need_and_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "memlock_limit", lambda: 65536)
    error = advice.registration_error("mlx5_0", 1 << 30, errno.ENOMEM, "Failed to register")
    assert (error.fields["need"], error.fields["limit"]) == (1 << 30, 65536)
    assert "65536" in error.message
    assert "LimitMEMLOCK" in error.message
    monkeypatch.setattr(advice, "memlock_limit", lambda: None)
    assert "memory.pool" in advice.registration_error("mlx5_0", 1, errno.ENOMEM, "x").message
    assert "nvidia-peermem" in advice.registration_error("mlx5_0", 1, errno.EFAULT, "x").message
    assert "kernel log" in advice.registration_error("mlx5_0", 1, errno.EIO, "x").message


@pytest.mark.parametrize("message", [Rebuild(1, 3, 77, 12, "why"), Rebuilt(0, 1), Gone("it was closed")])
def test_what_is_told(message: Rebuild | Rebuilt | Gone) -> None:
    assert unpack_told(msgspec.msgpack.encode(message)) == message


@pytest.mark.parametrize(
    "message", [Rebuild(2, 3, 77, 12, ""), Rebuild(-1, 3, 77, 12, ""), Rebuilt(0, 0), Rebuilt(0, -1)]
)
def test_lanes_and_times_that_can_not_be_are_refused(message: Rebuild | Rebuilt) -> None:
    with pytest.raises(ProtocolError, match="told of lane"):
        unpack_told(msgspec.msgpack.encode(message))


@given(st.binary(max_size=64))
def test_foreign_bytes_told_are_an_error(blob: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        unpack_told(blob)


def machine(folder: Path, devices: dict[str, tuple[str, int]], cpus: dict[int, int], gpus: dict[str, str]) -> Path:
    """A /sys with RDMA devices (PCI path and NUMA node), CPUs on nodes, and GPUs (address and PCI path)."""
    sys = folder / "sys"
    (sys / "class/infiniband").mkdir(parents=True)
    for name, (path, node) in devices.items():
        device = sys / "devices" / path
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        (sys / "class/infiniband" / name).mkdir()
        (sys / "class/infiniband" / name / "device").symlink_to(device)
    for cpu, node in cpus.items():
        (sys / f"devices/system/cpu/cpu{cpu}/node{node}").mkdir(parents=True)
    driver = sys / "bus/pci/drivers/nvidia"
    driver.mkdir(parents=True)
    for address, path in gpus.items():
        (sys / "devices" / path).mkdir(parents=True)
        (driver / address).symlink_to(sys / "devices" / path)
    return sys


NICS = {
    "mlx5_0": ("pci0000:00/0000:00:01.0/0000:01:00.0", 0),
    "mlx5_1": ("pci0000:80/0000:80:01.0/0000:81:00.0", 1),
    "mlx5_2": ("pci0000:80/0000:80:02.0/0000:82:00.0", 1),
    "rxe0": ("virtual/rxe0", -1),
}


def test_the_device_on_the_processs_numa_node_is_near(tmp_path: Path) -> None:
    sys = machine(tmp_path, NICS, {0: 0, 1: 0, 2: 1, 3: 1}, {})
    names = sorted(NICS)
    assert advice.by_distance(names, sys, [2, 3]) == ["mlx5_1", "mlx5_2", "rxe0", "mlx5_0"]
    assert advice.by_distance(names, sys, [0]) == ["mlx5_0", "rxe0", "mlx5_1", "mlx5_2"]
    assert advice.by_distance(names, sys, [0, 3]) == names


def test_of_those_the_one_behind_the_gpus_bridge_is_near(tmp_path: Path) -> None:
    sys = machine(tmp_path, NICS, {0: 1}, {"0000:83:00.0": "pci0000:80/0000:80:02.0/0000:83:00.0"})
    assert advice.by_distance(sorted(NICS), sys, [0]) == ["mlx5_2", "mlx5_1", "rxe0", "mlx5_0"]


def test_a_system_that_tells_nothing_changes_no_order(tmp_path: Path) -> None:
    assert advice.by_distance(["b", "a"], tmp_path, [0]) == ["b", "a"]


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EBADF, "not a dma-buf"),
        (errno.EOPNOTSUPP, "no dma-buf support"),
        (errno.ENOMEM, "kernel log"),
    ],
)
def test_a_dmabuf_that_is_refused_says_why(number: int, fix: str) -> None:
    error = advice.dmabuf_error("mlx5_0", 4096, number, "Failed")
    assert fix in error.message
    assert error.fields["errno"] == number
