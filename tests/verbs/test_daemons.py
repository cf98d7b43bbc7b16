"""Daemons move transfers over two RDMA devices, whole and selectively, through faults, and beside one that has none; no
daemon loads torch. What starts where, and what does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvd.cli.doctor import doctor
from kvd_client import Client
from kvd_client.errors import DeadlineExceeded, FingerprintMismatch
from tests.integration.daemons import DaemonProcess, free_port, small_spec
from tests.integration.test_selective import expected, layer_of, put_all, random_index
from tests.integration.test_transfer import check, put
from tests.verbs.conftest import PATIENT, SMALL
from tests.verbs.devices import DEVICES, link_down, needs_devices, packets_vanish
from tests.verbs.forked import ForkedDaemon
from tests.waiting import eventually

pytestmark = [needs_devices, pytest.mark.timeout(180)]

WAIT_S = 90.0
SPEC = small_spec()


def test_a_transfer(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    assert (source.status().fabric, sink.status().fabric) == ("verbs", "verbs, tcp")
    for client, device, address in ((source, DEVICES[0], "0a4d:0001"), (sink, DEVICES[1], "0a4d:0002")):
        assert client.status().device.startswith(f"{device} port 1, GID ")
        assert client.status().device.endswith(f":{address}), MTU 4096")
    with sink.decode("first", SPEC, [100, 37], source="prefill") as decode:
        with source.prefill("first", SPEC, [100, 37]) as prefill:
            put(prefill, SPEC, [100, 37])
            prefill.finish(timeout_s=WAIT_S)
        decode.wait_ready(timeout_s=WAIT_S)
        check(decode, SPEC, [100, 37])


def test_a_row_of_transfers_gives_everything_back(
    daemons: tuple[DaemonProcess, DaemonProcess], clients: tuple[Client, Client]
) -> None:
    source, sink = clients
    for number in range(6):
        if number == 3:  # the memory and the session are there now
            descriptors = [_opened(daemon) for daemon in daemons]
        request = f"row-{number}"
        with source.prefill(request, SPEC, [64], sink="decode") as prefill, sink.decode(request, SPEC, [64]) as decode:
            put(prefill, SPEC, [64], seed=number)
            decode.wait_ready(timeout_s=WAIT_S)
            prefill.finish(timeout_s=WAIT_S)
            check(decode, SPEC, [64], seed=number)
    # A revocation asks the other side first.
    assert memory_is_back(source, sink)
    # A client's own descriptors go a moment after its transfer.
    most = [len(before) for before in descriptors]
    eventually("no descriptor is left", lambda: [len(_opened(daemon)) for daemon in daemons] <= most)


def _opened(daemon: DaemonProcess) -> list[str]:
    folder = Path(f"/proc/{daemon.pid}/fd")
    return [str(path.readlink()) for path in folder.iterdir() if path.is_symlink()]


@pytest.mark.parametrize("mode", ["partial", "speculative"])
def test_selected_entries_are_the_sources(clients: tuple[Client, Client], mode: str) -> None:
    """The demo's transfer without a model: a few blocks are pushed, the rest is fetched on demand, row by row."""
    source, sink = clients
    lengths, k = [600, 340], 60
    with sink.decode(mode, SPEC, lengths, source="prefill", mode=mode, landing_entries=k) as decode:
        prefill = source.prefill(mode, SPEC, lengths)
        put_all(prefill, lengths)
        prefill.finish(wait=False)
        decode.wait_ready(0, timeout_s=WAIT_S)
        decode.wait_ready(1, timeout_s=WAIT_S)
        for step in range(3):
            for layer in (2, 3):
                index = random_index(10 * step + layer, lengths, k)
                order = np.zeros_like(index)
                entries = decode.select(layer, index, slot=layer % 2, order=order, timeout_s=WAIT_S)
                assert np.array_equal(np.sort(order), np.sort(index))
                assert np.array_equal(entries, expected(layer, lengths, order))
                local = decode.mask(layer).copy() == 1
                assert np.array_equal(decode.layer(layer)[local], layer_of(layer, lengths)[local])
        assert decode.selection_counters().fetched.sum() > 0
        if mode == "speculative":
            while not decode.poll_ready(3):
                decode.idle(3)
                decode.select(3, random_index(1, lengths, k), timeout_s=WAIT_S)
            decode.wait_ready(timeout_s=WAIT_S)
            for layer in range(SPEC.layers):
                for row, length in enumerate(lengths):
                    assert np.array_equal(decode.layer(layer)[row, :length], layer_of(layer, lengths)[row, :length])
    prefill.release()


def test_a_mixed_cluster_agrees_pair_by_pair(cluster: dict[str, DaemonProcess], clients: tuple[Client, Client]) -> None:
    source, sink = clients
    transfer(source, sink, "prefill", "over-verbs")
    with cluster["plain"].client("plain") as plain:
        transfer(plain, sink, "plain", "over-tcp")
        transfer(sink, plain, "decode", "and-back")
        assert {peer.node: peer.fabric for peer in sink.status().peers} == {"prefill": "verbs", "plain": "tcp"}
        with pytest.raises(FingerprintMismatch, match=r"fabrics: \['tcp'\] on plain, \['verbs'\] on prefill"):  # noqa: SIM117
            with plain.decode("never", SPEC, [16], source="prefill") as decode:
                decode.wait_ready(timeout_s=WAIT_S)


