"""One run of the demo, from the request to the report: two daemons, two inference processes, and a
router's part."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path

from kvd.demo import model as demo_model
from kvd.demo import texts
from kvd.demo.display import Display
from kvd.demo.errors import DemoFailed
from kvd.demo.inference import NODES
from kvd.demo.processes import Children, Event, child_environment, now, peak_memory
from kvd.demo.report import Report, busy_rate, rate
from kvd.units import Rate
from kvd_client import Client, KvdError
from kvd_client.protocol import Status

READY_S = 30.0
"""How long a daemon may take until it answers."""
_LOOK_EVERY_S = 0.05
_LONGEST_FOLDER = 80
"""Bytes; the kernel's limit for the path of a Unix socket is 107."""
_DAEMON = {name: f"{name}-daemon" for name in NODES}
_MODULES = {"prefill": "kvd.demo.prefill_process", "decode": "kvd.demo.decode_process"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user chose."""

    link: Rate
    """Limit of the link between the nodes; 0: none."""
    new_tokens: int
    prompt_file: Path | None
    prompt_tokens: int | None
    """None: all of the file, or the default for the built-in text."""
    model: Path | None
    """None: the demo's own."""


class Interrupted(BaseException):
    """The user (or the system) ended the demo by a signal; everything has been cleaned up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run(options: Options, display: Display) -> Report:
    """Run the demo. Whatever happens, no process, socket, memory or file of it is left behind.

    Raises :class:`DemoFailed` with one sentence, and :class:`Interrupted`.
    """
    received: list[int] = []

    async def body() -> Report:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def on_signal(number: int) -> None:
            received.append(number)
            if len(received) == 1:
                task.cancel()
            else:
                demo.hurry()  # cleaning up is under way already

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, on_signal, number)
        demo = _Run(options, display)
        return await demo.run()

    try:
        return asyncio.run(body())
    except asyncio.CancelledError:
        raise Interrupted(received[0]) from None


class _Run:
    def __init__(self, options: Options, display: Display) -> None:
        self._options, self._display = options, display
        self._folder = _private_folder()
        # What pip and torch write to the temporary folder goes with this one.
        environment = child_environment(os.environ) | {"TMPDIR": str(self._folder)}
        self._children = Children(self._folder, environment)

    def hurry(self) -> None:
        """Kill what is still being waited for."""
        self._children.kill()

    async def run(self) -> Report:
        try:
            return await self._steps(self._children)
        finally:
            try:
                await self._children.stop()
            finally:
                self._display.close()
                shutil.rmtree(self._folder, ignore_errors=True)

    async def _steps(self, children: Children) -> Report:
        text, question, limit = self._prompt()
        folder = await self._model(children)
        self._display.say("starting two daemons and two inference processes")
        self._start(children, folder)
        await self._daemons_ready(children)
        layers = (await self._each(children, "loaded"))["prefill"]["layers"]

        prompt = {"text": text, "question": question, "prompt_tokens": limit}
        children.send("prefill", new_tokens=self._options.new_tokens, **prompt)
        tokens = (await self._each(children, "prepared", "prefill"))["prefill"]["tokens"]
        link = rate(self._options.link * 8 or None, "unlimited")
        self._display.say(f"a prompt of {tokens} tokens; link between the two nodes: {link}")

        seen = await self._request(children, tokens, layers)
        moved = await self._bytes_sent()
        reference = await self._reference(children, seen)
        for name in _DAEMON.values():
            seen.peak[name] = peak_memory(children.pid(name))
        seen.peak["demo"] = peak_memory(os.getpid())
        later = seen.times[1:]
        return Report(
            model=folder.name,
            prompt_tokens=tokens,
            tokens=seen.tokens,
            reference_tokens=reference,
            text="".join(seen.pieces),
            kv_bytes=seen.kv_bytes,
            bytes_moved=moved,
            link_configured=self._options.link * 8 or None,
            link_achieved=busy_rate(moved, seen.ready, seen.arrived),
            ttft_s=seen.times[0] - seen.since,
            ttst_s=later[0] - seen.since if later else None,
            waited_s=seen.waited_s,
            tbt_s=(later[-1] - later[0]) / (len(later) - 1) if len(later) > 1 else None,
            layers_before_first=sum(at <= seen.times[0] for at in seen.arrived),
            layers=layers,
            peak_memory=seen.peak,
        )

    def _prompt(self) -> tuple[str, str, int | None]:
        """Text, question, and the most tokens of both (None: what the model's context holds)."""
        options = self._options
        if options.prompt_file is not None:
            return texts.read_text(options.prompt_file), "", options.prompt_tokens
        return texts.default_text(), texts.QUESTION, options.prompt_tokens or texts.DEFAULT_TOKENS

    async def _model(self, children: Children) -> Path:
        if self._options.model is not None:
            return self._options.model.resolve()
        if (folder := demo_model.cached()) is not None:
            return folder
        children.start("model", [sys.executable, "-m", "kvd.demo.model"], talks=True)
        while True:
            _, event = await children.next()
            if event["event"] == "done":
                await children.finish("model")
                self._display.close()
                return Path(event["folder"])
            self._display.progress(event["what"], event["done"], event["total"])

    def _start(self, children: Children, folder: Path) -> None:
        ports = dict(zip(NODES, _free_ports(len(NODES)), strict=True))
        for name, node in NODES.items():
            other = next(each for each in NODES if each != name)
            config = self._folder / f"{name}.toml"
            config.write_text(
                _CONFIG.format(
                    node=node,
                    socket=self._socket(name),
                    port=ports[name],
                    other=NODES[other],
                    other_port=ports[other],
                    rate=f'rate = "{self._options.link}"' if self._options.link else "",
                )
            )
            argv = [sys.executable, "-m", "kvd", "serve", "--config", str(config)]
            children.start(_DAEMON[name], argv, talks=False)
            argv = [sys.executable, "-m", _MODULES[name], str(self._socket(name)), str(folder)]
            children.start(name, argv, talks=True)

    def _socket(self, name: str) -> Path:
        return self._folder / f"{name}.sock"

    async def _daemons_ready(self, children: Children) -> None:
        """Return when both daemons answer; they connect with each other when the first transfer needs it."""
        deadline = now() + READY_S
        for name in NODES:
            while True:
                if children.ended(_DAEMON[name]):
                    raise children.failure(_DAEMON[name])
                try:
                    await _status(self._socket(name))
                    break
                except KvdError as error:
                    if now() > deadline:
                        raise DemoFailed(
                            f"the {name} node's daemon was not ready within {READY_S:g} s: {error.message}"
                        ) from None
                await asyncio.sleep(_LOOK_EVERY_S)

    async def _each(self, children: Children, event: str, *names: str) -> dict[str, Event]:
        """Wait for the event from each of the processes, by default both."""
        found: dict[str, Event] = {}
        while found.keys() != set(names or NODES):
            name, got = await children.next()
            if got["event"] == event:
                found[name] = got
        return found

    async def _request(self, children: Children, tokens: int, layers: int) -> _Seen:
        """Send the request to both processes, hand prefill's token to decode, and follow until the
        text's end."""
        seen = _Seen(since=now())
        children.send("decode", request=_REQUEST, tokens=tokens, new_tokens=self._options.new_tokens)
        children.send("prefill", request=_REQUEST)
        running = {"delivered", "done"}
        while running:
            name, event = await children.next()
            match event["event"]:
                case "layer":
                    seen.ready.append(event["at"])
                    self._display.progress("prefill, layers", len(seen.ready), layers)
                case "arrived":
                    seen.arrived.append(event["at"])
                case "first" | "token" as which:
                    seen.add(event)
                    self._display.text(event["text"])
                    if which == "first":
                        children.send("decode", token=event["token"])
                case "delivered":
                    seen.kv_bytes = event["kv_bytes"]
                    running.remove("delivered")
                case "done":
                    seen.peak[name] = event["peak_memory"]
                    running.remove("done")
        return seen

    async def _bytes_sent(self) -> int:
        """Payload that the prefill node's daemon has sent to the other: entries and masks."""
        peers = (await _status(self._socket("prefill"))).peers
        return sum(peer.bytes_sent for peer in peers if peer.node == NODES["decode"])

    async def _reference(self, children: Children, seen: _Seen) -> list[int]:
        """What a single process makes of the prompt: only now, so as not to disturb what is measured."""
        what = "the same by one process alone, tokens"
        self._display.progress(what, 0, len(seen.tokens))
        children.send("prefill", new_tokens=self._options.new_tokens)
        made = 0
        while True:
            name, event = await children.next()
            if event["event"] == "reference_token":
                made += 1
                self._display.progress(what, made, max(made, len(seen.tokens)))
            elif event["event"] == "reference":
                seen.peak[name] = event["peak_memory"]
                return list(event["tokens"])


@dataclasses.dataclass(slots=True)
class _Seen:
    """What is seen of one request, on the clock that all processes share."""

    since: float
    ready: list[float] = dataclasses.field(default_factory=list)
    arrived: list[float] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    times: list[float] = dataclasses.field(default_factory=list)
    pieces: list[str] = dataclasses.field(default_factory=list)
    waited_s: float = 0.0
    kv_bytes: int = 0
    peak: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, event: Event) -> None:
        self.tokens.append(event["token"])
        self.times.append(event["at"])
        self.pieces.append(event["text"])
        if len(self.tokens) == 2:
            self.waited_s = event["waited_s"]


_REQUEST = "kvd-demo"
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

[fabric]
name = "tcp"
{rate}

[log]
format = "console"
level = "warning"
"""


async def _status(socket_path: Path) -> Status:
    def ask() -> Status:
        with Client(socket_path, name="kvd demo", timeout_s=2.0) as client:
            return client.status()

    return await asyncio.to_thread(ask)


def _private_folder() -> Path:
    """A new folder for this user only, at a path that is short enough for sockets."""
    folder = tempfile.mkdtemp(prefix="kvd-demo-")
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="kvd-demo-", dir="/tmp")
    return Path(folder)


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; a daemon that finds its own taken says so."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
