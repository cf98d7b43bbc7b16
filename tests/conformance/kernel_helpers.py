"""What the tests of the kernels share: the implementation by name, guarded outputs, and other threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import kvd_kernels as kernels
import numpy as np

IMPLEMENTATIONS = kernels.available()
COMPILED = [name for name in IMPLEMENTATIONS if name != "numpy"]
GUARD = 64  # bytes on each side of an output, which nobody may touch


@contextmanager
def using(name: Any) -> Iterator[None]:
    before = kernels.select(name)
    try:
        yield
    finally:
        kernels.select(before)


class Guarded:
    """Output memory at a chosen distance from a 64-byte boundary, with guard bytes around."""

    def __init__(self, nbytes: int, offset: int = 0, fill: int = 0x5A) -> None:
        raw = np.full(nbytes + offset + 2 * GUARD + 64, fill, np.uint8)
        begin = -raw.ctypes.data % 64 + GUARD + offset
        self._raw, self._begin, self._end, self._fill = raw, begin, begin + nbytes, fill
        self.memory = raw[begin : begin + nbytes]
        assert nbytes == 0 or self.memory.ctypes.data % 64 == offset % 64

    def intact(self) -> bool:
        around = np.concatenate((self._raw[: self._begin], self._raw[self._end :]))
        return bool((around == self._fill).all())

    def untouched(self) -> bool:
        return self.intact() and bool((self.memory == self._fill).all())


def random_bytes(seed: int, n: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, n, np.uint8)


def another_runs_during(kernel: Callable[..., int], *arguments: Any) -> bool:
    """Whether another thread gets to run while the kernel works.

    Nobody is made to give the GIL up here (the switch interval is an hour), so only the kernel lets others run.
    """
    gate, ran = threading.Lock(), []

    def other() -> None:
        with gate:
            ran.append(True)

    gate.acquire()
    thread = threading.Thread(target=other)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        thread.start()  # returns when the other waits at the gate, for before that nothing takes the GIL from it
        gate.release()
        for _ in range(500):
            assert kernel(*arguments) == -1
            if ran:
                break
        return bool(ran)
    finally:
        sys.setswitchinterval(interval)
        thread.join()


@contextmanager
def changing(change: Callable[[], None]) -> Iterator[None]:
    """Another thread changes the arguments again and again, as another process may that shares their memory."""
    running, stop = threading.Event(), threading.Event()

    def run() -> None:
        while not stop.is_set():
            change()
            running.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert running.wait(60)
        yield
    finally:
        stop.set()
        thread.join()
