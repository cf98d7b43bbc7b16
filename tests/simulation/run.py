"""Run seeds: ``python -m tests.simulation.run --seed 17``, or ``--count 10000``, or a night's ``--count 1000000``.

On all cores unless told otherwise. Stops at the first seed that fails, by number and not by time, and tells its story:
what is printed is the same with any number of processes, but for the seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import resource_tracker

import pytest

from .planted import PLANTED
from .story import tell
from .world import World

BLOCK = 50
"""Seeds that a process is given at a time: some hundreds of milliseconds."""
SAY_EVERY_S = 60.0
PLANTS = {plant.__name__: plant for plant in PLANTED}


@dataclasses.dataclass(slots=True)
class Found:
    """Of some seeds that follow each other."""

    seeds: int = 0
    """How many have run."""
    steps: int = 0
    failed: list[int] = dataclasses.field(default_factory=list)

    def add(self, other: Found) -> None:
        self.seeds += other.seeds
        self.steps += other.steps
        self.failed += other.failed


def run_block(first: int, stop: int, keep_going: bool) -> Found:
    """Run the seeds; unless told to keep going, no further than the first that fails."""
    found = Found()
    for seed in range(first, stop):
        world = None
        found.seeds += 1
        try:
            world = World(seed)
            world.run()
        except Exception:  # told with its story afterwards
            found.failed.append(seed)
        found.steps += world.steps if world else 0
        if found.failed and not keep_going:
            break
    return found


@functools.cache
def prepare(plant: str) -> None:
    """What a process does, once, before its first seed."""
    gc.collect()
    gc.freeze()
    if plant:
        PLANTS[plant](pytest.MonkeyPatch())


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Ctrl-C comes afterwards; processes started meanwhile leave it to this one."""
    resource_tracker.ensure_running()  # would be started with the first process, and lets signals through again
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def blocks_of(first: int, count: int) -> tuple[list[int], list[int]]:
    """Where each block of seeds begins, and where it ends."""
    starts = list(range(first, first + count, BLOCK))
    return starts, [min(start + BLOCK, first + count) for start in starts]


def results(arguments: argparse.Namespace) -> Iterator[Found]:
    """Of each block, in their order."""
    starts, stops = blocks_of(arguments.seed, arguments.count)
    run = functools.partial(run_block, keep_going=arguments.keep_going)
    processes = min(arguments.processes, len(starts))
    if processes < 2:
        prepare(arguments.plant)
        yield from map(run, starts, stops)
        return
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, spawn, initializer=prepare, initargs=(arguments.plant,))
    try:
        with interrupts_held_back():
            found = pool.map(run, starts, stops)  # starts the processes
        yield from found
    finally:
        pool.shutdown(cancel_futures=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds, from the first on")
    parser.add_argument("--keep-going", action="store_true", help="count failures instead of stopping at the first")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one a core")
    parser.add_argument("--plant", choices=sorted(PLANTS), default="", help="a bug to plant, to see it found")
    arguments = parser.parse_args()
    began = said = time.perf_counter()
    found = Found()
    try:
        print(f"{arguments.count} seeds from {arguments.seed} on", flush=True)
        for one in results(arguments):
            found.add(one)
            if found.failed and not arguments.keep_going:
                break
            if time.perf_counter() - said > SAY_EVERY_S:
                said = time.perf_counter()
                print(f"{found.seeds} seeds, {found.steps} steps, {said - began:.0f} s", flush=True)
    except KeyboardInterrupt:
        print(f"interrupted after {found.seeds} seeds, of which {len(found.failed)} failed")
        return 130
    seconds = time.perf_counter() - began
    if found.failed:
        prepare(arguments.plant)
        print(tell(found.failed[0], f" --plant {arguments.plant}" if arguments.plant else ""))
        print(f"failing seeds: {found.failed[:50]}")
    verdict = "FAILED" if found.failed else "all well"
    print(f"{found.seeds} seeds, {found.steps} steps, {seconds:.1f} s: {verdict}")
    return 1 if found.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
