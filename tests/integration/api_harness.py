"""A daemon of the tests: the real :class:`ApiServer` with a small service that moves KV entries inside one memfd.

It is no model of the real daemon. It has just enough of one to try both ends of the local API on real descriptors,
real shared memory and real masks: a source and a sink of the same request on this node, copied as the source rings.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import uvloop

from kvd.api.server import ApiLimits, ApiServer
from kvd_client.framing import decode_reply, encode
from kvd_client.protocol import LENGTH, PROTOCOL_VERSION, Failure, Hello, Reply, Welcome
from tests.integration.api_service import MemfdService

T = TypeVar("T")
WAIT_S = 20.0
"""How long a test waits for what must happen: a bound for a broken program, reached by no working one."""


class RecordedLog:
    """A logger whose lines can be waited for."""

    def __init__(self) -> None:
        self.lines: queue.Queue[tuple[str, str, dict[str, Any]]] = queue.Queue()
        self.exceptions: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.lines.put(("info", event, fields))

    def warning(self, event: str, **fields: Any) -> None:
        self.lines.put(("warning", event, fields))

    def exception(self, event: str, **fields: Any) -> None:
        self.exceptions.append((event, fields))
        self.lines.put(("exception", event, fields))

    def wait(self, event: str) -> dict[str, Any]:
        """The fields of the next line about ``event``, with its level as ``level``."""
        while True:
            level, name, fields = self.lines.get(timeout=WAIT_S)
            if name == event:
                return {"level": level, **fields}


class ServerThread:
    """The server on a uvloop of its own thread, as a context manager."""

    def __init__(self, path: str | os.PathLike[str], *, nbytes: int = 16 << 20, **options: Any) -> None:
        self.path = os.fspath(path)
        self.service = MemfdService(nbytes)
        self.log = RecordedLog()
        options.setdefault("limits", ApiLimits(sweep_s=3600.0))
        self.server = ApiServer(self.path, self.service, node="test", boot="boot", log=self.log, **options)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="api-server")

    def call(self, do: Callable[[], T]) -> T:
        """Run ``do`` on the loop's thread."""

        async def run() -> T:
            return do()

        return self.wait(run())

    def wait(self, coroutine: Any) -> Any:
        future: concurrent.futures.Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(WAIT_S)

    def __enter__(self) -> ServerThread:
        self._thread.start()
        try:
            self.wait(self.server.start())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait(self.server.close())
        finally:
            self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()
        self.service.memory.close()
        os.close(self.service.memfd)


class Raw:
    """A connection that sends what a test wants."""

    def __init__(self, path: str, greet: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(path)
        self.partial = b""
        self.fds: list[int] = []
        if greet:
            self.sock.sendall(encode(Hello(id=1, version=PROTOCOL_VERSION, name="raw")))
            assert isinstance(self.reply(), Welcome)

    def reply(self) -> Reply:
        while True:
            if len(self.partial) >= 4:
                (length,) = LENGTH.unpack_from(self.partial)
                if len(self.partial) >= 4 + length:
                    body, self.partial = self.partial[4 : 4 + length], self.partial[4 + length :]
                    return decode_reply(body)
            data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 16)
            self.fds += fds
            if not data:
                raise EOFError
            self.partial += data

    def ended(self) -> Failure | None:
        """Read to the end of the connection; the Failure that was said last."""
        said = None
        try:
            while True:
                said = self.reply()
        except (EOFError, ConnectionResetError):
            return said

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()
        for fd in self.fds:
            os.close(fd)


async def serve(path: str) -> None:
    service = MemfdService()
    server = ApiServer(path, service, node="test", boot="boot", log=RecordedLog())
    await server.start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    print("ready", flush=True)
    await ended.wait()
    await server.close()


def main() -> None:
    """``python -m tests.integration.api_harness PATH``: the server in a process, until its standard input ends."""
    uvloop.run(serve(sys.argv[1]))


if __name__ == "__main__":
    main()
