"""What somebody on the path, a stranger, or a mistake in the configuration can do to two daemons."""

from __future__ import annotations

import base64
import contextlib
import secrets
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.cli.main import app
from kvd_client import Client, KVSpec
from kvd_client.errors import KvdError
from tests.integration.daemons import DaemonProcess, free_port, random_layer, small_spec, start_all
from tests.integration.proxy import BULK, CONTROL, FlipOnce, Meddle, Proxy

WAIT_S = 20.0
SPEC = small_spec()
LARGE = KVSpec(layers=2, kv_heads=4, entry_bytes=512, dtype="float16", model="test")
TOKENS = 600
"""Of a layer of LARGE: 1.2 MB."""


class Couple:
    """``prefill`` and ``decode`` with a proxy in front of ``prefill``, which ``decode`` dials."""

    def __init__(self, folder: Path, keys: tuple[str, str], security: tuple[Any, Any], meddle: Meddle | None) -> None:
        ports = {node: free_port() for node in ("prefill", "decode")}
        self.proxy = Proxy(("127.0.0.1", ports["prefill"]), meddle)
        self.key_files = []
        self.daemons = []
        for node, text, secured in zip(ports, keys, security, strict=True):
            file = folder / f"{node}.key"
            file.touch(mode=0o600)
            file.write_text(text)
            self.key_files.append(file)
            self.daemons.append(
                DaemonProcess(
                    folder,
                    node,
                    listen=f"127.0.0.1:{ports[node]}",
                    peers={"prefill": self.proxy.address} if node == "decode" else {},
                    config={"peers": {"key_file": str(file)}, "security": secured},
                )
            )
        self.prefill, self.decode = self.daemons


@contextlib.contextmanager
def couple(
    folder: Path,
    keys: tuple[str, str] | None = None,
    security: tuple[Any, Any] = ({}, {}),
    meddle: Meddle | None = None,
) -> Iterator[Couple]:
    key = secrets.token_hex(32)
    made = Couple(folder, keys or (key, key), security, meddle)
    with made.proxy:
        try:
            start_all(made.daemons)
            yield made
        finally:
            for daemon in made.daemons:
                daemon.destroy()


def move(couple: Couple, request: str, spec: KVSpec = SPEC, tokens: int = 50) -> None:
    """One transfer, every byte compared."""
    with couple.prefill.client() as source, couple.decode.client() as sink:
        shape = (1, tokens, spec.kv_heads, spec.entry_bytes)
        with (
            sink.decode(request, spec, [tokens], source="prefill") as decode,
            source.prefill(request, spec, [tokens]) as prefill,
        ):
            for layer in range(spec.layers):
                prefill.put_layer(layer, entries=random_layer(layer, *shape))
            decode.wait_ready(timeout_s=WAIT_S)
            for layer in range(spec.layers):
                assert np.array_equal(decode.layer(layer)[0, :tokens], random_layer(layer, *shape)[0])
            prefill.finish(timeout_s=WAIT_S)


def outcome(couple: Couple, request: str, spec: KVSpec = LARGE, tokens: int = TOKENS) -> tuple[str, str, bool]:
    """The codes that a transfer ends with at the sink and at the source, and whether every token that the sink's masks
    call local is the source's."""
    codes = []
    with couple.prefill.client() as source, couple.decode.client() as sink:
        shape = (1, tokens, spec.kv_heads, spec.entry_bytes)
        decode = sink.decode(request, spec, [tokens], source="prefill")
        prefill = source.prefill(request, spec, [tokens])
        layers = [random_layer(layer, *shape) for layer in range(spec.layers)]
        views = [(decode.mask(layer), decode.layer(layer)) for layer in range(spec.layers)]
        with contextlib.suppress(KvdError):  # it may have ended before all is put; the waits say how
            for layer, entries in enumerate(layers):
                prefill.put_layer(layer, entries=entries)
        for wait in (decode.wait_ready, prefill.finish):
            try:
                wait(timeout_s=WAIT_S)
                codes.append("OK")
            except KvdError as error:
                codes.append(error.code)
        right = True
        for (mask, memory), entries in zip(views, layers, strict=True):
            local = mask[0, :tokens] == 1
            right &= np.array_equal(memory[0, :tokens][local], entries[0][local])
        del views
        for transfer in (decode, prefill):
            transfer.release()
    return codes[0], codes[1], right


# --- integrity --------------------------------------------------------------------------------------------------------


def test_vllm_44238_a_flipped_bit_on_the_wire_ends_that_transfer_alone(tmp_path: Path) -> None:
    """Both processes get CHECKSUM_MISMATCH, no damaged token counts as local, it is counted, and the next one works."""
    flip = FlipOnce(BULK, False, 900_000)
    with couple(tmp_path, meddle=flip) as two:
        assert outcome(two, "damaged") == ("CHECKSUM_MISMATCH", "CHECKSUM_MISMATCH", True)
        assert flip.done
        move(two, "next")
        with two.decode.client() as client:
            counters = client.status().counters
            assert counters["checksum_errors"] == 1
            assert counters["transfers_ended_sink_CHECKSUM_MISMATCH"] == 1
            assert client.status().memory.in_use == 0
        with two.prefill.client() as client:
            assert client.status().counters["transfers_ended_source_CHECKSUM_MISMATCH"] == 1
            assert client.status().memory.in_use == 0


