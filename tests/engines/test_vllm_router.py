"""The router in front of vLLM servers, with servers that only note what they are asked."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvd_client.engines.vllm_router import Router

WAIT_S = 30.0


class Upstream(ThreadingHTTPServer):
    """A vLLM that answers when it may."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Upstream)
        self.asked: queue.Queue[tuple[str, dict[str, Any], str | None]] = queue.Queue()
        self.gone: queue.Queue[str] = queue.Queue()
        self.may_answer = threading.Event()
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Upstream(BaseHTTPRequestHandler):
    server: Upstream

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.put((self.path, body, self.headers.get("Authorization")))
        while not self.server.may_answer.wait(0.01):
            self.connection.settimeout(0.01)
            with contextlib.suppress(TimeoutError):
                if not self.connection.recv(1):
                    self.server.gone.put(self.path)
                    return
        self.connection.settimeout(WAIT_S)
        self.send_response(self.server.status)
        self.send_header("Content-Type", "text/event-stream" if body.get("stream") else "application/json")
        self.end_headers()
        for piece in (b"data: 1\n\n", b"data: 2\n\n"):
            self.wfile.write(piece)
            self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[tuple[Router, Upstream, Upstream]]:
    with contextlib.ExitStack() as stack:
        prefill, decode = (stack.enter_context(Upstream()) for _ in range(2))
        router = stack.enter_context(Router(("127.0.0.1", 0), [("prefill-0", prefill.url)], [decode.url + "/"]))
        for server in (prefill, decode, router):
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
        yield router, prefill, decode


def ask(router: Router, body: bytes, path: str = "/v1/completions") -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", router.server_address[1], timeout=WAIT_S)
    connection.request("POST", path, body, {"Authorization": "Bearer x"})
    return connection


def test_both_are_asked_before_either_answers(servers: tuple[Router, Upstream, Upstream]) -> None:
    router, prefill, decode = servers
    question = {"prompt": "a", "max_tokens": 50, "min_tokens": 9, "stream": True, "stream_options": {}}
    with contextlib.closing(ask(router, json.dumps(question).encode())) as connection:
        first, second = prefill.asked.get(timeout=WAIT_S), decode.asked.get(timeout=WAIT_S)
        prefill.may_answer.set()
        decode.may_answer.set()
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("Content-Type")) == (200, "text/event-stream")
        assert answer.read() == b"data: 1\n\ndata: 2\n\n"
    assert first[::2] == second[::2] == ("/v1/completions", "Bearer x")
    there, here = first[1].pop("kv_transfer_params"), second[1].pop("kv_transfer_params")
    assert first[1] == {"prompt": "a", "max_tokens": 1, "min_tokens": 1, "stream": False, "n": 1}
    assert second[1] == question
    assert there["do_remote_decode"] is here["do_remote_prefill"] is True
    assert there["kvd_request"] == here["kvd_request"]
    assert here["kvd_source"] == "prefill-0"


def test_a_prefill_engine_that_fails_is_decode_s_affair(servers: tuple[Router, Upstream, Upstream]) -> None:
    router, prefill, decode = servers
    prefill.status = 500
    for server in (prefill, decode):
        server.may_answer.set()
    with contextlib.closing(ask(router, b"{}")) as connection:
        assert connection.getresponse().status == 200


def test_a_client_that_goes_takes_decode_with_it(servers: tuple[Router, Upstream, Upstream]) -> None:
    router, _, decode = servers
    connection = ask(router, b"{}", "/v1/chat/completions")
    decode.asked.get(timeout=WAIT_S)
    connection.close()
    assert decode.gone.get(timeout=WAIT_S) == "/v1/chat/completions"


@pytest.mark.parametrize(("body", "status"), [(b"[]", 400), (b"{", 400)])
def test_mistakes(servers: tuple[Router, Upstream, Upstream], body: bytes, status: int) -> None:
    with contextlib.closing(ask(servers[0], body)) as connection:
        assert connection.getresponse().status == status


def test_no_decode_engine() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with Router(("127.0.0.1", 0), [("p", url)], [url]) as router:
            threading.Thread(target=router.serve_forever, daemon=True).start()
            with contextlib.closing(ask(router, b"{}")) as connection:
                assert connection.getresponse().status == 502
            router.shutdown()
