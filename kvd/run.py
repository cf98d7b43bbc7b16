"""A daemon as a process: signals, readiness, and the way to its end."""

from __future__ import annotations

import asyncio
import os
import signal

import uvloop

from kvd import notify
from kvd.config import Config
from kvd.daemon import Daemon


def run(config: Config, *, notifier: notify.Notifier) -> int:
    """Serve until SIGTERM or SIGINT, or until its terminal closes; returns the exit code. SIGHUP without a terminal
    reads the shared keys again.

    Raises :class:`~kvd.errors.AddressInUse`, :class:`~kvd.errors.ConfigError` or another KvdError, with everything
    given back, if the daemon can't start.
    """
    return uvloop.run(_serve(config, notifier))


async def _serve(config: Config, notifier: notify.Notifier) -> int:
    daemon = Daemon(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if not stop.is_set():
            stop.set()
        else:
            daemon.hurry.set()

    def on_hangup() -> None:
        if on_terminal:
            on_signal()
            return
        notifier.reloading()
        daemon.reload_keys()
        notifier.ready(daemon.summary())

    on_terminal = os.isatty(0)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    try:
        await daemon.start()
        notifier.ready(daemon.summary())
        watchdog = asyncio.create_task(notify.feed_watchdog(notifier))
        titles = asyncio.create_task(_keep_title(daemon, notifier))
        await stop.wait()
        notifier.stopping(f"draining {daemon.unfinished} transfers")
        titles.cancel()
        # No transfer outlives its deadline, but that may be longer than the manager's patience.
        notifier.extend_timeout(config.transfer.deadline_s + 10)
        await daemon.drain()
        watchdog.cancel()
    finally:
        await daemon.close()
    return 0


async def _keep_title(daemon: Daemon, notifier: notify.Notifier) -> None:
    """What ``systemctl status`` shows."""
    shown = ""
    while True:
        title = daemon.summary()
        if title != shown:
            notifier.status(title)
            shown = title
        await asyncio.sleep(2.0)