def test_without_checksums_the_bit_would_have_been_taken(tmp_path: Path) -> None:
    """The test above can fail: what it looks for is there when nothing is checked."""
    off = {"checksums": False}
    with couple(tmp_path, security=(off, off), meddle=FlipOnce(BULK, False, 900_000)) as two:
        assert outcome(two, "damaged") == ("OK", "OK", False)


# --- levels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["plain", "authentic", "secret"])
def test_what_somebody_on_the_path_sees_and_can_change(tmp_path: Path, level: str) -> None:
    """Sees: request ids, grants and everything else on the control connection at no level; KV bytes at all but secret.

    Changes a bit, repeats a part, leaves one out: above plain (where whoever changes bytes can change their checksum,
    too) the transfer ends with an error at once, no token that counts as local is wrong, and the next one works."""
    again: list[bytes] = []
    gone: list[bytes] = []

    def repeat(connection: int, to_listener: bool, data: bytes) -> bytes:
        if (connection, to_listener) == (BULK, False) and len(data) > 10_000 and not again:
            again.append(data)
            return data + data
        return data

    def swallow(connection: int, to_listener: bool, data: bytes) -> bytes:
        if (connection, to_listener) == (BULK, False) and len(data) > 10_000 and not gone:
            gone.append(data)
            return data[:4096] + data[8192:]
        return data

    security = {"level": level}
    with couple(tmp_path, security=(security, security)) as two:
        move(two, "a-request-that-is-secret", LARGE, TOKENS)
        seen = two.proxy.everything()
        entry = random_layer(1, 1, TOKENS, LARGE.kv_heads, LARGE.entry_bytes)[0, 7, 2].tobytes()
        assert (entry in seen) == (level != "secret")
        assert b"a-request-that-is-secret" not in seen
        for file in two.key_files:
            assert file.read_bytes() not in seen
        if level == "plain":
            return
        for number, meddle in enumerate((FlipOnce(BULK, False, 700_000), repeat, swallow)):
            base = two.proxy.session
            two.proxy.meddle = lambda c, t, d, m=meddle, b=base: m(c - b, t, d)
            sink, source, right = outcome(two, f"r{number}")
            assert right
            assert {sink, source} <= {"CHECKSUM_MISMATCH", "PEER_LOST"}
            two.proxy.meddle = None
            move(two, f"after{number}")
        assert again
        assert gone


def test_the_control_connection_can_not_be_changed_either(tmp_path: Path) -> None:
    flip = FlipOnce(CONTROL, True, 600)
    with couple(tmp_path, meddle=flip) as two:
        with two.decode.client() as sink, sink.decode("r", SPEC, [5], source="prefill") as decode:
            with pytest.raises(KvdError) as caught:
                decode.wait_ready(timeout_s=WAIT_S)
            assert caught.value.code in {"PEER_LOST", "PEER_UNREACHABLE", "PROTOCOL"}
        assert flip.done
        move(two, "next")


@pytest.mark.parametrize(
    ("mine", "theirs", "field"),
    [
        ({"level": "authentic"}, {"level": "secret"}, "security"),
        ({"checksums": False}, {}, "checksums"),
    ],
)
def test_levels_that_differ_are_refused_with_both(tmp_path: Path, mine: Any, theirs: Any, field: str) -> None:
    with couple(tmp_path, security=(mine, theirs)) as two:
        with two.decode.client() as sink, sink.decode("r", SPEC, [5], source="prefill") as decode:
            with pytest.raises(KvdError, match=field) as caught:
                decode.wait_ready(timeout_s=WAIT_S)
            assert caught.value.code == "FINGERPRINT_MISMATCH"
            assert set(caught.value.fields["differs"][field]) == {"prefill", "decode"}
        for daemon in two.daemons:
            with daemon.client() as client:
                assert client.status().memory.in_use == 0


# --- keys -------------------------------------------------------------------------------------------------------------


