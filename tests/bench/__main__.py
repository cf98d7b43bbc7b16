"""All benchmarks that need no model and no root, in one run: ``python -m tests.bench``."""

from __future__ import annotations

import subprocess
import sys

BENCHES = {
    "the tcp fabric beside a raw socket and memcpy": ["tests.bench.bench_fabric"],
    "the local API: round trip, ring events, import": ["tests.bench.bench_api"],
    "kernels beside memcpy": ["tests.bench.bench_kernels", "--rounds", "7"],
    "regrouping beside memcpy": ["tests.bench.bench_regroup", "--rounds", "7"],
    "channel memory under load": ["tests.bench.bench_channels"],
}


def main() -> int:
    worst = 0
    for title, command in BENCHES.items():
        print(f"\n== {title} (python -m {' '.join(command)})", flush=True)
        worst = max(worst, subprocess.run([sys.executable, "-m", *command], check=False).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
