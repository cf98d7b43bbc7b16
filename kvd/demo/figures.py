"""What runs with selective transfer showed, the bounds that they are judged by, and how both are told."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from statistics import median
from typing import Any

from kvd.demo.report import megabytes, rate, seconds
from kvd.importance.budget import needed_share, rest_s, ttst_bound

BUSY_FROM = 1.25
BUSY = " (this machine's processors are busy with something else: ratios to the bound mean little)"
STEPS_SHOWN = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
PATHS = ("metadata", "proactive", "on_demand", "speculative")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """In what runs of one prompt over one link differ."""

    mode: str
    budget: str = ""
    """Of modes that have one: ``fixed`` or ``deadline``."""
    speculative: str = ""
    """Of mode ``speculative``: ``windows`` or ``adaptive``."""
    mask: str = "token"
    """What is sent and marked by itself: one of :data:`kvd_client.spec.MASKS`, or before a run ``auto``."""

    @property
    def name(self) -> str:
        by_head = "by head" if self.mask == "head" else ""
        return " ".join(filter(None, (self.mode, self.budget, self.speculative, by_head)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One request. Times in seconds from the request's arrival."""

    setting: Setting
    tokens: list[int]
    """New tokens, the first (which prefill computed) included."""
    times: list[float]
    """When each was known."""
    selected: list[int]
    """By decode step: KV entries selected, layers 0 and 1 left out."""
    fetched: list[int]
    """Those of them that came from the source on demand."""
    waited_s: list[float]
    """By decode step: spent waiting for layers and metadata."""
    fetch_wait_s: list[float]
    """By decode step: spent waiting for fetches."""
    fetch_s: list[float] = dataclasses.field(default_factory=list)
    """By decode step: how long the fetches took, from the request until the answer was seen, added up."""
    select_s: list[float] = dataclasses.field(default_factory=list)
    """By decode step: spent choosing entries."""
    paths: dict[str, int]
    """Bytes by path, fetches and windows, as the source's daemon counted them."""
    local_s: float | None
    """When everything was at the sink; None: never."""
    cpu_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """CPU time of each process, from the request's arrival to the last token."""
    others_s: list[float] = dataclasses.field(default_factory=list)
    """TTST of the other runs of the same setting, of which this one is the median."""

    @property
    def ttft_s(self) -> float:
        return self.times[0]

    @property
    def ttst_s(self) -> float | None:
        return self.times[1] if len(self.times) > 1 else None

    @property
    def tbt_s(self) -> list[float]:
        """Times between tokens from the second on."""
        return [b - a for a, b in zip(self.times[1:], self.times[2:], strict=False)]

    @property
    def steady_s(self) -> float | None:
        """TBT in the end: the median of the steps with everything local, of the last quarter where that never was."""
        if self.local_s is None:
            return median(self.tbt_s[-max(len(self.tbt_s) // 4, 1) :]) if self.tbt_s else None
        local = self.local_s
        later = [b - a for a, b in zip(self.times[1:], self.times[2:], strict=False) if a >= local]
        return median(later) if later else None

    @property
    def hidden(self) -> float | None:
        """The share of the fetches' time that was hidden behind computing; None without fetches."""
        took = sum(self.fetch_s)
        return 1 - min(sum(self.fetch_wait_s) / took, 1.0) if took else None

    @property
    def ratios(self) -> list[float]:
        """On-demand ratio by decode step."""
        return [f / s if s else 0.0 for f, s in zip(self.fetched, self.selected, strict=True)]

    @property
    def ctl_s(self) -> list[float]:
        """CTL(n): time to the n-th token / n."""
        return [at / n for n, at in enumerate(self.times, 1)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Runs with one share of entries selected, and what one process alone makes of the same."""

    share: float
    entries: int
    """Selected of each layer and KV head."""
    local_tokens: list[int]
    local_text: str
    local_step_s: list[float]
    """By decode step, everything local and no daemon in the way."""
    local_select_s: list[float] = dataclasses.field(default_factory=list)
    """What of it was spent choosing entries."""
    orders: dict[str, dict[str, float | None]]
    """On-demand ratio with half of the blocks sent in each order: ``first`` step and ``all`` steps."""
    runs: list[Run] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Runs of one prompt over one link."""

    model: str
    selector: str
    layers: int
    prompt_tokens: int
    prefix_tokens: int
    """Of them, those whose KV cache the source held already."""
    kv_bytes: int
    metadata_bytes: int
    link: int
    """Bytes a second; 0: no limit."""
    prefill_s: float
    """T_p: the same prefill with its summaries, measured alone before the runs."""
    prefill_samples_s: list[float]
    profile: dict[str, Any]
    """Where the importance comes from: file, prompts, steps, tokens."""
    selections: list[Selection] = dataclasses.field(default_factory=list)

    @property
    def transfer_s(self) -> float:
        """T_t."""
        return self.kv_bytes / self.link if self.link else 0.0

    @property
    def tokens_equal(self) -> bool:
        return all(run.tokens == s.local_tokens for s in self.selections for run in s.runs)

    @property
    def disturbed(self) -> float:
        """How much longer prefill took in the runs than alone: the median of TTFT / T_p."""
        found = [run.ttft_s / self.prefill_s for s in self.selections for run in s.runs]
        return median(found) if found else 1.0

    def needed(self, selection: Selection) -> float:
        """f: the share of the cache that must have crossed the link before the second token."""
        chosen = selection.entries / self.prompt_tokens
        return needed_share(self.layers, chosen, self.metadata_bytes / self.kv_bytes)

    def step_s(self, selection: Selection) -> float | None:
        """A decode step with everything local."""
        return median(selection.local_step_s) if selection.local_step_s else None

    def select_share(self, selection: Selection) -> float | None:
        """What choosing entries costs, as a share of a decode step with everything local."""
        return _quotient(sum(selection.local_select_s), sum(selection.local_step_s))

    def bound_s(self, selection: Selection, mode: str = "", prefill_s: float | None = None) -> float | None:
        """The earliest possible second token; in mode ``full``, with all of the cache needed for it. ``prefill_s`` is
        T_p where it is another."""
        step = self.step_s(selection)
        if step is None:
            return None
        share = 1 + self.metadata_bytes / self.kv_bytes if mode == "full" else self.needed(selection)
        return ttst_bound(self.prefill_s if prefill_s is None else prefill_s, self.transfer_s, share, step)

    def judged(self, selection: Selection, run: Run) -> dict[str, float | None]:
        """A run by its bounds, and by mode ``full``."""
        full = next((each for each in selection.runs if each.setting.mode == "full"), None)
        rest = rest_s(self.transfer_s, self.needed(selection))
        bound = self.bound_s(selection, run.setting.mode)
        rest_took = None if run.local_s is None or run.ttst_s is None else max(run.local_s - run.ttst_s, 0.0)
        return {
            "bound_s": bound,
            "over_bound": _quotient(run.ttst_s, bound),
            # Prefill that shares its cores takes longer than T_p, which is not the transfer's doing.
            "over_bound_of_ttft": _quotient(run.ttst_s, self.bound_s(selection, run.setting.mode, run.ttft_s)),
            "full_over_ttst": _quotient(full.ttst_s if full else None, run.ttst_s),
            "steady_over_full": _quotient(run.steady_s, full.steady_s if full else None),
            "rest_s": rest,
            "rest_over_link_time": None if run.setting.mode == "full" else _quotient(rest_took, rest),
        }

    # --- for programs ---------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """One line of JSON; names carry their units."""
        found = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("selections", "link")
        }
        found |= {
            "link_bit_per_s": self.link * 8 or None,
            "transfer_s": self.transfer_s,
            "ttft_over_prefill_median": self.disturbed,
            "tokens_equal": self.tokens_equal,
            "selections": [self._selection_json(selection) for selection in self.selections],
        }
        return json.dumps(found)

    def _selection_json(self, selection: Selection) -> dict[str, Any]:
        return {
            "share": selection.share,
            "entries": selection.entries,
            "needed_share": self.needed(selection),
            "step_s": self.step_s(selection),
            "bound_s": self.bound_s(selection),
            "select_share_of_step": self.select_share(selection),
            "local_tokens": selection.local_tokens,
            "local_text": selection.local_text,
            "local_step_s": selection.local_step_s,
            "on_demand_ratio_by_order": selection.orders,
            "runs": [self._run_json(selection, run) for run in selection.runs],
        }

    def _run_json(self, selection: Selection, run: Run) -> dict[str, Any]:
        return {
            **dataclasses.asdict(run.setting),
            "ttft_s": run.ttft_s,
            "ttst_s": run.ttst_s,
            "other_ttst_s": run.others_s,
            **self.judged(selection, run),
            "tbt_s": run.tbt_s,
            "steady_tbt_s": run.steady_s,
            "ctl_s": run.ctl_s,
            "on_demand_ratio": run.ratios,
            "selected": run.selected,
            "fetched": run.fetched,
            "waited_s": run.waited_s,
            "fetch_wait_s": run.fetch_wait_s,
            "fetch_s": run.fetch_s,
            "fetch_hidden": run.hidden,
            "select_s": run.select_s,
            "paths": run.paths,
            "cpu_s": run.cpu_s,
            "local_s": run.local_s,
            "tokens": run.tokens,
            "tokens_equal": run.tokens == selection.local_tokens,
        }

    # --- for people -----------------------------------------------------------------------------------------------

    def rows(self) -> list[tuple[str, str]]:
        """What all runs have in common: a name and a value a row."""
        link = rate(self.link * 8 or None, "unlimited")
        samples = ", ".join(seconds(each) for each in self.prefill_samples_s)
        of_prefix = f", {self.prefix_tokens} of them held by the source before" if self.prefix_tokens else ""
        times = f" = {self.transfer_s / self.prefill_s:.1f} T_p" if self.link else ""
        return [
            ("model", self.model),
            ("prompt", f"{self.prompt_tokens} tokens{of_prefix}"),
            ("KV cache", f"{_bytes(self.kv_bytes)}, {self.selector} metadata {_bytes(self.metadata_bytes)}"),
            ("link", link),
            ("T_p, T_t", f"{seconds(self.prefill_s)} (of {samples}), {seconds(self.transfer_s)}{times}"),
            ("TTFT / T_p, median", f"{self.disturbed:.2f}" + (BUSY if self.disturbed > BUSY_FROM else "")),
            ("importance", ", ".join(f"{name} {value}" for name, value in self.profile.items()) or "by address"),
        ]

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Tables, each with a title, its columns' heads, and rows."""
        return [table for selection in self.selections for table in self._tables(selection)]

    def _tables(self, selection: Selection) -> list[tuple[str, list[str], list[list[str]]]]:
        title = (
            f"{100 * selection.share:g} % selected: {selection.entries} entries a layer and KV head; "
            f"f = {self.needed(selection):.3f}, one step with everything local {seconds(self.step_s(selection))}"
            f"{self._choosing(selection)}, "
            f"TTST bound {seconds(self.bound_s(selection))}"
        )
        times = [self._time_row(selection, run) for run in selection.runs]
        most = max((len(run.ratios) for run in selection.runs), default=0)
        steps = [step for step in STEPS_SHOWN if step <= most]
        by_step = [[run.setting.name, *(_at(run.ratios, step, "{:.3f}") for step in steps)] for run in selection.runs]
        between = [[run.setting.name, *(_at(run.tbt_s, step, "{:.3f}") for step in steps)] for run in selection.runs]
        moved = [
            [
                run.setting.name,
                *(_bytes(run.paths.get(path, 0)) for path in PATHS),
                str(run.paths.get("fetches", 0)),
                "-" if run.hidden is None else f"{100 * run.hidden:.0f} %",
            ]
            for run in selection.runs
        ]
        orders = [[name, _three(each["first"]), _three(each["all"])] for name, each in selection.orders.items()]
        return [
            (title, _TIME_HEADS, times),
            ("TBT in seconds, after token 1 + n", ["run", *map(str, steps)], between),
            ("on-demand ratio by decode step", ["run", *map(str, steps)], by_step),
            ("bytes by path", ["run", "metadata", "proactive", "on demand", "speculative", "fetches", "hidden"], moved),
            ("on-demand ratio, had half of the blocks been sent", ["order", "first step", "all steps"], orders),
        ]

    def _choosing(self, selection: Selection) -> str:
        share = self.select_share(selection)
        return "" if share is None else f" ({100 * share:.1f} % of it choosing)"

    def _time_row(self, selection: Selection, run: Run) -> list[str]:
        found = self.judged(selection, run)
        return [
            run.setting.name,
            seconds(run.ttft_s),
            seconds(run.ttst_s),
            seconds(found["bound_s"]),
            _two(found["over_bound"]),
            _two(found["over_bound_of_ttft"]),
            _two(found["full_over_ttst"]),
            seconds(run.steady_s),
            _two(found["steady_over_full"]),
            seconds(run.local_s),
            _two(found["rest_over_link_time"]),
            "yes" if run.tokens == selection.local_tokens else "NO",
        ]


_TIME_HEADS = [
    *("run", "TTFT", "TTST", "bound", "TTST/bound", "(by TTFT)", "full/TTST", "TBT end", "TBT/full"),
    *("all local", "rest/link time", "same tokens"),
]
"""In brackets: by the bound with TTFT in the place of T_p. TBT at the end, and that over mode full's; when everything
was local, and what that took after the second token over the link time that the rest needs."""


def median_run(runs: Sequence[Run]) -> Run:
    """Of runs of one setting, the one whose TTST is the median (of an even number the faster one of the two), with the
    others' TTST. A run with other tokens than the rest goes before: it must not be lost."""
    ordered = sorted(runs, key=lambda run: run.ttst_s or 0.0)
    odd = [run for run in ordered if run.tokens != ordered[0].tokens]
    chosen = odd[0] if odd else ordered[(len(ordered) - 1) // 2]
    others = [run.ttst_s for run in runs if run is not chosen and run.ttst_s is not None]
    return dataclasses.replace(chosen, others_s=others)


def _quotient(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _bytes(nbytes: int) -> str:
    if nbytes >= 1_000_000:
        return megabytes(nbytes)
    return f"{nbytes / 1e3:.1f} kB" if nbytes >= 1000 else f"{nbytes} B" if nbytes else "0"


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _three(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _at(values: Sequence[float], step: int, form: str) -> str:
    return form.format(values[step - 1]) if step <= len(values) else ""
