"""Importance that knows the prompt, in a running system: ``python -m tests.bench.bench_prompt FOLDER``.

FOLDER has recordings of real prompts, as ``kvd profile selections -o FOLDER`` makes them. Each prompt is replayed
through two daemons, once ordered by a profile of the *other* domains alone, and once with the rankings that prefill
would have made, by token and with a mask by head. Prefill is as fast as the link: of L layers each next one becomes
ready when the link has carried another part of the given share of the cache, so that a busy machine changes how long
it takes, and not what is sent. When the share has arrived the first token exists, and the masks of the sink say what
is there; the on-demand ratio is the share of the entries selected by the recorded decode steps that is not (layers 0
and 1 left out).

Printed for each share: that ratio in the running system, beside the same order replayed without a network, beside
orders that know every layer at once, and how much of the gap from the profile (by token) to the optimum is closed. The
optimum knows what decode will select.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.blocks import block_bounds
from kvd.importance.counts import HeadCounts, SelectionCounts
from kvd.importance.heads import CELLS
from kvd.importance.matrix import ALWAYS_LAYERS, ImportanceMatrix
from kvd.importance.prompt import combined, mixed
from kvd.profiling import files
from kvd.profiling.profile import Profile, ProfileGroup
from kvd.profiling.recorded import SUFFIX, Recorded, read
from kvd.transfer.replay import causal_sent, global_sent
from kvd_client import Client, KVSpec
from kvd_client.spec import MASK_LOCAL
from tests.integration.daemons import two_daemons
from tests.waiting import eventually

BLOCKS, ENTRY, RATE, WAIT_S = 1000, 256, "80mbit", 60.0
Mask = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, slots=True)
class Ratios:
    """On-demand ratios of one prompt and share; ``live_`` in the running system."""

    profile: float
    prompt: float
    optimal: float
    causal_profile: float
    causal_prompt: float
    live_profile: float
    live_prompt: float
    live_head: float
    """With masks and rankings by head."""
    live_head_profile: float
    """With masks by head, and the profile alone, which tells heads apart."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="recordings")
    parser.add_argument("--share", type=float, nargs="+", default=[0.5, 0.25], help="of the cache, while prefill runs")
    parser.add_argument("--prompts", type=int, default=2, help="of each domain")
    parser.add_argument("--steps", type=int, default=0, help="decode steps that count; 0: all")
    arguments = parser.parse_args()
    recorded = [read(path) for path in sorted(arguments.folder.glob(f"*{SUFFIX}"))]
    domains = sorted({one.name for one in recorded})
    if len(domains) < 2:
        parser.error(f"{arguments.folder} has recordings of {len(domains)} domains; it takes two or more")
    print(f"{len(recorded)} recordings of {recorded[0].selector}, domains {', '.join(domains)}")
    with (
        tempfile.TemporaryDirectory() as folder,
        two_daemons(
            Path(folder),
            selective={"mode": "parallel", "budget": "deadline"},
            fabric={"rate": RATE},
            profile={"learn": False},
        ) as (prefill, decode),
        prefill.client() as source,
        decode.client() as sink,
    ):
        for share in arguments.share:
            rows = []
            for domain in domains:
                known = profile_of([one for one in recorded if one.name != domain])
                source.install_profile(file_of(known, recorded[0]))
                for one in [one for one in recorded if one.name == domain][: arguments.prompts]:
                    rows.append(measure(source, sink, one, known, share, arguments.steps))
                    print(f"  {domain}: {rows[-1].live_profile:.3f} -> {rows[-1].live_prompt:.3f}", flush=True)
            show(share, rows)


def show(share: float, rows: list[Ratios]) -> None:
    mean = Ratios(*np.array([dataclasses.astuple(row) for row in rows]).mean(axis=0).tolist())

    def closed(before: float, after: float) -> str:
        return f"{(before - after) / (before - mean.optimal):4.0%}"

    print(f"\n{share:.0%} sent while prefill runs, {len(rows)} prompts")
    print("                            profile  prompt-aware  optimal  closes")
    for name, before, after, base in (
        ("everything known at once", mean.profile, mean.prompt, mean.profile),
        ("causal, replayed", mean.causal_profile, mean.causal_prompt, mean.causal_profile),
        ("running system", mean.live_profile, mean.live_prompt, mean.live_profile),
        ("running system, by head", mean.live_head_profile, mean.live_head, mean.live_profile),
    ):
        print(f"  {name:25s} {before:7.3f} {after:13.3f} {mean.optimal:8.3f}  {closed(base, after)}")
    print(
        f"  running system, of the gap of a profile that is known at once: {closed(mean.profile, mean.live_prompt)}, "
        f"by head {closed(mean.profile, mean.live_head)}\n"
    )