def test_keys_rotate_without_a_stop(tmp_path: Path) -> None:
    """The new key below the old one, then above it, then alone; transfers run through all of it, and a node that has
    only one of the two can always connect. A transfer that runs meanwhile does not notice."""
    old, new = secrets.token_hex(32), secrets.token_hex(32)
    with couple(tmp_path, (old, old)) as two, two.prefill.client() as source, two.decode.client() as sink:
        move(two, "before")
        with (
            sink.decode("long", SPEC, [50], source="prefill") as decode,
            source.prefill("long", SPEC, [50]) as prefill,
        ):
            prefill.put_layer(0, entries=random_layer(0, 1, 50, 2, 64))
            decode.wait_ready(0, timeout_s=WAIT_S)
            for text in (f"{old}\n{new}", f"{new}\n{old}", new):
                for daemon, file in zip(two.daemons, two.key_files, strict=True):
                    file.write_text(text)
                    reload(daemon)
                    move(two, f"{daemon.node} {text}"[:200])
            for layer in range(1, SPEC.layers):
                prefill.put_layer(layer, entries=random_layer(layer, 1, 50, 2, 64))
            decode.wait_ready(timeout_s=WAIT_S)
            prefill.finish(timeout_s=WAIT_S)
        # A new session needs the new key; a daemon that still has the old one is out.
        two.decode.destroy()
        two.key_files[1].write_text(old)
        two.decode.start()
        with two.decode.client() as client, client.decode("old", SPEC, [5], source="prefill") as late:
            with pytest.raises(KvdError) as caught:
                late.wait_ready(timeout_s=WAIT_S)
            assert caught.value.code == "AUTHENTICATION_FAILED"
        two.key_files[1].write_text(new)
        reload(two.decode)
        move(two, "after")
        # A file that is no good changes nothing.
        for text in ("short", "# nothing"):
            two.key_files[0].write_text(text)
            reload(two.prefill, "keys not reloaded")
            move(two, f"with {text}")
            assert [reason for reason in reasons(two.prefill) if reason.startswith("keys not reloaded")]
        two.key_files[0].write_text(new)
        reload(two.prefill)
        assert not [reason for reason in reasons(two.prefill) if "keys" in reason]


def reasons(daemon: DaemonProcess) -> list[str]:
    """Why it is degraded."""
    with daemon.client() as client:
        return client.status().reasons


def reload(daemon: DaemonProcess, said: str = "keys reloaded") -> None:
    """SIGHUP, and wait until the daemon has said what came of it."""
    before = daemon.log.read_text().count(said)
    daemon.kill(signal.SIGHUP)
    with daemon.client() as client:
        while daemon.log.read_text().count(said) == before:
            client.status()


def test_no_key_is_ever_shown(tmp_path: Path) -> None:
    """Not in logs at level debug, status, errors, or shown configurations, nor on the wire: through good transfers,
    failed handshakes, reloads and broken key files."""
    from typer.testing import CliRunner

    keys = [secrets.token_hex(32) for _ in range(3)]
    shown: list[str] = []
    with couple(tmp_path, (f"{keys[0]}\n{keys[1]}", f"{keys[0]}\n{keys[1]}")) as two:
        move(two, "good")
        two.key_files[1].write_text(keys[2])
        two.decode.destroy()
        two.decode.start()
        with two.decode.client() as client, client.decode("bad", SPEC, [5], source="prefill") as transfer:
            with pytest.raises(KvdError) as caught:
                transfer.wait_ready(timeout_s=WAIT_S)
            shown += [str(caught.value), repr(caught.value.fields)]
        two.key_files[1].write_text(f"{keys[2]}\n{keys[1][:10]}")
        reload(two.decode, "keys not reloaded")
        for daemon in two.daemons:
            runner = CliRunner()
            config = str(daemon.folder / "kvd.toml")
            for command in (["status", "--json", "--socket", daemon.socket], ["config", "show", "--config", config]):
                shown.append(runner.invoke(app, command).output)
            shown.append(runner.invoke(app, ["config", "check", "--config", config]).output)
            shown.append(runner.invoke(app, ["doctor", "--config", config]).output)
            shown.append(runner.invoke(app, ["metrics", "--socket", daemon.socket]).output)
            shown.append(daemon.log.read_text())
        assert all(text for text in shown)
        seen = "\n".join(shown).encode() + two.proxy.everything()
    for key in keys:
        raw = key.encode()
        for form in (raw, raw[:16], raw[-16:], base64.b64encode(raw)[:20], raw.hex().encode(), bytes.fromhex(key)):
            assert form not in seen


# --- who can connect, and how much ------------------------------------------------------------------------------------


def test_lmcache_5128_nothing_listens_beyond_loopback_and_others_can_not_use_the_socket(tmp_path: Path) -> None:
    """With nothing configured but a name and a socket."""
    daemon = DaemonProcess(tmp_path, "lonely")
    daemon._sections.pop("peers")
    try:
        daemon.start()
        listening = []
        for table in ("tcp", "tcp6", "udp", "udp6"):
            inodes = {
                link.readlink().name
                for link in Path(f"/proc/{daemon.pid}/fd").iterdir()
                if str(link.readlink()).startswith("socket:")
            }
            for line in Path(f"/proc/{daemon.pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if f"socket:[{fields[9]}]" in inodes and (fields[3] == "0A" or table.startswith("udp")):
                    listening.append(fields[1].split(":")[0])
        assert listening == ["0100007F"]
        mode = stat.S_IMODE(Path(daemon.socket).stat().st_mode)
        assert mode & 0o007 == 0
    finally:
        daemon.destroy()


def test_a_client_over_its_rate_waits_and_nobody_else_does(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, "node", config={"api": {"max_requests_s": 50.0}})
    try:
        daemon.start()
        with Client(daemon.socket) as greedy, Client(daemon.socket) as modest:
            modest.status()
            before = modest.status().uptime_s
            for _ in range(120):
                greedy.status()
            assert modest.status().uptime_s - before > 0.5 * (120 - 50) / 50  # the first 50 at once, then 50 a second
    finally:
        daemon.destroy()
