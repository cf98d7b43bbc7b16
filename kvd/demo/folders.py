"""The demo's private folders, and those that killed demos have left: each has a lock that its demo holds for life."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "kvd-demo-"
LOCK = "lock"
_SHORT = "/tmp"
_LONGEST = 80
"""Bytes; the kernel's limit for the path of a Unix socket is 107."""


def private_folder() -> tuple[Path, int]:
    """A new folder for this user only, at a path that is short enough for sockets, and the descriptor of its lock,
    which is to be closed once the folder is removed. Folders of demos that can't have removed theirs go first."""
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) + len(PREFIX) + 9 > _LONGEST:
        parent = _SHORT
    _remove_left(Path(parent))
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            with contextlib.suppress(OSError):  # no locks on this file system: then nobody can tell, and nobody removes
                fcntl.flock(lock, fcntl.LOCK_EX)
            if _is(folder / LOCK, lock):
                return folder, lock
            os.close(lock)  # another demo has taken the lock in between, and the folder for a dead one's


def _remove_left(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, removed meanwhile, or in use
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is(folder / LOCK, lock):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _is(path: Path, descriptor: int) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except OSError:
        return False
