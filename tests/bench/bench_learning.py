"""A workload that changes, and daemons that learn: ``python -m tests.bench.bench_learning FOLDER``.

FOLDER has recordings of real prompts of two domains at least, as ``kvd profile selections -o FOLDER`` makes them. Two
daemons start with a profile of one domain, as recorded offline (``--before none``: with nothing). Then come requests of
the other domain, replayed through them: real transfers, whose decode selects what was selected when the prompts were
recorded. After each the daemon's learnt profile is exported, and judged by prompts that it has not seen: the on-demand
ratio with a share of the blocks sent, in the order of that profile. It has recovered when that ratio is within 5 % of
the ratio of a profile recorded afresh from the second domain, from as many steps of the same prompts.

Also printed: what counting costs, as a share of a select and of a decode step of the given time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import tempfile
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.demo.orders import on_demand_ratio
from kvd.importance.counts import SelectionCounts
from kvd.importance.matrix import ALWAYS_LAYERS, ImportanceMatrix
from kvd.profiling import files
from kvd.profiling.profile import Profile, ProfileGroup
from kvd.profiling.recorded import SUFFIX, Recorded, read
from kvd.profiling.recorder import group_range
from kvd_client import Client, KVSpec
from tests.integration.daemons import two_daemons
from tests.waiting import eventually

BLOCKS, ENTRY, WAIT_S, WITHIN = 1000, 64, 60.0, 1.05
NUMBERS = itertools.count()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="recordings")
    parser.add_argument("--before", default="code", help="the domain of the profile at the start, or none")
    parser.add_argument("--after", default="dialogue", help="the domain that requests come from")
    parser.add_argument("--half-life", default="64 requests")
    parser.add_argument("--share", type=float, default=0.5, help="of all blocks that is sent")
    parser.add_argument("--steps", type=int, default=4, help="decode steps of a request")
    parser.add_argument("--most", type=int, default=400, help="give up after so many requests")
    parser.add_argument("--step-ms", type=float, default=200.0, help="what a decode step of the model takes")
    arguments = parser.parse_args()
    recorded = [read(path) for path in sorted(arguments.folder.glob(f"*{SUFFIX}"))]
    before = [one for one in recorded if one.name == arguments.before]
    after = [one for one in recorded if one.name == arguments.after]
    if (not before and arguments.before != "none") or len(after) < 3:
        parser.error(f"{arguments.folder} has too few recordings of {arguments.before} or {arguments.after}")
    # Held out: a profile is judged by prompts that neither it nor the fresh one was made of.
    seen, held_out = after[: len(after) * 2 // 3], after[len(after) * 2 // 3 :]
    print(
        f"{recorded[0].selector}: profile of {len(before)} {arguments.before} prompts, requests from {len(seen)} "
        f"{arguments.after} prompts, judged by {len(held_out)} others; half-life {arguments.half_life}"
    )

    def judged(matrix: ImportanceMatrix) -> float:
        order = matrix.resampled(BLOCKS).order()
        return float(np.mean([on_demand_ratio(one.counts(BLOCKS), order, arguments.share) for one in held_out]))

    stale = profile_of(before) if before else None
    aim = judged(profile_of(seen, arguments.steps))
    found = judged(stale or ImportanceMatrix.sequential(recorded[0].layers, BLOCKS))
    print(f"on-demand ratio at {arguments.share:.0%} sent: {found:.4f} at the start, {aim:.4f} recorded afresh")
    with (
        tempfile.TemporaryDirectory() as folder,
        two_daemons(Path(folder), selective={"mode": "parallel"}, profile={"half_life": arguments.half_life}) as (
            prefill,
            decode,
        ),
        prefill.client() as source,
        decode.client() as sink,
    ):
        for client in (source, sink) if stale is not None else ():
            client.install_profile(file_of(stale, recorded[0]))
        spec = spec_of(recorded[0])
        count, took, selects = 0, 0.0, 0
        for one in itertools.cycle(seen):
            if found <= WITHIN * aim or count >= arguments.most:
                break
            spent, calls = serve(source, sink, one, arguments.steps)
            took, selects, count = took + spent, selects + calls, count + 1
            found = judged(exported(sink, spec, one))
            if count in (1, 2, 4, 8, 16, 32, 64, 128, 256) or found <= WITHIN * aim:
                print(f"  after {count:3d} requests {found:.4f}, {found / aim - 1:+.1%} of the fresh one", flush=True)
        verdict = "within 5 % of" if found <= WITHIN * aim else "not within 5 % of"
        print(f"{verdict} a fresh profile after {count} requests")
        if count:
            eventually("the source hears of it", partial(has_heard, source, count), WAIT_S)
            heard = judged(exported(source, spec, seen[0]))
            print(f"the source, which heard of it in messages: {heard:.4f}, {heard / aim - 1:+.1%}")
            counting = cost_of_counting(seen[0])
            step = counting * (spec.layers - ALWAYS_LAYERS) * 1e3 / arguments.step_ms
            print(
                f"counting costs {counting * 1e6:.1f} us a layer and step, {counting / (took / selects):.1%} of a "
                f"select, {step:.2%} of a decode step of {arguments.step_ms:g} ms"
            )


def has_heard(source: Client, count: int) -> bool:
    """Whether the source's daemon has been told of so many requests."""
    status = source.status()
    return status.counters.get("learnt_heard", 0) > 0 and status.learnt[0].heard >= count


