"""The half of the vLLM connector that sits in the scheduler: which requests leave, which are awaited, what is dropped.

Decides only, and does no IO but for one question to the daemon where a request has ended. ``request`` arguments are
vLLM's ``Request``, of which a few attributes are read.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from kvd_client.engines._vllm_plan import BOARD, Board, Load, Plan, Rejection, Save, prompt_digest, text_of
from kvd_client.errors import InvalidArgument, KvdError

log = logging.getLogger("vllm.kvd")  # vLLM shows its own tree of loggers only

RETRY_S = 5.0
"""A daemon that has not answered is asked again after so long."""


@dataclasses.dataclass(slots=True)
class _Source:
    """A request whose cache will be fetched."""

    transfer: str
    tokens: int
    prompt: str
    sink: str
    computed: int = 0


@dataclasses.dataclass(slots=True)
class _Sink:
    """A request whose cache is elsewhere."""

    transfer: str
    source: str
    handle: str
    prompt: str
    state: str = "new"
    """``new``: not admitted yet; ``loading``: a worker has it; ``over``: loaded, failed, rejected or not needed."""


class SchedulerSide:
    """One engine's. ``node`` asks the daemon for its name, and raises :class:`KvdError` where there is none."""

    def __init__(
        self, engine: str, block_tokens: int, node: Callable[[], str], *, produce: bool, consume: bool,
        board: Board = BOARD, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._engine, self._block, self._ask, self._board, self._clock = engine, block_tokens, node, board, clock
        self._produce, self._consume = produce, consume
        self._sources: dict[str, _Source] = {}
        self._sinks: dict[str, _Sink] = {}
        self._plan = Plan()
        self._node = ""
        self._ask_again = float("-inf")

    # --- admission ------------------------------------------------------------------------------------------------

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """How many tokens behind the first ``computed`` another engine brings, and that they come asynchronously.

        The whole prompt: what the engine computes by itself is its last token, for the logits. Where no more than that
        is missing, nothing is fetched.
        """
        sink = self._sink_of(request)
        if sink is None or sink.state != "new":
            return 0, False
        missing = len(request.prompt_token_ids) - computed
        return (missing, True) if missing > 1 else (0, False)

    def allocated(self, request: Any, blocks: list[int], external: int) -> None:
        """A request has its blocks; ``external`` tokens are to be loaded into the last of them."""
        # First what vLLM waits for: nothing below may keep it from a worker.
        sink = self._sink_of(request)
        if sink is not None and sink.state == "new":
            self._load(request, sink, blocks, external)
        self._add_source(request)

    def _load(self, request: Any, sink: _Sink, blocks: list[int], external: int) -> None:
        if external <= 0:
            self._reject(request.request_id, "this engine has the prompt already")
            return
        tokens = len(request.prompt_token_ids)
        sink.state = "loading"
        self._plan.loads.append(
            Load(
                request=request.request_id, transfer=sink.transfer, blocks=blocks[: -(-tokens // self._block)],
                held=tokens - external, tokens=tokens, prompt=sink.prompt, source=sink.source, handle=sink.handle,
            )
        )  # fmt: skip

    def _sink_of(self, request: Any) -> _Sink | None:
        known = self._sinks.get(request.request_id)
        params = request.kv_transfer_params
        if known is not None or not self._consume or not params or not params.get("do_remote_prefill"):
            return known
        names = self._names(params, "kvd_request", "kvd_source", "kvd_handle")
        if names is None or not (names[0] or names[2]) or not request.prompt_token_ids:
            return None  # another connector's, or a prompt of embeddings
        # A handle alone will do; the id under which this side opens is then its own.
        transfer = names[0] or f"{self._engine}:{request.request_id}"
        found = self._sinks[request.request_id] = _Sink(transfer, names[1], names[2], _digest(request))
        return found

    def _add_source(self, request: Any) -> None:
        params = request.kv_transfer_params
        known = request.request_id in self._sources
        if known or not self._produce or not params or not params.get("do_remote_decode"):
            return
        names = self._names(params, "kvd_request", "kvd_sink")
        if names is None or not request.prompt_token_ids:
            return
        transfer = names[0] or f"{self._engine}:{request.request_id}"
        self._sources[request.request_id] = _Source(transfer, len(request.prompt_token_ids), _digest(request), names[1])

    def _names(self, params: Any, *keys: str) -> list[str] | None:
        """Texts of ``kv_transfer_params``, which come from the network; None where one of them is none."""
        try:
            return [text_of(params, key) for key in keys]
        except InvalidArgument as error:
            log.warning("kvd: a request is served without a transfer: %s", error)
            return None

    # --- each step ------------------------------------------------------------------------------------------------

    def plan(self, output: Any) -> Plan:
        """What the workers do around the pass that vLLM's ``SchedulerOutput`` describes."""
        plan, self._plan = self._plan, Plan()
        try:
            self._save_all(plan, output)
        except Exception:  # of another vLLM's output; the loads in the plan are waited for
            log.exception("kvd: no prompt of this step is handed over")
        return plan

    def _save_all(self, plan: Plan, output: Any) -> None:
        scheduled = output.num_scheduled_tokens
        plan.idle = not scheduled
        for new in output.scheduled_new_reqs:
            self._save(plan, new.req_id, new.block_ids[0], True, new.num_computed_tokens, scheduled)
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            anew = name in cached.resumed_req_ids
            self._save(plan, name, blocks[0] if blocks else [], anew, computed, scheduled)

    def _save(self, plan: Plan, name: str, blocks: Any, anew: bool, computed: int, scheduled: dict[str, int]) -> None:
        source = self._sources.get(name)
        if source is None or source.computed >= source.tokens:
            return
        # After a preemption computed is small again; what has been handed over stays good.
        reached = min(computed + scheduled.get(name, 0), source.tokens)
        source.computed = max(source.computed, reached)
        plan.saves.append(
            Save(
                request=name, transfer=source.transfer, blocks=list(blocks), anew=anew, computed=reached,
                tokens=source.tokens, prompt=source.prompt, sink=source.sink,
            )
        )  # fmt: skip

    def received(self, requests: Iterable[str]) -> None:
        """The workers are through with these loads, whatever came of them."""
        for name in requests:
            if name in self._sinks:
                self._sinks[name].state = "over"

    # --- the end --------------------------------------------------------------------------------------------------

    def finished(self, request: Any) -> dict[str, Any] | None:
        """A request has ended: what its answer says about its cache, for a router to hand to a decode engine.

        Its blocks are free at once: what is awaited elsewhere has been copied, and lies in the daemon's pool.
        """
        name = request.request_id
        sink = self._sink_of(request)
        if sink is not None:
            if sink.state == "new":
                self._reject(name, "the request ended before it was admitted")
            elif sink.state == "loading":
                self._plan.drop_loads.append(name)
            self._sinks.pop(name, None)
        source = self._sources.pop(name, None)
        if source is None:
            return None
        whole = source.computed >= source.tokens
        if not whole or getattr(request.status, "name", "") not in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"):
            self._plan.drop_saves.append(name)
            return None
        params = self._params(source)
        self._board.remove(source.transfer)
        return params

    def _params(self, source: _Source) -> dict[str, Any]:
        found: dict[str, Any] = {"do_remote_prefill": False, "do_remote_decode": False}
        node = "" if self._board.has_failed(source.transfer) else self._node_id()
        if not node:
            return found  # decode computes the prompt itself, at once, instead of asking for what is not there
        found |= {"do_remote_prefill": True, "kvd_request": source.transfer, "kvd_source": node}
        handle = self._board.handle(source.transfer)
        return found | {"kvd_handle": handle} if handle else found

    def _node_id(self) -> str:
        now = self._clock()
        if not self._node and now >= self._ask_again:
            try:
                self._node = self._ask()
            except KvdError as error:
                self._ask_again = now + RETRY_S
                log.warning("kvd: prompts are not handed over: %s", error)
        return self._node

    def _reject(self, name: str, reason: str) -> None:
        sink = self._sinks[name]
        sink.state = "over"
        if sink.handle or sink.source:
            self._plan.rejections.append(Rejection(sink.transfer, sink.source, sink.handle, reason))


def _digest(request: Any) -> str:
    lora = getattr(request, "lora_request", None)
    images = [str(getattr(one, "identifier", one)) for one in getattr(request, "mm_features", None) or ()]
    return prompt_digest(request.prompt_token_ids, str(getattr(lora, "lora_name", "")) if lora else "", *images)
