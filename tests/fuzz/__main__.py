"""``python -m tests.fuzz --messages 1000000``: attack every listener of a live daemon; exit code 1 if it suffers."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.fuzz.listeners import run

MEMORY_BOUND = 256 << 20
"""Most that the daemon may grow, whatever is sent to it: its limits' sum is below that."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvd-fuzz-") as folder:
        report = run(Path(folder), arguments.messages, arguments.seed, lambda text: print(f"  {text}", flush=True))
    print(f"{'listener':<16} {'messages':>10} {'connections':>12}")
    for name, count in report.messages.items():
        print(f"{name:<16} {count:>10} {report.connections[name]:>12}")
    total = sum(report.messages.values())
    pace = f"in {report.seconds:.0f} s, {total / report.seconds:.0f} a second, seed {arguments.seed}"
    print(f"{'all':<16} {total:>10}   {pace}")
    mib = [n / (1 << 20) for n in (report.anonymous_before, report.anonymous_most, report.anonymous_after)]
    print(f"the daemon's memory: {mib[0]:.1f} MiB before, {mib[1]:.1f} at most, {mib[2]:.1f} after")
    fds = (report.descriptors_before, report.descriptors_most, report.descriptors_after)
    print(f"its descriptors: {fds[0]} before, {fds[1]} at most, {fds[2]} after")
    print(f"memory still lent when all had gone: {report.left_in_use} bytes")
    print(f"transfers of others meanwhile: {report.transfers}, every byte right")
    for line in (*report.trouble, *report.bugs[:40]):
        print("!", line)
    grown = report.anonymous_most - report.anonymous_before
    good = not report.trouble and not report.bugs and report.left_in_use == 0 and grown < MEMORY_BOUND
    print("alive, bounded, and nobody was harmed" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
