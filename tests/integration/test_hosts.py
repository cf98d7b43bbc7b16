"""Two daemons on two hosts with addresses of their own (network namespaces), which must know a shared key."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvd_client.errors import KvdError, PeerUnreachable
from tests.integration.daemons import DaemonProcess, nothing_is_left, random_layer, small_spec, start_all
from tests.integration.netns import Host, needs_netns, two_hosts
from tests.integration.test_transfer import run_mixed_load
from tests.waiting import eventually

pytestmark = needs_netns

PORT = 7440
SPEC = small_spec()

# 200 transfers of 16 KiB to 64 MiB: 134 MiB in all, most of them small, as in a day's work.
SIZES = [16 << 10, 64 << 10, 256 << 10, 100_000] * 44 + [1 << 20] * 19 + [8 << 20] * 4 + [64 << 20]


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as pair:
        yield pair


def start(folder: Path, hosts: tuple[Host, Host], keys: tuple[str, str]) -> tuple[DaemonProcess, DaemonProcess]:
    names = ("prefill", "decode")
    daemons = []
    for node, host, key in zip(names, hosts, keys, strict=True):
        (folder / node).mkdir(parents=True)
        key_file = folder / node / "key"
        key_file.touch(mode=0o600)
        key_file.write_text(key + "\n")
        other = 1 - names.index(node)
        daemons.append(
            DaemonProcess(
                folder,
                node,
                listen=f"{host.address}:{PORT}",
                peers={names[other]: f"{hosts[other].address}:{PORT}"},
                config={"peers": {"key_file": str(key_file)}, "memory": {"pool": "512MiB"}},
                prefix=host.prefix,
            )
        )
    start_all(daemons)
    return daemons[0], daemons[1]


@pytest.mark.timeout(300)
def test_200_transfers_of_mixed_sizes_at_once_leave_nothing_behind(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    key = secrets.token_hex(32)
    daemons = start(tmp_path, hosts, (key, key))
    try:
        assert len(SIZES) == 200
        run_mixed_load(*daemons, SIZES)  # grows what grows once: arenas, buffers
        before = [daemon.resources() for daemon in daemons]
        run_mixed_load(*daemons, SIZES)
        for daemon, (fds, resident) in zip(daemons, before, strict=True):
            nothing_is_left(daemon)
            eventually("descriptors are closed", lambda d=daemon, n=fds: d.resources()[0] <= n, 40.0)  # type: ignore[misc]
            assert daemon.resources()[1] - resident < 16 << 20
            with daemon.client() as client:
                status = client.status()
                assert status.counters["bytes_sent"] + status.counters["bytes_received"] > 2 * sum(SIZES) * 0.99
                assert [peer.state for peer in status.peers] == ["connected"]
    finally:
        for daemon in daemons:
            daemon.destroy()


def test_sglang_39400_a_peer_with_another_key_is_refused(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    daemons = start(tmp_path, hosts, (secrets.token_hex(32), secrets.token_hex(32)))
    try:
        with daemons[1].client() as client, client.decode("r", SPEC, [4], source="prefill") as transfer:
            with pytest.raises(KvdError) as caught:
                transfer.wait_ready(timeout_s=20)
            assert caught.value.code == "AUTHENTICATION_FAILED"
    finally:
        for daemon in daemons:
            daemon.destroy()


def test_a_link_that_is_cut_ends_transfers_and_a_mended_one_serves(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    key = secrets.token_hex(32)
    daemons = start(tmp_path, hosts, (key, key))
    try:
        with daemons[0].client() as source, daemons[1].client() as sink:
            with (
                source.prefill("cut", SPEC, [64]) as prefill,
                sink.decode("cut", SPEC, [64], source="prefill") as decode,
            ):
                prefill.put_layer(0, entries=random_layer(0, 1, 64, 2, 64))
                decode.wait_ready(0, timeout_s=20)
                hosts[0].run("ip", "link", "set", hosts[0].link, "down")
                try:
                    for layer in range(1, SPEC.layers):
                        prefill.put_layer(layer, entries=random_layer(layer, 1, 64, 2, 64))
                    for wait in (decode.wait_ready, prefill.finish):
                        with pytest.raises(KvdError) as caught:
                            wait(timeout_s=30)
                        assert caught.value.code == "PEER_LOST"
                finally:
                    hosts[0].run("ip", "link", "set", hosts[0].link, "up")

            def served() -> bool:
                with source.prefill("ok", SPEC, [64]) as prefill:
                    for layer in range(SPEC.layers):
                        prefill.put_layer(layer, entries=random_layer(layer, 1, 64, 2, 64))
                    try:
                        with sink.decode("ok", SPEC, [64], source="prefill") as decode:
                            decode.wait_ready(timeout_s=20)
                            same = np.array_equal(decode.layer(3), random_layer(3, 1, 64, 2, 64))
                    except PeerUnreachable:
                        prefill.abort()  # the mended link takes a moment to get its routes back
                        return False
                    prefill.finish(timeout_s=20)
                return bool(same)

            eventually("the mended link serves", served, 20.0)
    finally:
        for daemon in daemons:
            daemon.destroy()
