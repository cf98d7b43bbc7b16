"""What every run of the demo stands on: a private folder, child processes, daemons, and an end that leaves nothing."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from kvd.demo import model as demo_model
from kvd.demo.display import Display
from kvd.demo.errors import DemoFailed
from kvd.demo.folders import private_folder
from kvd.demo.inference import DEVICE, NODES, check_model
from kvd.demo.processes import Children, Event, child_environment, now
from kvd.units import Rate
from kvd_client import Client, KvdError
from kvd_client.protocol import Status

READY_S = 30.0
"""How long a daemon may take until it answers."""
_LOOK_EVERY_S = 0.05
DAEMON = {name: f"{name}-daemon" for name in NODES}

R = TypeVar("R")


class Interrupted(BaseException):
    """The user (or the system) ended the demo by a signal; everything has been cleaned up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def perform(make: Callable[[], Stage[R]]) -> R:
    """Run what ``make`` makes. Whatever happens, no process, socket, memory or file of it is left behind.

    Raises :class:`DemoFailed` with one sentence, and :class:`Interrupted`.
    """
    received: list[int] = []

    async def body() -> R:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def on_signal(number: int) -> None:
            received.append(number)
            if len(received) == 1:
                task.cancel()
            else:
                stage.hurry()  # cleaning up is under way already

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, on_signal, number)
        stage = make()
        return await stage.run()

    try:
        return asyncio.run(body())
    except asyncio.CancelledError:
        raise Interrupted(received[0]) from None


class Stage(abc.ABC, Generic[R]):
    """One run of the demo; needs a running event loop."""

    def __init__(self, display: Display) -> None:
        self.display = display
        self.folder, self._lock = private_folder()
        # What pip and torch write to the temporary folder goes with this one.
        environment = child_environment(os.environ) | {"TMPDIR": str(self.folder)}
        self.children = Children(self.folder, environment)

    def hurry(self) -> None:
        """Kill what is still being waited for."""
        self.children.kill()

    async def run(self) -> R:
        """All of it, and the cleaning up."""
        try:
            return await self.steps()
        finally:
            try:
                await self.children.stop()
            finally:
                self.display.close()
                shutil.rmtree(self.folder, ignore_errors=True)
                os.close(self._lock)

    @abc.abstractmethod
    async def steps(self) -> R:
        """What this run is about."""

    async def model(self, chosen: Path | None) -> Path:
        """The folder of the user's model, or of the demo's own, which is fetched first if need be."""
        if chosen is not None:
            # Said here and not by whichever of the two inference processes finds out first.
            check_model(chosen)
            return _whole(chosen)
        if (folder := demo_model.cached()) is not None:
            return folder
        self.children.start("model", [sys.executable, "-m", "kvd.demo.model"], talks=True)
        while True:
            _, event = await self.children.next()
            if event["event"] == "done":
                await self.children.finish("model")
                self.display.close()
                return Path(event["folder"])
            self.display.progress(event["what"], event["done"], event["total"])

    def socket(self, name: str) -> Path:
        """Where the daemon of a node listens."""
        return self.folder / f"{name}.sock"

    def start_daemons(
        self, rate: int, *, selective: Mapping[str, str | float] | None = None, channels: int = 0
    ) -> None:
        """A daemon for each node, with a link of ``rate`` bytes a second (0: no limit) between them. With ``channels``
        the decode node has a device of so many, in this host's memory."""
        ports = dict(zip(NODES, _free_ports(len(NODES)), strict=True))
        for name, node in NODES.items():
            other = next(each for each in NODES if each != name)
            config = self.folder / f"{name}.toml"
            config.write_text(
                _CONFIG.format(
                    node=node,
                    socket=self.socket(name),
                    port=ports[name],
                    other=NODES[other],
                    other_port=ports[other],
                    rate=f'rate = "{Rate(rate)}"' if rate else "",
                    selective="\n".join(f"{key} = {value!r}" for key, value in (selective or {}).items()),
                    device=_DEVICE.format(channels=channels) if channels and name == "decode" else "",
                )
            )
            argv = [sys.executable, "-m", "kvd", "serve", "--config", str(config)]
            self.children.start(DAEMON[name], argv, talks=False)

    async def daemons_ready(self) -> None:
        """Return when both daemons answer; they connect with each other when the first transfer needs it."""
        deadline = now() + READY_S
        for name in NODES:
            while True:
                if self.children.ended(DAEMON[name]):
                    raise self.children.failure(DAEMON[name])
                try:
                    await self.status(name)
                    break
                except KvdError as error:
                    if now() > deadline:
                        raise DemoFailed(
                            f"the {name} node's daemon was not ready within {READY_S:g} s: {error.message}"
                        ) from None
                await asyncio.sleep(_LOOK_EVERY_S)

    async def each(self, event: str, *names: str) -> dict[str, Event]:
        """Wait for the event from each of the processes, by default both; progress is shown meanwhile."""
        found: dict[str, Event] = {}
        while found.keys() != set(names or NODES):
            name, got = await self.children.next()
            if got["event"] == event:
                found[name] = got
            elif got["event"] == "progress":
                self.display.progress(got["what"], got["done"], got["total"])
        return found

    async def status(self, name: str) -> Status:
        """What the daemon of a node says about itself."""
        path = self.socket(name)

        def ask() -> Status:
            with Client(path, name="kvd demo", timeout_s=2.0) as client:
                return client.status()

        return await asyncio.to_thread(ask)


_CONFIG = """\
[node]
id = "{node}"

[api]
socket = "{socket}"

[peers]
listen = "127.0.0.1:{port}"

[peers.static]
{other} = "127.0.0.1:{other_port}"

[memory]
pool = "8GiB"
arena = "64MiB"

[transfer]
deadline_s = 86400
rendezvous_s = 30

[selective]
{selective}

[fabric]
name = "tcp"
{rate}

{device}
[log]
format = "console"
level = "warning"
"""

_DEVICE = f"""\
[npu.{DEVICE}]
channels = {{channels}}
channel_bytes = "64MiB"
alignment = 64
"""


def _whole(path: Path) -> Path:
    """Without links, so that it has a name of its own."""
    return path.resolve()


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; a daemon that finds its own taken says so."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
