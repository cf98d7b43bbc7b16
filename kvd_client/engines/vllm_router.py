"""A small router in front of vLLM servers that have the kvd connector: prefill and decode are asked at once.

``python -m kvd_client.engines.vllm_router --prefill prefill-0=http://10.0.0.1:8000 --decode http://10.0.0.2:8000``

Clients speak to it as to one vLLM (``/v1/completions`` and ``/v1/chat/completions``, streams included). It names each
transfer, so decode need not wait for prefill's answer: layers cross while prefill runs. Routers that ask one engine
after the other and pass on ``kv_transfer_params``, as vLLM's own do, work as well; this one is for trying out, and for
reading. Standard library only; the servers of a kind take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import logging
import select
import socket
import threading
import urllib.parse
import uuid
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

log = logging.getLogger(__name__)

MAX_BODY = 64 << 20
PIECE = 64 << 10
LOOK_S = 0.2
"""How soon a client that has gone is noticed while its answer is awaited."""


def prefill_body(body: dict[str, Any], transfer: str) -> dict[str, Any]:
    """What the prefill engine is asked: the same prompt, one token, whose cache will be fetched."""
    asked = {key: value for key, value in body.items() if key != "stream_options"}
    for key in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if key in asked:
            asked[key] = 1
    return asked | {
        "max_tokens": 1, "stream": False, "n": 1,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "kvd_request": transfer},
    }  # fmt: skip


def decode_body(body: dict[str, Any], transfer: str, source: str) -> dict[str, Any]:
    """What the decode engine is asked: everything, with the cache from there."""
    params = {"do_remote_decode": False, "do_remote_prefill": True, "kvd_request": transfer, "kvd_source": source}
    return body | {"kv_transfer_params": params}


class Router(ThreadingHTTPServer):
    """Serves on ``address`` until it is shut down. ``prefill``: ``(node, URL)`` of each engine, where node is its
    daemon's name; ``decode``: URLs."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], prefill: Sequence[tuple[str, str]], decode: Sequence[str]) -> None:
        super().__init__(address, _Handler)
        self._prefill, self._decode, self._lock = itertools.cycle(prefill), itertools.cycle(decode), threading.Lock()

    def next_pair(self) -> tuple[str, str, str]:
        """The next prefill engine's node and URL, and the next decode engine's URL."""
        with self._lock:
            return *next(self._prefill), next(self._decode)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Router

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY:
            self._refuse(411 if not length else 413, "a body of a known length is needed")
            return
        try:
            body = json.loads(self.rfile.read(int(length)))
        except ValueError:
            body = None
        if not isinstance(body, dict):
            self._refuse(400, "the body is no JSON object")
            return
        node, prefill, decode = self.server.next_pair()
        transfer = f"router-{uuid.uuid4()}"
        first = threading.Thread(target=self._prefill, args=(prefill, prefill_body(body, transfer)), daemon=True)
        first.start()
        try:
            self._pass_on(decode, decode_body(body, transfer, node))
        except (OSError, http.client.HTTPException) as error:
            log.warning("decode at %s: %s", decode, error)
            self._refuse(502, f"the decode engine did not answer: {error}")

    def _prefill(self, url: str, body: dict[str, Any]) -> None:
        """Its answer is of no use: the cache goes its own way, and where it fails decode computes the prompt."""
        try:
            with _asked(url, self.path, body, self.headers.get("Authorization")) as connection:
                answer = connection.getresponse()
                text = answer.read()
                if answer.status != 200:
                    log.warning("prefill at %s: %d %s", url, answer.status, text[:200])
        except (OSError, http.client.HTTPException) as error:
            log.warning("prefill at %s: %s", url, error)

    def _pass_on(self, url: str, body: dict[str, Any]) -> None:
        with _asked(url, self.path, body, self.headers.get("Authorization")) as connection:
            while not select.select([connection.sock], [], [], LOOK_S)[0]:
                if self._client_has_gone():
                    self.close_connection = True
                    return  # closes decode's connection: vLLM gives the request up, and with it the transfer
            answer = connection.getresponse()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.getheader("Content-Type") or "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                while piece := answer.read1(PIECE):
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                self.wfile.write(b"0\r\n\r\n")
            except (OSError, http.client.HTTPException) as error:  # too late for another status
                log.warning("an answer ended early: %s", error)
                self.close_connection = True

    def _client_has_gone(self) -> bool:
        if not select.select([self.connection], [], [], 0)[0]:
            return False
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _refuse(self, status: int, why: str) -> None:
        text = json.dumps({"error": {"message": why, "code": status}}).encode()
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


@contextlib.contextmanager
def _asked(
    url: str, path: str, body: dict[str, Any], authorization: str | None
) -> Iterator[http.client.HTTPConnection]:
    """A connection over which the question has been sent; raises :class:`OSError`."""
    where = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json"} | ({"Authorization": authorization} if authorization else {})
    with contextlib.closing(kind(where.netloc)) as connection:
        connection.request("POST", where.path.rstrip("/") + path, json.dumps(body).encode(), headers)
        yield connection


def _engine(text: str) -> tuple[str, str]:
    node, found, url = text.partition("=")
    if not found or not node or "://" in node:
        raise argparse.ArgumentTypeError(f"{text!r} is not NODE=URL, such as prefill-0=http://10.0.0.1:8000")
    return node, url


def main() -> None:
    parser = argparse.ArgumentParser(description="A small router in front of vLLM servers with the kvd connector.")
    parser.add_argument("--prefill", type=_engine, action="append", required=True, metavar="NODE=URL")
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    with Router((options.host, options.port), options.prefill, options.decode) as router:
        log.info("http://%s:%d", *router.server_address[:2])
        with contextlib.suppress(KeyboardInterrupt):
            router.serve_forever()


if __name__ == "__main__":
    main()
