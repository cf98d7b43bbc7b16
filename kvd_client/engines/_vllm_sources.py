"""What a vLLM worker hands over: each layer's blocks go into the lease as the pass computes them.

The engine's blocks are never lent to a transfer: what a request computed is copied, so its blocks are free when it
ends, whatever the network, the other engine and the daemon do. Nothing here raises, but for an interrupt.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Iterable

import numpy as np

from kvd_client.engines._vllm_node import AnyPrefill, Node, give_back, reason_of
from kvd_client.engines._vllm_paged import PagedCache
from kvd_client.engines._vllm_plan import BOARD, Board, Save
from kvd_client.errors import KvdError, LeaseExpired
from kvd_client.prefill import PrefillTransfer

log = logging.getLogger("vllm.kvd")

LOOK_S = 0.02
"""How often it is looked whether a transfer has been delivered, and its memory can go back."""


@dataclasses.dataclass(slots=True, eq=False)
class _Source:
    request: str
    transfer: str
    units: int
    """Of the whole prompt."""
    blocks: list[int] = dataclasses.field(default_factory=list)
    done: int = 0
    """Units that have been handed over in every layer."""
    open: AnyPrefill | None = None


@dataclasses.dataclass(slots=True, eq=False)
class _Step:
    """What one pass adds to a source: units ``[source.done, stop)``."""

    source: _Source
    stop: int
    layers: set[int] = dataclasses.field(default_factory=set)


class Sources:
    """One worker's. The engine's thread calls everything but what the thread here does."""

    def __init__(self, node: Node, cache: PagedCache, board: Board = BOARD) -> None:
        self._node, self._cache, self._board = node, cache, board
        self._sources: dict[str, _Source] = {}
        self._steps: list[_Step] = []
        self._waiting: list[tuple[_Step, int, Callable[[], None]]] = []
        """Copies from the device that are on their way, in order."""
        self._leaving: list[_Source] = []
        """Handed over completely, and not known to be delivered."""
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    # --- around a pass --------------------------------------------------------------------------------------------

    def begin(self, saves: Iterable[Save]) -> None:
        """A pass begins that will compute these."""
        self._steps = []
        for save in saves:
            source = self._sources.get(save.request)
            if source is None:
                if not save.anew or self._board.has_failed(save.transfer):
                    continue  # given up before
                source = _Source(save.request, save.transfer, self._cache.units(save.tokens))
                self._sources[save.request] = source
            source.blocks = list(save.blocks) if save.anew else source.blocks + save.blocks
            last = save.computed >= save.tokens
            stop = source.units if last else self._cache.whole_units(save.computed)
            if source.open is None and not self._open(source, save, last):
                continue
            if stop > source.done:
                self._steps.append(_Step(source, stop))

    def _open(self, source: _Source, save: Save, last: bool) -> bool:
        """Blocks stay in the engine's cache until the request ends, so a daemon that is full is asked at each chunk."""
        try:
            source.open = self._node.source(save, source.units)
        except KvdError as error:
            if last or not error.fields.get("retry_after_s"):
                self._give_up(source, error)
            return False
        self._board.put(source.transfer, source.open.handle if isinstance(source.open, PrefillTransfer) else "")
        return True

    def put(self, name: str) -> None:
        """The pass has computed the layer of this name."""
        layer = self._cache.index.get(name)
        if layer is not None:
            for step in self._steps:
                self._put(step, layer)

    def end(self) -> None:
        """The pass has computed everything: what has not been put is, and complete prompts are on their way."""
        for layer in range(len(self._cache.layers)):
            for step in self._steps:
                self._put(step, layer)
        for step, layer, wait in self._waiting:
            if step.source.open is not None:
                self._try(step.source, functools.partial(self._arrived, step, layer, wait))
        self._waiting = []
        steps, self._steps = self._steps, []
        for step in steps:
            source = step.source
            source.done = max(source.done, step.stop)
            if source.open is not None and source.done >= source.units:
                self._try(source, functools.partial(self._leave, source))

    def _put(self, step: _Step, layer: int) -> None:
        if layer not in step.layers and step.source.open is not None:
            step.layers.add(layer)
            self._try(step.source, functools.partial(self._copy, step, layer))

    def _copy(self, step: _Step, layer: int) -> None:
        source, transfer = step.source, step.source.open
        assert transfer is not None
        start, stop = source.done, step.stop
        if not isinstance(transfer, PrefillTransfer):
            p = transfer.layout
            entries = np.empty((stop - start, p.kv_heads, p.entry_bytes), np.uint8)
            wait = self._cache.gather(layer, source.blocks, start, stop, entries)
            if wait is not None:
                wait()
            transfer.put_layer(layer, entries=entries[None], start=start)
            return
        wait = self._cache.gather(layer, source.blocks, start, stop, transfer.layer(layer)[0, start:stop])
        if wait is None:
            transfer.layer_ready(layer, start, stop)
        else:
            self._waiting.append((step, layer, wait))

    def _arrived(self, step: _Step, layer: int, wait: Callable[[], None]) -> None:
        wait()
        transfer = step.source.open
        assert isinstance(transfer, PrefillTransfer)
        transfer.layer_ready(layer, step.source.done, step.stop)

    def _leave(self, source: _Source) -> None:
        assert source.open is not None
        source.open.finish(wait=False)
        self._sources.pop(source.request, None)
        with self._changed:
            self._leaving.append(source)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="kvd-sources", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _try(self, source: _Source, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # also what is our fault: the engine serves other requests
            self._give_up(source, error)

    def _give_up(self, source: _Source, error: Exception) -> None:
        log.warning("kvd: request %s is not handed over: %s", source.request, error, exc_info=not _told(error))
        self._sources.pop(source.request, None)
        self._board.put(source.transfer, None)
        transfer, source.open = source.open, None
        give_back(transfer, reason_of(error))

    def drop(self, requests: Iterable[str]) -> None:
        """These ended too early, or nobody has been told where their cache is: the memory is free at once."""
        names = set(requests)
        if not names:
            return
        with self._changed:
            dropped = [source for source in self._leaving if source.request in names]
            self._leaving = [source for source in self._leaving if source.request not in names]
        dropped += [source for name in names if (source := self._sources.pop(name, None)) is not None]
        for source in dropped:
            self._board.remove(source.transfer)
            transfer, source.open = source.open, None
            give_back(transfer, "the prefill request ended")

    # --- until it is delivered ------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Gives memory back when it is not needed any more; an engine that rests makes no passes to do it in."""
        while True:
            with self._changed:
                while not self._leaving and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                leaving = list(self._leaving)
            gone = [source for source in leaving if self._has_ended(source)]
            for source in gone:
                give_back(source.open)
                self._board.remove(source.transfer)
            with self._changed:
                self._leaving = [source for source in self._leaving if source not in gone]
                self._changed.wait(LOOK_S)

    @staticmethod
    def _has_ended(source: _Source) -> bool:
        transfer = source.open
        try:
            if transfer is None:  # dropped meanwhile
                return True
            parts = (transfer,) if isinstance(transfer, PrefillTransfer) else transfer.parts
            return all(part.poll_delivered() for part in parts)
        except Exception as error:
            if not isinstance(error, LeaseExpired):  # which is a drop's
                log.warning("kvd: request %s was not delivered: %s", source.request, error, exc_info=not _told(error))
            return True

    def close(self) -> None:
        """Ends what is on its way. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(10)
        self.drop([*self._sources, *(source.request for source in self._leaving)])


def _told(error: Exception) -> bool:
    return isinstance(error, KvdError)