def profile_of(recorded: list[Recorded], steps: int | None = None) -> ImportanceMatrix:
    counts = SelectionCounts(recorded[0].layers, BLOCKS)
    for one in recorded:
        chosen = dataclasses.replace(one, steps=np.ascontiguousarray(one.steps[:, :steps]))
        counts.merge(chosen.selection_counts(BLOCKS))
    return counts.matrix()


def spec_of(one: Recorded) -> KVSpec:
    return KVSpec(
        layers=one.layers, kv_heads=one.kv_heads, entry_bytes=ENTRY, dtype="float16", model=one.model or "recorded"
    )


def file_of(known: ImportanceMatrix, one: Recorded) -> bytes:
    spec, (low, high) = spec_of(one), group_range(one.length)
    return files.encode(
        Profile(
            model=spec.model,
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            entry_bytes=ENTRY,
            selector=one.selector,
            groups=(ProfileGroup(low, high, known, 1, 1),),
            created=datetime.now(UTC),
        )
    )


def exported(client: Client, spec: KVSpec, one: Recorded) -> ImportanceMatrix:
    profile = files.decode(client.export_profile(spec.model, one.selector, learnt=True))
    return profile.importance.nearest(one.length).matrix


def indices_of(one: Recorded, steps: int) -> list[list[npt.NDArray[np.int32]]]:
    """By step and layer, a KV index."""
    masks = [one.step_mask(layer) for layer in range(one.layers)]
    found = []
    for step in range(min(steps, one.step_count)):
        rows = [[np.flatnonzero(head) for head in masks[layer][step]] for layer in range(one.layers)]
        found.append([_padded(heads) for heads in rows])
    return found


def _padded(heads: list[Any]) -> npt.NDArray[np.int32]:
    index = np.full((len(heads), max(map(len, heads))), -1, np.int32)
    for row, head in zip(index, heads, strict=True):
        row[: len(head)] = head
    return index


def serve(source: Client, sink: Client, one: Recorded, steps: int) -> tuple[float, int]:
    """One request from its opening to its release; seconds in select, and how many."""
    spec, request = spec_of(one), f"replayed {next(NUMBERS)}"
    indices = indices_of(one, steps)
    most = max(index.shape[1] for step in indices for index in step)
    how: dict[str, Any] = {"selector": one.selector}
    took, count = 0.0, 0
    with (
        sink.decode(request, spec, [one.length], source="prefill", landing_entries=most, **how) as decode,
        source.prefill(request, spec, [one.length], **how) as transfer,
    ):
        for layer in range(spec.layers):
            transfer.layer_ready(layer)
        transfer.finish(wait=False)
        for layer in range(ALWAYS_LAYERS):
            decode.wait_ready(layer, timeout_s=WAIT_S)
        for step in indices:
            for layer in range(ALWAYS_LAYERS, spec.layers):
                since = time.perf_counter()
                decode.select(layer, step[layer], timeout_s=WAIT_S)
                took, count = took + time.perf_counter() - since, count + 1
        decode.release()
    return took, count


def cost_of_counting(one: Recorded, rounds: int = 2000) -> float:
    """Seconds to count one layer's KV index of one step, as a select does."""
    from kvd_kernels import accumulate_blocks

    index = indices_of(one, 1)[0][ALWAYS_LAYERS]
    counts, lengths = np.zeros(BLOCKS, np.int64), np.array([one.length], np.int64)
    best = float("inf")
    for _ in range(rounds):
        since = time.perf_counter()
        accumulate_blocks(index, counts, lengths, beyond="skip")
        best = min(best, time.perf_counter() - since)
    return best


if __name__ == "__main__":
    main()
