"""Profiles and running daemons: install, record, and the link's measure, as users run them."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvd.cli.main import app
from kvd.errors import InvalidProfile, NotFound, RendezvousTimeout
from kvd.importance.matrix import ALWAYS_LAYERS
from kvd.profiling import files, link
from kvd.profiling.timing import Times
from kvd_client import Client
from kvd_client.protocol import Status
from kvd_client.spec import MASK_LOCAL
from tests.integration.daemons import DaemonProcess, small_spec, two_daemons
from tests.profiles import SPEC, profile

WAIT_S = 30.0
BLOCKS, TOKENS = 10, 600
LIBRARIES = ("torch", "transformers", "matplotlib")


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, DaemonProcess]]:
    with two_daemons(tmp_path_factory.mktemp("daemons")) as pair:
        yield pair


def kvd(*args: Any) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args], prog_name="kvd")


def until(client: Client, true: Callable[[Status], bool]) -> Status:
    """The first status of which something is true; each look is a round trip to the daemon."""
    deadline = time.monotonic() + WAIT_S
    while True:
        status = client.status()
        if true(status):
            return status
        assert time.monotonic() < deadline, status


def loaded(daemon: DaemonProcess) -> list[str]:
    """Which model libraries the daemon's process has mapped."""
    maps = Path(f"/proc/{daemon.pid}/maps").read_text()
    return [name for name in LIBRARIES if f"/{name}/" in maps]


