"""The file of the keys that nodes share."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvd.errors import ConfigError

MIN_KEY_BYTES = 16
MAX_KEY_FILE = 64 << 10


def read_keys(path: Path | str) -> list[bytes]:
    """The shared keys of a file, one a line, in order; blank lines and lines that start with # don't count.

    Raises :class:`ConfigError` for a file that can't be read, that all users can read or write, that holds no
    key, or a key under 16 bytes. No message contains a byte of a key.
    """
    make = f"make one with: (umask 077; head -c 32 /dev/urandom | base64 > {path})"
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_KEY_FILE + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"the key file {path} can't be read: {reason}; {make}", file=str(path)) from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(
            f"the key file {path} has mode {stat.S_IMODE(mode):04o}, open to every user; chmod o-rw {path}",
            file=str(path),
        )
    if len(content) > MAX_KEY_FILE:
        raise ConfigError(f"the key file {path} is longer than {MAX_KEY_FILE} bytes; it is no key file", file=str(path))
    keys = []
    for number, line in enumerate(content.splitlines(), 1):
        key = line.strip()
        if not key or key.startswith(b"#"):
            continue
        if len(key) < MIN_KEY_BYTES:
            raise ConfigError(
                f"line {number} of the key file {path} has {len(key)} bytes; {MIN_KEY_BYTES} are the least",
                file=str(path),
                line=number,
            )
        keys.append(key)
    if not keys:
        raise ConfigError(f"the key file {path} holds no key; {make}", file=str(path))
    return keys
