"""The demo's folders: a killed demo's goes when the next one begins, and nothing else does."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from pathlib import Path

import pytest

from kvd.demo.folders import LOCK, PREFIX, private_folder


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    # Not tmp_path itself, which may be longer than a socket's path can be.
    monkeypatch.setattr("kvd.demo.folders._LONGEST", 4096)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_what_a_killed_demo_left_goes_when_the_next_one_begins(temporary: Path) -> None:
    dead, lock = private_folder()
    (dead / "log").write_text("x")
    os.close(lock)  # as the kernel does for a process that was killed
    living, lock = private_folder()
    assert list(temporary.iterdir()) == [living]
    assert stat.S_IMODE(living.stat().st_mode) == 0o700
    os.close(lock)


def test_nothing_else_goes(temporary: Path) -> None:
    living, first = private_folder()
    (without_lock := temporary / f"{PREFIX}old").mkdir()
    (elsewhere := temporary / "elsewhere").mkdir()
    (elsewhere / LOCK).touch()
    (link := temporary / f"{PREFIX}link").symlink_to(elsewhere)
    (pipe := temporary / f"{PREFIX}pipe").mkdir()
    os.mkfifo(pipe / LOCK)
    (linked := temporary / f"{PREFIX}linked").mkdir()
    (linked / LOCK).symlink_to(elsewhere / LOCK)
    other, second = private_folder()
    assert set(temporary.iterdir()) >= {living, other, without_lock, elsewhere, link, linked}
    assert (elsewhere / LOCK).exists()
    os.close(first)
    os.close(second)


def test_a_folder_that_was_taken_for_a_dead_ones_is_made_anew(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []
    flock = fcntl.flock

    def late(lock: int, how: int) -> None:
        if not seen:  # another demo has been here between this one's mkdtemp and its lock
            seen.extend(temporary.iterdir())
            shutil.rmtree(seen[0])
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    folder, lock = private_folder()
    assert [folder] == list(temporary.iterdir())
    assert folder not in seen
    os.close(lock)


def test_long_paths_are_avoided(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (short := temporary / "s").mkdir()
    monkeypatch.setattr("kvd.demo.folders._LONGEST", len(os.fsencode(short)) + 20)
    monkeypatch.setattr("kvd.demo.folders._SHORT", str(short))
    monkeypatch.setattr("tempfile.tempdir", str(temporary / ("x" * 30)))
    folder, lock = private_folder()
    assert folder.parent == short
    os.close(lock)
