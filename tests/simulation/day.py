"""A day of mixed load on the virtual clock: ``python -m tests.simulation.day --hours 24``.

Requests of every kind, most of them with something that goes wrong; sessions that break, nodes that crash, drain and
come back. Each hour ends with a pause in which everything must end and be given back; then what the cores hold is
weighed: every object that can be reached from them. Exit code 1 if a rule is broken, or if a core grew in a life of
several hours.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import sys
import time
import types
from collections import Counter

import psutil

from .links import Violation
from .plans import make_plan
from .world import World

HOUR_S = 3600.0
LOAD_S = 3300.0
"""Of each hour; the rest is for what is still under way, whose deadlines are minutes."""
STEPS = 1_000_000
"""Of an hour, at most."""
SLACK = 16 << 10
"""Bytes that a core may grow from one hour to a later one: sessions come and go, and new counters."""
_NOT_HELD = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, random.Random)


def weigh(root: object) -> tuple[int, int]:
    """Objects that can be reached, and their bytes; classes and code are nobody's."""
    seen, todo, nbytes = {id(root)}, [root], 0
    while todo:
        one = todo.pop()
        nbytes += sys.getsizeof(one)
        for other in gc.get_referents(one):
            if id(other) not in seen and not isinstance(other, _NOT_HELD):
                seen.add(id(other))
                todo.append(other)
    return len(seen), nbytes


@dataclasses.dataclass(slots=True)
class Hour:
    """What an hour ended with. Of all nodes together, but for ``most_leases``."""

    requests: int
    ended: Counter[str]
    """Parts, by code."""
    restarts: int
    most_leases: int
    """At one node at a time."""
    leases: int
    parts: int
    sessions: int
    objects: int
    nbytes: int
    steps: int


class Day(World):
    """``rate``: requests a second. The nodes' settings are drawn once, and never so that they would be overloaded."""

    CALM = 0.0
    CHUNKS = (1000,)
    SLABS = (400,)

    def __init__(self, seed: int, rate: float) -> None:
        self.rate = rate
        self.requests = 0
        self.most_leases = 0
        self.weights: dict[tuple[str, int], list[int]] = {}
        """By node and life: bytes that its core held at the ends of hours."""
        super().__init__(seed)
        self.endings = (self.crash, self.drain)
        """What ends a node's life, each once an hour."""

    def draw_load(self) -> None:
        """Each hour has its own (:meth:`hour`)."""

    def hour(self) -> Hour:
        """An hour of load, and what it has left."""
        rng, began, before = self.rng, self.now, self.steps
        self.most_steps = before + STEPS
        requests, lives = self.requests, sum(node.life for node in self.nodes.values())
        when = rng.expovariate(self.rate)
        while when < LOAD_S:
            self.at(began + when, self._arrive)
            when += rng.expovariate(self.rate)
        for mean_s, what in (
            (300, self.stray),
            (600, self.break_something),
            (600, lambda: self.hold_up(rng.choice((0.1, 1.0, 5.0)))),
            (1200, self.lie),
        ):
            for _ in range(round(LOAD_S / mean_s)):
                self.at(began + rng.uniform(0, LOAD_S), what)
        for what in self.endings:
            self.at(began + rng.uniform(0, LOAD_S), what, rng.choice(list(self.nodes.values())))
        self.at(began + HOUR_S, lambda: None)
        self.until_quiet()
        found = Hour(
            requests=self.requests - requests,
            ended=Counter(code for plan in self.plans for codes in plan.codes.values() for code in codes),
            restarts=(sum(node.life for node in self.nodes.values()) - lives) // 2,  # a crash ends a life, too
            most_leases=self.most_leases,
            leases=sum(node.memory.taken for node in self.nodes.values()),
            parts=sum(len(node.core.parts) for node in self.nodes.values()),
            sessions=sum(len(node.ends) for node in self.nodes.values()) // 2,
            objects=0,
            nbytes=0,
            steps=self.steps - before,
        )
        self._forget()
        for node in self.nodes.values():
            objects, nbytes = weigh(node.core)
            self.weights.setdefault((node.name, node.life), []).append(nbytes)
            found.objects += objects
            found.nbytes += nbytes
        return found

    def _arrive(self) -> None:
        self.requests += 1
        self.add_request(make_plan(self, self.requests, list(self.nodes)))
        self.most_leases = max(self.most_leases, *(node.memory.taken for node in self.nodes.values()))

    def _forget(self) -> None:
        """What the judges remember of the hour."""
        self.plans.clear()
        self.attempts.clear()
        self.profiled.clear()
        for node in self.nodes.values():
            node.records.clear()

    def grown(self) -> list[str]:
        """Of each core that grew, how much."""
        return [
            f"node {name}: its core held {held[0]} bytes after an hour of life {life}, and {held[-1]} after {len(held)}"
            for (name, life), held in self.weights.items()
            if held[-1] > held[0] + SLACK
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second, each of up to three ranks")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    day, began, process = Day(options.seed, options.rate), time.perf_counter(), psutil.Process()
    print(f"{len(day.nodes)} nodes, {options.rate:g} requests/s, seed {options.seed}")
    print(" hour requests    OK failed restarts | most leases | leases parts sessions objects   KiB | process MiB  fds")
    total: Counter[str] = Counter()
    wrong: list[str] = []
    try:
        for number in range(1, options.hours + 1):
            hour = day.hour()
            total += hour.ended
            print(
                f"{number:5} {hour.requests:8} {hour.ended['OK']:5} {hour.ended.total() - hour.ended['OK']:6} "
                f"{hour.restarts:8} | {hour.most_leases:11} | {hour.leases:6} {hour.parts:5} {hour.sessions:8} "
                f"{hour.objects:7} {hour.nbytes / 1024:5.1f} | {process.memory_info().rss / 2**20:11.0f} "
                f"{process.num_fds():4}",
                flush=True,
            )
        day.close()
        wrong = day.grown()
    except Violation as violation:
        wrong = [str(violation)]
    print(", ".join(f"{code} {count}" for code, count in total.most_common()))
    for line in wrong:
        print(f"WRONG: {line}")
    spent = f"{options.hours} hours, {day.requests} requests, {day.steps} steps in {time.perf_counter() - began:.0f} s"
    print(f"{spent}: {'NOT WELL' if wrong else 'flat, and everything given back'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