def test_an_installed_profile_decides_what_new_transfers_push(tmp_path: Path) -> None:
    own = profile(prefill=Times((TOKENS,), (0.6,)), transfer=Times((TOKENS,), (0.7,)))
    timing, matrix = own.timing(SPEC.entry_bytes), own.groups[0].matrix
    assert timing is not None
    budget = timing.budget(SPEC.layers, BLOCKS, TOKENS)
    assert ALWAYS_LAYERS * BLOCKS < budget < SPEC.layers * BLOCKS
    file = tmp_path / "own.kvdprofile"
    files.write(own, file)
    with two_daemons(tmp_path / "nodes", selective={"mode": "profile", "budget": "fixed"}) as (source, sink):
        done = kvd("profile", "install", file, "--socket", source.socket)
        assert done.exit_code == 0, done.output
        for text in ("node prefill", "org/model at abc", "quest (page 16, share 0.1)", "2: 512-1023, 1024-2047 tokens"):
            assert text in done.stdout
        assert files.fingerprint(own) in done.stdout

        with source.client() as one, sink.client() as other:
            (known,) = one.status().profiles
            assert (known.model, known.revision, known.selector) == ("org/model", "abc", "quest")
            assert known.groups == [(512, 1024), (1024, 2048)]
            assert known.fingerprint == files.fingerprint(own)
            assert other.status().profiles == []

            prefill = one.prefill("r", SPEC, [TOKENS], selector="quest")
            decode = other.decode("r", SPEC, [TOKENS], source="prefill", landing_entries=1)
            for layer in range(SPEC.layers):
                prefill.layer_ready(layer)
            status = until(one, lambda s: s.transfers[0].bytes_done > 0 and s.transfers[0].bytes_done >= _budget(s))
            part = status.transfers[0]
            assert (part.mode, part.budget_bytes) == ("profile", budget * TOKENS // BLOCKS * 3 * SPEC.entry_bytes)
            assert part.paths["proactive"] == part.bytes_done == part.budget_bytes
            # K_r blocks have arrived, and those that matter most.
            top = matrix.top(budget)
            for layer in range(SPEC.layers):
                local = decode.mask(layer)[0] == MASK_LOCAL
                assert (local == np.repeat(top[layer], TOKENS // BLOCKS)).all()

            shown = kvd("status", "--socket", source.socket)
            assert "  profile: budget " in shown.stdout
            assert "org/model at abc  quest     512-2047" in shown.stdout
            assert max(map(len, shown.stdout.splitlines()[7:])) <= 80
            decode.release()
            prefill.release()
        assert loaded(source) == loaded(sink) == []


def _budget(status: Status) -> int:
    return status.transfers[0].budget_bytes


def test_a_refused_file_is_one_sentence_and_changes_nothing(
    daemons: tuple[DaemonProcess, DaemonProcess], tmp_path: Path
) -> None:
    data = files.encode(profile())
    file = tmp_path / "bad.kvdprofile"
    file.write_bytes(data[:-1])
    done = kvd("profile", "install", file, "--socket", daemons[0].socket)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"kvd: {file} can't be used as a profile")
    assert len(done.stderr.splitlines()) == 1
    with daemons[0].client() as client:
        for wrong in (b"", data[:-1], b"\0" * (1 << 20)):
            with pytest.raises(InvalidProfile):
                client.install_profile(wrong)
        assert client.status().profiles == []


def test_a_profile_that_the_daemon_cannot_keep_is_refused(tmp_path: Path) -> None:
    file, taken = tmp_path / "own.kvdprofile", tmp_path / "taken"
    files.write(profile(), file)
    daemon = DaemonProcess(tmp_path, "alone", config={"selective": {"profiles": str(taken)}})
    try:
        daemon.start()
        taken.write_text("a file where the folder should be")
        done = kvd("profile", "install", file, "--socket", daemon.socket)
        assert done.exit_code == 1, done.output
        assert f"{file} was refused" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    finally:
        daemon.destroy()


def move(
    daemons: tuple[DaemonProcess, DaemonProcess],
    request: str,
    length: int,
    chosen: Sequence[int],
    *,
    blocks: int,
    steps: int,
) -> None:
    """Transfer a prompt of model ``test``; select the ``chosen`` tokens in ``steps`` steps, and report that."""
    spec = small_spec()
    index = np.tile(np.array(chosen, np.int32), (spec.kv_heads, 1))
    with daemons[0].client() as one, daemons[1].client() as other:
        prefill = one.prefill(request, spec, [length], selector="quest")
        with other.decode(
            request, spec, [length], source="prefill", selector="quest", landing_entries=len(chosen)
        ) as decode:
            for layer in range(spec.layers):
                prefill.layer_ready(layer)
            prefill.finish()
            decode.wait_ready(timeout_s=WAIT_S)
            decode.count_selections(blocks)
            for _ in range(steps):
                for layer in range(ALWAYS_LAYERS, spec.layers):
                    decode.select(layer, index)
        prefill.release()


def test_what_decode_selects_becomes_a_profile(daemons: tuple[DaemonProcess, DaemonProcess], tmp_path: Path) -> None:
    first = [*range(8), *range(56, 64)]
    move(daemons, "a", 64, first, blocks=8, steps=3)
    move(daemons, "b", 64, first[:8], blocks=8, steps=3)
    move(daemons, "c", 32, [0, 31], blocks=8, steps=1)
    file = tmp_path / "recorded.kvdprofile"
    ask = ("profile", "record", "--from-daemon", "--model-id", "test", "--socket", daemons[1].socket)
    done = kvd(*ask, "--selector", "quest", "-o", file, "--link-rate", "8mbit", "--notes", "of a test")
    assert done.exit_code == 0, done.output
    assert f"{file}: written, 3 prompts and 7 decode steps" in done.stdout
    found = files.read(file)
    assert (found.model, found.selector, found.layers, found.kv_heads) == ("test", "quest", 4, 2)
    assert (found.link_rate, found.notes) == (1_000_000, "of a test")
    assert found.transfer.tokens == (32, 63, 64, 127)
    assert found.transfer.seconds[0] == pytest.approx(32 * 4 * 2 * 64 / 1e6)
    short, long = found.groups
    assert [(g.low, g.high, g.samples, g.steps) for g in found.groups] == [(32, 64, 1, 1), (64, 128, 2, 6)]
    np.testing.assert_allclose(long.matrix.values[2:], [[1, 0, 0, 0, 0, 0, 0, 0.5]] * 2)
    np.testing.assert_allclose(short.matrix.values[2:], [[0.25, 0, 0, 0, 0, 0, 0, 0.25]] * 2)
    assert kvd("profile", "check", file).exit_code == 0

    shown = kvd("status", "--socket", daemons[1].socket).stdout
    assert "RECORDED  SELECTOR" in shown
    assert "test      quest     32-63" in shown

    missing = kvd(*ask, "--selector", "hata", "-o", tmp_path / "none")
    assert missing.exit_code == 1
    assert "recorded so far: test (quest)" in missing.stderr
    assert not (tmp_path / "none").exists()
    # What was recorded can be used at once.
    assert kvd("profile", "install", file, "--socket", daemons[0].socket).exit_code == 0
    with daemons[0].client() as client:
        assert "test" in [known.model for known in client.status().profiles]
    assert loaded(daemons[0]) == loaded(daemons[1]) == []


def test_large_profiles_travel_in_pieces(daemons: tuple[DaemonProcess, DaemonProcess]) -> None:
    spec = small_spec(heads=3)
    with daemons[0].client() as one, daemons[1].client() as other:
        prefill = one.prefill("large", spec, [16], selector="large")
        with other.decode("large", spec, [16], source="prefill", selector="large", landing_entries=1) as decode:
            for layer in range(spec.layers):
                prefill.layer_ready(layer)
            decode.wait_ready(timeout_s=WAIT_S)
            decode.count_selections(50_000)
            decode.select(2, np.zeros((3, 1), np.int32))
        data = other.export_profile("test", "large")
        assert len(data) > 4 * 4 * 50_000
        recorded = files.decode(data)
        assert recorded.blocks == 50_000
        assert recorded.groups[0].matrix.values[2].max() == 1
        one.install_profile(data)
        assert files.fingerprint(recorded) in [known.fingerprint for known in one.status().profiles]
        with pytest.raises(NotFound):
            other.export_profile("unheard of")


@pytest.mark.parametrize(
    "args",
    [
        ("--from-daemon",),
        ("--from-daemon", "--model-id", "m", "--texts", "x"),
        ("--from-daemon", "--model-id", "m", "--model", "x"),
        (),
    ],
)
def test_wrong_usage_of_record(tmp_path: Path, args: tuple[str, ...]) -> None:
    done = kvd("profile", "record", "-o", tmp_path / "x", "--socket", tmp_path / "none.sock", *args)
    assert done.exit_code == 2, done.output
    assert not (tmp_path / "x").exists()


def test_the_link_is_measured(daemons: tuple[DaemonProcess, DaemonProcess], tmp_path: Path) -> None:
    file = tmp_path / "link.json"
    server = subprocess.Popen(
        [sys.executable, "-m", "kvd", "profile", "link", "--serve", "--once", "--socket", daemons[0].socket],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        done = kvd(
            *("profile", "link", "--from", "prefill", "--socket", daemons[1].socket, "--mib", 4, "--rounds", 2),
            *("--wait", WAIT_S, "--layers", 30, "--heads", 3, "--entry-bytes", 256, "-o", file, "--json"),
        )
        assert done.exit_code == 0, done.output
        said, _ = server.communicate(timeout=WAIT_S)
    finally:
        server.kill()
        server.wait()
    assert server.returncode == 0
    assert "kvd profile link --from prefill" in said
    assert "2 rounds of 4 MiB asked for" in said
    found = json.loads(done.stdout)
    assert json.loads(file.read_text()) == found
    assert (found["source"], found["sink"], found["mib"]) == ("prefill", "decode", 4)
    assert len(found["rounds"]) == 2
    for one in found["rounds"]:
        assert 0 < one["bytes"] <= 4 << 20
        assert one["bytes"] % (1 << 16) == 0
        assert one["seconds"] > 0
        assert one["latency_s"] > 0
    rate = found["bytes_per_s"]
    assert rate["min"] <= rate["median"] <= rate["max"]
    transfer = found["transfer"]
    assert transfer["seconds"] == pytest.approx(
        found["latency_s"]["median"] + 1024 * 30 * 3 * 256 / rate["median"], rel=1e-3
    )
    assert link.read(file) == (rate["median"], found["latency_s"]["median"])
    with daemons[0].client() as client:
        assert client.status().transfers == []


def test_nobody_serves(daemons: tuple[DaemonProcess, DaemonProcess]) -> None:
    done = kvd("profile", "link", "--from", "prefill", "--wait", 0.2, "--request", "x", "--socket", daemons[1].socket)
    assert done.exit_code == 1
    assert done.stderr.startswith("kvd: nobody answers as 'x' on node 'prefill'")
    assert "kvd profile link --serve --request x" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    unknown = kvd("profile", "link", "--from", "nowhere", "--socket", daemons[1].socket)
    assert unknown.exit_code == 1
    assert "nowhere" in unknown.stderr


def test_a_server_outlives_what_others_do_to_it(daemons: tuple[DaemonProcess, DaemonProcess]) -> None:
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    with daemons[0].client("server") as mine, daemons[1].client("measurer") as other:
        server = threading.Thread(
            target=link.serve, args=(mine, "tough"), kwargs={"measurements": 2, "say": said.put}, daemon=True
        )
        server.start()
        with other.prefill("tough", link._SMALL, [1], sink="prefill", deadline_s=WAIT_S) as transfer:
            transfer.layer(0)[...] = 7
            transfer.layer_ready(0)
        assert said.get(timeout=WAIT_S).startswith("a question that is none was dropped")
        # Somebody asks, and then wants nothing of what was opened for him.
        link._put_ask(other, "prefill", "tough", link._Ask(run="gone", mib=1, rounds=2), WAIT_S)
        assert said.get(timeout=WAIT_S) == "2 rounds of 1 MiB asked for"
        deadline = time.monotonic() + WAIT_S
        while said.empty():
            assert time.monotonic() < deadline
            other.reject(request="gone.0.gate", source="prefill", reason="changed my mind")
        assert "changed my mind" in said.get()
        found = link.measure(other, "prefill", "tough", mib=1, rounds=1, wait_s=WAIT_S)
        assert len(found.rounds) == 1
        server.join(WAIT_S)
        assert not server.is_alive()
        assert [said.get(), said.get()] == ["1 round of 1 MiB asked for", "done"]


def test_who_breaks_a_measurement_off_between_two_rounds_can_measure_again_at_once(
    daemons: tuple[DaemonProcess, DaemonProcess],
) -> None:
    said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def leave(found: link.Round) -> None:
        raise KeyboardInterrupt

    with daemons[0].client("server") as mine, daemons[1].client("measurer") as other:
        server = threading.Thread(
            target=link.serve, args=(mine, "again"), kwargs={"measurements": 2, "say": said.put}, daemon=True
        )
        server.start()
        with pytest.raises(KeyboardInterrupt):
            link.measure(other, "prefill", "again", mib=1, rounds=3, wait_s=WAIT_S, on_round=leave)
        # Well before the server's daemon gives up waiting for somebody to take the second round.
        assert len(link.measure(other, "prefill", "again", mib=1, rounds=1, wait_s=20).rounds) == 1
        server.join(WAIT_S)
        assert [said.get() for _ in range(4)][-2:] == ["1 round of 1 MiB asked for", "done"]


def test_measuring_says_who_is_missing(daemons: tuple[DaemonProcess, DaemonProcess]) -> None:
    with daemons[1].client() as client, pytest.raises(RendezvousTimeout) as caught:
        link.measure(client, "prefill", wait_s=0.2)
    assert caught.value.fields == {"request": link.REQUEST, "peer": "prefill"}


def test_a_server_ends_when_its_user_wants(daemons: tuple[DaemonProcess, DaemonProcess]) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "kvd", "profile", "link", "--serve", "--request", "s", "--socket", daemons[0].socket],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what runs in the background, these tests perhaps, with the signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline().endswith("kvd profile link --from prefill --request s\n")
        server.send_signal(signal.SIGINT)
        assert server.communicate(timeout=WAIT_S) == ("", "")
    finally:
        server.kill()
        server.wait()
    assert server.returncode == 130