def profile_of(recorded: list[Recorded]) -> ImportanceMatrix:
    counts, heads = SelectionCounts(recorded[0].layers, BLOCKS), HeadCounts(recorded[0].layers, recorded[0].kv_heads)
    for one in recorded:
        counts.merge(one.selection_counts(BLOCKS))
        cells = one.counts(CELLS, heads=True)
        for layer in range(ALWAYS_LAYERS, one.layers):
            heads.add(layer, cells[layer], length=one.length, steps=one.step_count)
    return counts.matrix(heads)


def measure(source: Client, sink: Client, one: Recorded, known: ImportanceMatrix, share: float, steps: int) -> Ratios:
    blocks = min(BLOCKS, one.length)
    shares = mixed(one.shares(1, blocks), one.shares(one.query_count, blocks)).astype(np.float32)
    chosen = slice(0, steps or None)
    by_head = mixed(one.shares(1, blocks, heads=True), one.shares(one.query_count, blocks, heads=True))
    live = {ranked: serve(source, sink, one, shares[:, None] if ranked else None, share) for ranked in (False, True)}
    how: dict[str, Any] = {"length": one.length, "sent": share}
    knowing = known.resampled(blocks).values
    ranked = np.stack(
        [
            combined(knowing[layer], shares[layer : layer + 1])[0] if layer >= ALWAYS_LAYERS else knowing[layer]
            for layer in range(one.layers)
        ]
    )
    tokens = np.maximum(np.diff(block_bounds(one.length, blocks)), 1)
    return Ratios(
        profile=ratio(one, global_sent(knowing, **how), chosen),
        prompt=ratio(one, global_sent(ranked, **how), chosen),
        optimal=ratio(one, global_sent((one.counts(blocks, steps=chosen) / tokens).astype(np.float32), **how), chosen),
        causal_profile=ratio(one, causal_sent(known, None, layers=one.layers, **how), chosen),
        causal_prompt=ratio(one, causal_sent(known, shares, layers=one.layers, **how), chosen),
        live_profile=ratio(one, live[False], chosen),
        live_prompt=ratio(one, live[True], chosen),
        live_head=ratio(one, serve(source, sink, one, by_head.astype(np.float32), share, mask="head"), chosen),
        live_head_profile=ratio(one, serve(source, sink, one, None, share, mask="head"), chosen),
    )


def ratio(one: Recorded, sent: Mask, steps: slice) -> float:
    selected = missing = 0
    for layer in range(ALWAYS_LAYERS, one.layers):
        mask = one.step_mask(layer)[steps]
        selected += int(mask.sum())
        missing += int((mask & ~sent[layer]).sum())
    return missing / selected


def spec_of(one: Recorded) -> KVSpec:
    return KVSpec(
        layers=one.layers, kv_heads=one.kv_heads, entry_bytes=ENTRY, dtype="float16", model=one.model or "recorded"
    )


def file_of(known: ImportanceMatrix, one: Recorded) -> bytes:
    spec = spec_of(one)
    group = ProfileGroup(1, 1 << 20, known, 1, 1)
    return files.encode(
        Profile(
            model=spec.model,
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            entry_bytes=ENTRY,
            selector=one.selector,
            groups=(group,),
            created=datetime.now(UTC),
        )
    )


NUMBERS = itertools.count()


def serve(
    source: Client,
    sink: Client,
    one: Recorded,
    shares: npt.NDArray[np.float32] | None,
    share: float,
    mask: str = "token",
) -> Mask:
    """What has arrived at the sink when the first token exists: (layers, tokens), or by head (layers, heads, tokens).
    ``shares``: (layers, rows of the layout, blocks)."""
    spec, lengths, request = spec_of(one), [one.length], f"replayed {next(NUMBERS)}"
    with (
        sink.decode(
            request, spec, lengths, source="prefill", selector=one.selector, landing_entries=1, mask=mask
        ) as decode,
        source.prefill(request, spec, lengths, selector=one.selector, mask=mask) as transfer,
    ):

        def arrived() -> Mask:
            return np.stack([decode.mask(layer)[0, : one.length] == MASK_LOCAL for layer in range(spec.layers)])

        def until(true: Callable[[], bool]) -> None:
            eventually("the link carries something", true, WAIT_S, every=0.001)

        until(lambda: any(part.request == request and part.state == "running" for part in source.status().transfers))
        total = round(share * arrived().size)
        for layer in range(spec.layers):
            transfer.layer_ready(layer)
            if shares is not None and layer >= ALWAYS_LAYERS:
                transfer.rank(layer, shares[layer])
            part = total * (layer + 1) // (spec.layers - 1)
            if layer < spec.layers - 1:
                until(lambda part=part: arrived().sum() >= part)
        found = arrived()
        transfer.finish(wait=False)
        decode.release()
    return found


if __name__ == "__main__":
    main()
