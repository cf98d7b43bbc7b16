"""Run seeds by hand: ``python -m tests.simulation.run --seed 17`` or ``--seed 1 --count 100000``."""

from __future__ import annotations

import argparse
import time

from .story import tell
from .world import World


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds, from the first on")
    parser.add_argument("--keep-going", action="store_true", help="count failures instead of stopping at the first")
    arguments = parser.parse_args()
    began, steps, failed = time.perf_counter(), 0, []
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        world = None
        try:
            world = World(seed)
            world.run()
        except Exception:  # told with its story below
            failed.append(seed)
            if not arguments.keep_going:
                break
        steps += world.steps if world else 0
    seconds = time.perf_counter() - began
    if failed:
        print(tell(failed[0]))
        print(f"failing seeds: {failed[:50]}")
    print(f"{arguments.count} seeds, {steps} steps, {seconds:.1f} s: {'FAILED' if failed else 'all well'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
