"""Two ``vllm serve`` and the router, asked over HTTP as users do. See :mod:`tests.engines.vllms`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd_client.engines.vllm_router import Router
from tests.engines.vllms import ROOT, START_S, connector, make_model, vllm_python
from tests.engines.worker import ENVIRONMENT
from tests.integration.daemons import free_port, two_daemons
from tests.waiting import eventually

if vllm_python() is None:
    pytest.skip("no vLLM: run python -m tests.engines.setup_vllm", allow_module_level=True)
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@contextlib.contextmanager
def serving(folder: Path, name: str, model: Path, config: dict[str, Any]) -> Iterator[str]:
    """A server's URL, whether or not it is ready."""
    port = free_port()
    environment = {key: value for key, value in ENVIRONMENT.items() if key != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with open(folder / f"{name}.log", "ab") as log:
        process = subprocess.Popen(
            [
                str(Path(vllm_python() or "").parent / "vllm"), "serve", str(model), "--host", "127.0.0.1",
                "--port", str(port), "--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "2048",
                "--max-num-seqs", "4", "--block-size", "32", "--enforce-eager",
                "--kv-transfer-config", json.dumps(config),
            ],
            cwd=ROOT, env={**os.environ, **environment, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def healthy(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url + "/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def complete(url: str, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def test_two_servers_and_a_router(tmp_path: Path) -> None:
    model = make_model(tmp_path / "llama")
    with contextlib.ExitStack() as stack:
        source, sink = stack.enter_context(two_daemons(tmp_path))
        prefill, decode = (
            stack.enter_context(serving(tmp_path, name, model, connector(role, daemon.socket)))
            for name, role, daemon in (("prefill", "kv_producer", source), ("decode", "kv_consumer", sink))
        )
        for url in (prefill, decode):
            eventually("the server is up", lambda url=url: healthy(url), START_S, every=0.5)

        def received() -> int:
            with sink.client() as client:
                return client.status().counters["bytes_received"]

        prompt = [(i * 37) % 509 + 3 for i in range(700)]
        alone = complete(prefill, prompt)["choices"][0]["text"]
        assert received() == 0
        # as routers do that ask one after the other
        params = complete(
            prefill, prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False}
        )["kv_transfer_params"]
        assert params["do_remote_prefill"]
        assert complete(decode, prompt, kv_transfer_params=params)["choices"][0]["text"] == alone
        once = received()
        assert once > 0
        router = stack.enter_context(Router(("127.0.0.1", 0), [("prefill", prefill)], [decode]))
        threading.Thread(target=router.serve_forever, daemon=True).start()
        stack.callback(router.shutdown)
        other = [(i * 41) % 509 + 3 for i in range(700)]
        alone = complete(prefill, other)["choices"][0]["text"]
        through = complete(f"http://127.0.0.1:{router.server_address[1]}", other)
        assert through["choices"][0]["text"] == alone
        assert received() == 2 * once
        for daemon in (source, sink):
            with daemon.client() as client:
                eventually("the pool is free", lambda client=client: client.status().memory.leases == 0)
