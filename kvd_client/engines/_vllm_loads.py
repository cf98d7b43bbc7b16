"""What a vLLM worker waits for: layers go from the lease into the request's blocks as they arrive.

One thread does it, beside the engine's passes. Only this thread writes into blocks, and it has stopped before the
engine hears of an end: nothing that arrives late lands in blocks that somebody else has been given.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from kvd_client.engines._vllm_node import AnyDecode, Node, give_back, parts_of, reason_of
from kvd_client.engines._vllm_paged import PagedCache
from kvd_client.engines._vllm_plan import Load, Rejection
from kvd_client.errors import Aborted, DeadlineExceeded, KvdError

log = logging.getLogger("vllm.kvd")

LOOK_S = 0.001
"""While requests wait, this often."""
IDLE_S = 0.002


@dataclasses.dataclass(slots=True)
class _Loading:
    load: Load
    until: float
    after: Any = None
    retry_at: float = 0.0
    open: AnyDecode | None = None
    layer: int = 0
    """The next to be copied."""
    dropped: bool = False


class Loads:
    """One worker's. ``deadline_s`` bounds each load, whatever the daemon says."""

    def __init__(
        self, node: Node, cache: PagedCache, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._node, self._cache, self._deadline_s, self._clock = node, cache, deadline_s, clock
        self._loads: dict[str, _Loading] = {}
        self._rejections: list[Rejection] = []
        self._ended: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    # --- the engine's thread --------------------------------------------------------------------------------------

    def add(self, loads: Iterable[Load], rejections: Iterable[Rejection] = ()) -> None:
        """Begin to load; each request will be in what :meth:`take` returns, once."""
        new, rejections = list(loads), list(rejections)
        if not new and not rejections:
            return
        now = self._clock()
        with self._changed:
            for load in new:
                self._loads[load.request] = _Loading(load, now + self._deadline_s)
            self._rejections += rejections
            try:
                after = self._cache.mark()
                for load in new:
                    self._loads[load.request].after = after
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="kvd-loads", daemon=True)
                    thread.start()
                    self._thread = thread
            except Exception as error:  # vLLM waits for them, whatever happens
                for load in new:
                    self._over(load, error)
            self._changed.notify_all()

    def drop(self, requests: Iterable[str]) -> None:
        """Nobody wants these any more; they end soon, and their blocks are not counted as failed."""
        with self._changed:
            for name in requests:
                if name in self._loads:
                    self._loads[name].dropped = True

    def take(self, idle: bool = False) -> set[str]:
        """Requests that have ended since the last call, loaded or not.

        An engine that waits for nothing else (``idle``) makes one empty pass after the other, and would keep this
        thread, and the daemon, from the processor: then it is held here for a moment, or until one has ended.
        """
        with self._changed:
            if self._loads and self._thread is not None and not self._thread.is_alive():
                for loading in list(self._loads.values()):
                    self._over(
                        loading.load, None if loading.dropped else RuntimeError("the thread that loads has ended")
                    )
            if idle and self._loads and not self._ended:
                self._changed.wait(IDLE_S)
            ended, self._ended = self._ended, set()
            return ended

    def take_failed_blocks(self) -> set[int]:
        """Blocks of those among them that have not been loaded. To be called after :meth:`take`: a failure between the
        two is reported early, which is allowed, while a late report is not."""
        with self._changed:
            failed, self._failed_blocks = self._failed_blocks, set()
            return failed

    def close(self) -> None:
        """Ends what is under way. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(10)

    # --- this thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._loads or self._rejections or self._closed):
                    self._changed.wait()
                loads, closed = list(self._loads.values()), self._closed
                rejections, self._rejections = self._rejections, []
            for rejection in rejections:
                self._reject(rejection)
            for loading in loads:
                if closed:
                    self._release(loading, "the engine shuts down")
                else:
                    self._step(loading)
            if closed:
                return
            with self._changed:
                if self._loads and not self._closed:
                    self._changed.wait(LOOK_S)

    def _reject(self, rejection: Rejection) -> None:
        try:
            self._node.reject(rejection)
        except Exception as error:  # then the source's deadline gives its memory back
            log.info("kvd: transfer %s could not be rejected: %s", rejection.transfer, error)

    def _step(self, loading: _Loading) -> None:
        try:
            done = self._advance(loading)
        except Exception as error:  # also what is our fault: the request must not wait for ever
            self._end(loading, error)
        else:
            if done:
                self._end(loading, None)

    def _advance(self, loading: _Loading) -> bool:
        """Copy what has arrived; whether that was the last of it. Raises what ended the load."""
        load, now = loading.load, self._clock()
        if loading.dropped:
            raise Aborted("the decode request ended")
        if now > loading.until:
            raise DeadlineExceeded(f"the cache was not there within {self._deadline_s:g} s", timeout_s=self._deadline_s)
        if loading.open is None:
            if now < loading.retry_at:
                return False
            try:
                loading.open = self._node.sink(load, self._cache.units(load.tokens), self._held(load))
            except KvdError as error:
                pause = error.fields.get("retry_after_s")
                if not pause:
                    raise
                loading.retry_at = now + min(float(pause), 1.0)
                return False
        transfer = loading.open
        self._check(transfer)
        start, stop = self._held(load), self._cache.units(load.tokens)
        while loading.layer < len(self._cache.layers) and transfer.poll_ready(loading.layer):
            entries = transfer.layer(loading.layer)[0, start:stop]
            self._cache.scatter(loading.layer, load.blocks, start, stop, entries, loading.after)
            # Memory that was taken away meanwhile reads zeros: only now is it known that it was not.
            self._check(transfer)
            loading.layer += 1
            if loading.dropped:
                return False
        return loading.layer == len(self._cache.layers)

    @staticmethod
    def _check(transfer: AnyDecode) -> None:
        for part in parts_of(transfer):
            part.check()

    def _held(self, load: Load) -> int:
        return self._cache.whole_units(load.held)

    def _end(self, loading: _Loading, error: Exception | None) -> None:
        try:
            self._release(loading, "" if error is None else reason_of(error))
        except Exception:
            log.exception("kvd: the transfer of request %s could not be released", loading.load.request)
        with self._changed:
            self._over(loading.load, None if loading.dropped else error)
            self._changed.notify_all()

    def _over(self, load: Load, error: Exception | None) -> None:
        """Report a load; the caller holds the lock."""
        self._loads.pop(load.request, None)
        self._ended.add(load.request)
        if error is not None:
            self._failed_blocks.update(load.blocks[load.held // self._cache.block_tokens :])
            log.warning(
                "kvd: the cache of request %s was not loaded: %s", load.request, error,
                exc_info=None if isinstance(error, KvdError) else error,
            )  # fmt: skip

    def _release(self, loading: _Loading, reason: str) -> None:
        transfer, loading.open = loading.open, None
        give_back(transfer, reason)
        if transfer is None and reason and (loading.load.handle or loading.load.source):
            # It was never opened here: its source should not keep it until its deadline.
            load = loading.load
            self._reject(Rejection(load.transfer, load.source, load.handle, reason))
