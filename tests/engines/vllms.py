"""vLLM engines for tests and benches, each in a process of its own.

``KVD_VLLM_PYTHON`` names a Python that has vLLM; else ``.cache/vllm`` is tried, which ``python -m
tests.engines.setup_vllm`` makes.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_S, ANSWER_S = 300.0, 120.0


def vllm_python() -> str | None:
    """None where there is none."""
    found = os.environ.get("KVD_VLLM_PYTHON") or str(ROOT / ".cache/vllm/bin/python")
    return found if Path(found).exists() else None


def make_model(folder: Path) -> Path:
    python = vllm_python()
    assert python is not None
    subprocess.run([python, "-m", "tests.engines.tiny_llama", str(folder)], cwd=ROOT, check=True, capture_output=True)
    return folder


class Engine:
    """One vLLM. Methods of :class:`tests.engines.worker.Worker` by name: ``engine.do("add", request=…)``."""

    def __init__(
        self, folder: Path, name: str, model: Path, environment: Mapping[str, str] | None = None, **engine: Any
    ) -> None:
        python = vllm_python()
        assert python is not None
        self.log = folder / f"{name}.log"
        config = json.dumps({"model": str(model), "engine": engine})
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [python, "-m", "tests.engines.worker", config],
                cwd=ROOT, env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        self._begun = False

    def ready(self) -> Engine:
        if not self._begun:
            self._begun = True
            self._answer(START_S)
        return self

    def do(self, name: str, **arguments: Any) -> Any:
        self.ready()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()
        return self._answer(ANSWER_S)

    def _answer(self, limit_s: float) -> Any:
        assert self.process.stdout is not None
        seen, _, _ = select.select([self.process.stdout], [], [], limit_s)
        line = self.process.stdout.readline() if seen else ""
        assert line, f"the engine gave no answer:\n{self.log.read_text()[-4000:]}"
        answer = json.loads(line)
        assert answer["ok"], f"{answer['value']}\n{self.log.read_text()[-4000:]}"
        return answer["value"]

    def one(
        self, prompt: list[int], tokens: int, params: dict[str, Any] | None = None, name: str = "", free: bool = True
    ) -> Any:
        """Run a single request to its end; see :meth:`tests.engines.worker.Worker.run`."""
        name = name or f"request-{time.monotonic_ns()}"
        self.do("add", request=name, prompt=prompt, tokens=tokens, params=params)
        return self.do("run", free=free)[name]

    def destroy(self) -> None:
        self.process.kill()
        self.process.wait(30)


def connector(role: str, socket: str, **options: Any) -> dict[str, Any]:
    """A ``--kv-transfer-config``."""
    return {
        "kv_connector": "KvdConnector",
        "kv_connector_module_path": "kvd_client.engines.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": socket, **options},
    }