def transfer(source: Client, sink: Client, name: str, request: str, lengths: tuple[int, ...] = (64,)) -> None:
    with sink.decode(request, SPEC, [*lengths], source=name) as decode:
        with source.prefill(request, SPEC, [*lengths]) as prefill:
            put(prefill, SPEC, [*lengths])
            prefill.finish(timeout_s=WAIT_S)
        decode.wait_ready(timeout_s=WAIT_S)
        check(decode, SPEC, [*lengths])


def memory_is_back(*clients: Client) -> bool:
    """Within a moment: a released lease goes back when the last write into it has been confirmed or turned away."""

    def back() -> bool:
        memories = [client.status().memory for client in clients]
        return all((memory.leases, memory.in_use) == (0, 0) for memory in memories)

    return eventually("the memory is back", back, WAIT_S)


def test_a_path_that_carries_nothing_is_left_for_tcp(tmp_path: Path, cluster: dict[str, DaemonProcess]) -> None:
    """Between two that are content with tcp; both say why. Where the path is good, verbs is used all the same."""
    lone = ForkedDaemon(
        tmp_path,
        "lone",
        listen=f"127.0.0.1:{free_port()}",
        peers={node: cluster[node].listen for node in ("prefill", "decode")},
        config={"fabric": {"name": "auto", "device": DEVICES[0]}, "peers": PATIENT, "memory": SMALL},
    )
    try:
        lone.start()
        with lone.client("lone") as sink, cluster["decode"].client("decode") as source, packets_vanish():
            transfer(source, sink, "decode", "by-the-other-way")
            peers = {peer.node: peer for peer in sink.status().peers}
            assert (peers["decode"].state, peers["decode"].fabric) == ("connected", "tcp")
            assert "carries nothing" in peers["decode"].error
            assert "UDP port 4791" in peers["decode"].error
            seen = {peer.node: peer.error for peer in source.status().peers}
            assert "carries nothing" in seen["lone"]
        with lone.client("lone") as sink, cluster["prefill"].client("prefill") as source:
            transfer(source, sink, "prefill", "through")
            assert {peer.node: peer.fabric for peer in sink.status().peers}["prefill"] == "verbs"
    finally:
        lone.destroy()


def test_a_link_that_is_down_for_two_seconds_delays_a_transfer(
    daemons: tuple[DaemonProcess, DaemonProcess], clients: tuple[Client, Client]
) -> None:
    """Longer than the device's retries: both queue pairs are rebuilt, and nobody hears of it."""
    source, sink = clients
    transfer(source, sink, "prefill", "before")
    before = [daemon.log.read_text().count("peer session ended") for daemon in daemons]
    with link_down():
        decode = sink.decode("through", SPEC, [200], source="prefill")
        prefill = source.prefill("through", SPEC, [200])
        put(prefill, SPEC, [200])
        with pytest.raises(DeadlineExceeded):
            decode.wait_ready(timeout_s=2.0)
    prefill.finish(timeout_s=WAIT_S)
    decode.wait_ready(timeout_s=WAIT_S)
    check(decode, SPEC, [200])
    decode.release()
    prefill.release()
    assert [daemon.log.read_text().count("peer session ended") for daemon in daemons] == before
    assert memory_is_back(source, sink)


def test_no_daemon_loads_torch(cluster: dict[str, DaemonProcess]) -> None:
    for daemon in cluster.values():
        assert "torch" not in Path(f"/proc/{daemon.pid}/maps").read_text()


def test_tcp_opens_no_device(cluster: dict[str, DaemonProcess]) -> None:
    plain = cluster["plain"]
    assert [path for path in _opened(plain) if "infiniband" in path] == []
    assert any("infiniband" in path for path in _opened(cluster["decode"]))


def test_verbs_on_a_device_that_is_not_there_does_not_start(tmp_path: Path) -> None:
    daemon = ForkedDaemon(tmp_path, "lost", config={"fabric": {"name": "verbs", "device": "mlx5_9"}})
    with pytest.raises(AssertionError, match=r"no RDMA device 'mlx5_9' here; choose one of rxe0, rxe1"):
        daemon.start()


def test_auto_on_a_device_that_is_not_there_is_tcp(tmp_path: Path) -> None:
    daemon = ForkedDaemon(tmp_path, "wary", config={"fabric": {"name": "auto", "device": "mlx5_9"}, "memory": SMALL})
    try:
        daemon.start()
        with daemon.client() as client:
            assert client.status().fabric == "tcp"
        assert daemon.log.read_text().count("fabric auto: tcp") == 1
    finally:
        daemon.destroy()


def test_doctor_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(None) == 0
    said = capsys.readouterr().out
    assert "verbs work: rxe0 port 1" in said
    assert "FIX" not in said
