"""One vLLM in one process, told what to do in lines of JSON: ``python -m tests.engines.worker CONFIG`` with the Python
that has vLLM. Answers go to the first descriptor that the process had as its output; vLLM's own talk goes to the error
stream.

Requests are stepped through by hand, so that a test can abort one at any point, and sees the scheduler's memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Worker:
    def __init__(self, config: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(
            config["model"], dtype="float32", max_model_len=2048, max_num_seqs=8, enforce_eager=True,
            disable_log_stats=True, distributed_executor_backend="uni", **config["engine"],
        )  # fmt: skip
        self._engine: Any = self._llm.llm_engine
        self._core: Any = self._engine.engine_core.engine_core
        self._begun: dict[str, float] = {}
        self._seen: dict[str, dict[str, Any]] = {}

    def add(self, request: str, prompt: list[int], tokens: int, params: dict[str, Any] | None = None) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        extra = {"kv_transfer_params": params} if params is not None else None
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra)
        self._begun[request] = time.monotonic()
        self._seen[request] = {"tokens": [], "times": [], "params": None, "finish": None}
        self._engine.add_request(request, TokensPrompt(prompt_token_ids=prompt), sampling)

    def step(self, times: int = 1) -> dict[str, Any]:
        for _ in range(times):
            for output in self._engine.step():
                seen, one = self._seen[output.request_id], output.outputs[0]
                new = len(one.token_ids) - len(seen["tokens"])
                seen["tokens"] = list(one.token_ids)
                seen["times"] += [time.monotonic() - self._begun[output.request_id]] * new
                seen["params"] = output.kv_transfer_params or seen["params"]
                seen["finish"] = one.finish_reason
        return self._seen

    def run(self, limit_s: float = 60.0, free: bool = True) -> dict[str, Any]:
        """Until everything has ended, with ``free`` blocks that a finished request still holds included."""
        until = time.monotonic() + limit_s
        while self._engine.has_unfinished_requests() or (free and self._core.scheduler.has_requests()):
            self.step()
            if time.monotonic() > until:
                raise TimeoutError(f"after {limit_s:g} s: {self.memory()} {self._seen}")
        seen, self._seen = self._seen, {}
        return seen

    def abort(self, request: str) -> None:
        self._engine.abort_request([request])

    def reset(self) -> bool:
        """Forget every prefix."""
        return bool(self._core.scheduler.reset_prefix_cache())

    def memory(self) -> dict[str, Any]:
        scheduler = self._core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        return {
            "requests": len(scheduler.requests),
            "used": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),  # one is vLLM's own
            "states": sorted(request.status.name for request in scheduler.requests.values()),
        }

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def main() -> None:
    os.environ.update(ENVIRONMENT)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = Worker(json.loads(sys.argv[1]))
    print(json.dumps({"ok": True, "value": None}), file=answers)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            print(json.dumps({"ok": True, "value": getattr(worker, name)(**arguments)}), file=answers)
        except Exception as error:
            print(json.dumps({"ok": False, "value": f"{type(error).__name__}: {error}"}), file=answers)
        if name == "close":
            break
    answers.flush()
    os._exit(0)  # vLLM's own end takes its time, and has nothing to do with what is tested


if __name__ == "__main__":
    main()
