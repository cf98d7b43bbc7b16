"""What the order of sending costs the source's daemon: ``python -m tests.bench.bench_queue``.

One transfer of SmolLM2's shape as ``kvd demo --compare`` makes it: 30 layers, 2,000 tokens, 1,000 KV blocks, 95 % of
them ready at once (a prefix hit), the others layer by layer with what the prompt's queries select, while the link takes
a seventh of the cache in turns of 64 KiB; then the first token, and the rest. By token (one row) and by head (three,
and eight), and a batch of 8 by head; by head with a profile that tells heads apart. Selections are whole pages of 16
tokens, as Quest's.

Prints microseconds of CPU time a layer, best of the rounds, the sum over what sorting the same number of float32 takes
NumPy in the same run, and the longest call of each kind.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvd.importance.heads import CELLS, HeadImportance
from kvd.importance.matrix import ImportanceMatrix
from kvd.transfer.order import Policy
from kvd.transfer.policy import Profiled, Selective, choose_policy
from kvd.transfer.queue import SendQueue
from kvd_client.spec import PartLayout, TokenRange

LAYERS, TOKENS, BLOCKS, ENTRY, HEADS = 30, 2000, 1000, 512, 3
PREFIX, SENT, TURN, PAGE = 0.95, 1 / 7, 64 << 10, 16
CASES = {
    "by token": (1, HEADS),
    "by head": (HEADS, 1),
    "eight heads by head": (8, 1),
    "a batch of 8 by head": (8 * HEADS, 1),
}
"""Rows of the layout, heads of each."""
PHASES = ("prefix ready", "layer ready", "rank", "take", "first token", "take the rest")

Shares = npt.NDArray[np.float32]


def importance(rows: int, seed: int) -> Shares:
    """(rows, blocks) as queries select them: whole pages, some wanted by all and most by few."""
    rng = np.random.default_rng(seed)
    pages = rng.beta(0.4, 1.6, (rows, -(-TOKENS // PAGE)))
    pages[:, 0], pages[:, -4:] = 1.0, 0.9
    wanted = np.round(pages * 12) / 12
    return wanted[:, np.arange(BLOCKS) * TOKENS // BLOCKS // PAGE].astype(np.float32)


class Clock:
    """CPU seconds by phase: all of it, and the longest call, for which everything else of the daemon waits."""

    def __init__(self) -> None:
        self.spent, self.longest = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)

    def call(self, phase: str, work: Callable[[], object]) -> object:
        since = time.thread_time()
        found = work()
        took = time.thread_time() - since
        self.spent[phase] += took
        self.longest[phase] = max(self.longest[phase], took)
        return found


def policy_of(rows: int, heads: int) -> Policy:
    """As the daemon makes it of a recorded profile."""
    profile = np.stack([importance(1, layer)[0] for layer in range(LAYERS)])
    each = rows if rows == 8 else min(rows, HEADS)
    split = np.random.default_rng(0).random((LAYERS, each, CELLS), np.float32)
    known = Profiled(ImportanceMatrix(profile, HeadImportance(split)))
    return choose_policy(
        "speculative",
        Selective(),
        known,
        layers=LAYERS,
        lengths=(TOKENS,) * rows,
        token_bytes=heads * ENTRY,
        heads=(0, each) if rows > 1 else None,
    )


def transfer(rows: int, heads: int, policy: Policy, shares: list[Shares]) -> Clock:
    """Everything of one transfer."""
    layout = PartLayout(layers=LAYERS, heads=heads, entry_bytes=ENTRY, rows=rows, capacity=TOKENS)
    queue, clock = SendQueue(layout, (TOKENS,) * rows, policy, drops=True), Clock()
    held = int(PREFIX * TOKENS)
    for layer in range(LAYERS):
        ready = [(layer, TokenRange(row, 0, held)) for row in range(rows)]
        clock.call("prefix ready", lambda ready=ready: queue.add(ready))  # type: ignore[misc]
    total = layout.token_bytes * TOKENS * rows * LAYERS
    carried = 0.0
    for layer in range(LAYERS):
        ready = [(layer, TokenRange(row, held, TOKENS)) for row in range(rows)]
        clock.call("layer ready", lambda ready=ready: queue.add(ready))  # type: ignore[misc]
        clock.call("rank", lambda layer=layer: queue.rank(layer, shares[layer], 0.85))  # type: ignore[misc]
        while carried < SENT * total * (layer + 1) / LAYERS:
            clock.call("take", lambda: queue.take(TURN))
            carried += TURN
    clock.call("first token", queue.finish)
    queue.window()
    while clock.call("take the rest", lambda: queue.take(TURN)):
        pass
    assert queue.pending_tokens == 0
    return clock


def sorting(rows: int) -> float:
    """CPU seconds that NumPy takes to sort each layer's values."""
    values = [np.random.default_rng(layer).random(rows * BLOCKS, np.float32) for layer in range(LAYERS)]
    since = time.thread_time()
    for each in values:
        np.argsort(each, kind="stable")
    return time.thread_time() - since


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print("µs a layer             " + "".join(f"{phase:>15s}" for phase in PHASES) + "            sum   over a sort")
    for name, (rows, heads) in CASES.items():
        policy, shares = policy_of(rows, heads), [importance(rows, 1000 + layer) for layer in range(LAYERS)]
        rounds = [transfer(rows, heads, policy, shares) for _ in range(options.rounds)]
        floor = min(sorting(rows) for _ in range(options.rounds))
        best = [min(clock.spent[phase] for clock in rounds) for phase in PHASES]
        longest = [min(clock.longest[phase] for clock in rounds) for phase in PHASES]
        print(
            f"{name:23s}"
            + "".join(f"{1e6 * spent / LAYERS:15.0f}" for spent in best)
            + f"{1e6 * sum(best) / LAYERS:15.0f}{sum(best) / floor:14.1f}"
        )
        print("  longest call, µs     " + "".join(f"{1e6 * took:15.0f}" for took in longest))


if __name__ == "__main__":
    main()
