"""``kvd serve``: from the command line to a running daemon."""

from __future__ import annotations

import faulthandler
import os
import resource
import stat
from pathlib import Path

from kvd import log
from kvd.cli import config as configuration
from kvd.config import Config
from kvd.errors import ConfigError
from kvd.host import Host
from kvd.notify import Notifier

LEAST_FILES, FILES_A_CLIENT = 32, 4


def serve(path: Path | None, *, socket: str | None, node: str | None, listen: str | None) -> int:
    """Run the daemon until it has ended; its exit code. Raises :class:`KvdError` if it can't start."""
    # a watchdog's SIGABRT then leaves the stack of the loop that hung
    faulthandler.enable()
    notifier = Notifier.from_environment()
    config, name = configuration.read(path, socket=socket, node=node, listen=listen)
    configuration.judge(config, name)
    _check_limits()
    _make_default_directory(config)
    log.configure(config.log.format, config.log.level)

    from kvd.run import run

    return run(config, notifier=notifier)


def _check_limits() -> None:
    """What the event loop itself can't do without, and has no words for."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < LEAST_FILES:
        raise ConfigError(
            f"this process may open {files} files, and a daemon needs {LEAST_FILES}, besides {FILES_A_CLIENT} for each "
            "client; raise the limit (systemd: LimitNOFILE=, a shell: ulimit -n)",
            limit=files,
        )


def _make_default_directory(config: Config) -> None:
    """The directory of the default socket: only its own user may enter what a user makes, root's is for all.

    Whoever configures another path makes the directory too; the check has seen to that.
    """
    host = Host.read()
    directory = os.path.dirname(config.api.socket)
    if config.api.socket != host.default_socket:
        return
    try:
        os.makedirs(directory, mode=0o755 if host.uid == 0 else 0o700, exist_ok=True)
        found = os.lstat(directory)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{directory}, the socket's directory, can't be made: {reason}; choose --socket") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != host.uid:
        raise ConfigError(f"{directory}, the socket's directory, belongs to somebody else; choose --socket")
