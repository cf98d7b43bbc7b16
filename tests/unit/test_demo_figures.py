"""The figures of runs with selective transfer: bounds, ratios, tables, JSON, and the picture."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from kvd.demo.compare import Options
from kvd.demo.display import aligned
from kvd.demo.figures import Comparison, Run, Selection, Setting, median_run

FULL = Setting(mode="full")
SPECULATIVE = Setting(mode="speculative", budget="deadline", speculative="windows")


def run_of(setting: Setting = SPECULATIVE, **changes: Any) -> Run:
    figures: dict[str, Any] = {
        "setting": setting,
        "tokens": [5, 6, 7, 8, 9],
        "times": [1.0, 2.0, 2.5, 2.75, 2.875],
        "selected": [100, 100, 100, 100],
        "fetched": [50, 20, 0, 0],
        "waited_s": [0.25, 0.0, 0.0, 0.0],
        "fetch_s": [1.4, 0.6, 0.4, 0.0],
        "fetch_wait_s": [0.5, 0.1, 0.0, 0.0],
        "paths": {"metadata": 4, "proactive": 1_500_000, "on_demand": 700, "fetches": 12, "windows": 9},
        "local_s": 2.5,
    }
    return Run(**figures | changes)


def comparison(*runs: Run, **changes: Any) -> Comparison:
    figures: dict[str, Any] = {
        "model": "tiny",
        "selector": "quest",
        "layers": 30,
        "prompt_tokens": 1000,
        "prefix_tokens": 950,
        "kv_bytes": 1_600_000,
        "metadata_bytes": 100_000,
        "link": 200_000,
        "prefill_s": 1.0,
        "prefill_samples_s": [1.0, 0.9, 1.2],
        "profile": {"file": "x.kvdprofile", "prompts": 6},
    }
    selection = Selection(
        share=0.1,
        entries=100,
        local_tokens=[5, 6, 7, 8, 9],
        local_text="text",
        local_step_s=[0.3, 0.1, 0.125],
        local_select_s=[0.03, 0.002, 0.01],
        orders={"sequential": {"first": 0.53, "all": 0.54}, "optimal": {"first": 0.1, "all": None}},
        runs=list(runs),
    )
    return Comparison(**figures | {"selections": [selection]} | changes)


def test_the_bound_is_that_of_the_definitions() -> None:
    made = comparison(run_of())
    selection = made.selections[0]
    assert made.transfer_s == 8.0
    f = 2 / 30 + 1 / 16 + 0.1 * 28 / 30
    assert made.needed(selection) == pytest.approx(f)
    assert made.step_s(selection) == 0.125
    assert made.bound_s(selection) == pytest.approx(8 * f + 0.125)
    # Full transfer needs all of it; where prefill takes longest, prefill decides.
    assert made.bound_s(selection, "full") == pytest.approx(8 * (1 + 1 / 16) + 0.125)
    assert comparison(run_of(), prefill_s=3.0).bound_s(selection) == pytest.approx(3.125)


def test_an_unlimited_link_leaves_prefill() -> None:
    made = comparison(run_of(), link=0)
    assert made.transfer_s == 0
    assert made.bound_s(made.selections[0]) == pytest.approx(1.125)
    assert dict(made.rows())["link"] == "unlimited"


def test_a_run_is_judged_by_its_bound_and_by_full() -> None:
    full = run_of(FULL, times=[1.0, 9.0, 9.25, 9.5, 9.75], fetched=[0, 0, 0, 0], local_s=8.9)
    made = comparison(full, run_of())
    selection = made.selections[0]
    found = made.judged(selection, selection.runs[1])
    bound, f = made.bound_s(selection), made.needed(selection)
    assert bound is not None
    assert found["over_bound"] == pytest.approx(2 / bound)
    assert found["full_over_ttst"] == 4.5
    assert found["rest_s"] == pytest.approx((1 - f) * 8)
    assert found["rest_over_link_time"] == pytest.approx(0.5 / ((1 - f) * 8))
    assert found["steady_over_full"] == pytest.approx(0.1875 / 0.25)
    assert made.judged(selection, full)["rest_over_link_time"] is None


def test_prefill_that_was_disturbed_is_told() -> None:
    made = comparison(run_of(), prefill_s=0.5)
    found = made.judged(made.selections[0], made.selections[0].runs[0])
    f = made.needed(made.selections[0])
    assert made.disturbed == 2.0
    assert "busy" in dict(made.rows())["TTFT / T_p, median"]
    assert "busy" not in dict(comparison(run_of()).rows())["TTFT / T_p, median"]
    assert found["over_bound_of_ttft"] == pytest.approx(2.0 / (max(1.0, 8 * f) + 0.125))


def test_tbt_and_ctl() -> None:
    run = run_of()
    assert run.ttft_s == 1.0
    assert run.ttst_s == 2.0
    assert run.tbt_s == [0.5, 0.25, 0.125]
    assert run.ctl_s == [1.0, 1.0, 2.5 / 3, 2.75 / 4, 2.875 / 5]
    assert run.ratios == [0.5, 0.2, 0.0, 0.0]


def test_the_end_is_what_began_with_everything_local() -> None:
    assert run_of(local_s=2.6).steady_s == 0.125
    assert run_of(local_s=2.0).steady_s == 0.25
    assert run_of(local_s=5.0).steady_s is None
    assert run_of(local_s=None).steady_s == 0.125  # never: the last quarter


def test_one_token_has_no_second() -> None:
    run = run_of(
        tokens=[5], times=[1.0], selected=[], fetched=[], waited_s=[], fetch_wait_s=[], fetch_s=[], local_s=None
    )
    made = comparison(run)
    assert run.ttst_s is None
    assert run.steady_s is None
    assert made.judged(made.selections[0], run)["over_bound"] is None
    assert made.tables()[0][2][0][2] == "-"
    json.loads(made.to_json())


def test_table_and_json_tell_the_same() -> None:
    full = run_of(FULL, times=[1.0, 9.0, 9.25, 9.5, 9.75], fetched=[0, 0, 0, 0], local_s=8.9)
    made = comparison(full, run_of())
    rows = dict(made.rows())
    assert rows["prompt"] == "1000 tokens, 950 of them held by the source before"
    assert rows["T_p, T_t"] == "1.00 s (of 1.00 s, 900 ms, 1.20 s), 8.00 s = 8.0 T_p"
    tables = {title: (heads, rows) for title, heads, rows in made.tables()}
    title = next(iter(tables))
    assert title.startswith("10 % selected: 100 entries a layer and KV head; f = 0.222")
    assert "(8.0 % of it choosing), TTST bound" in title
    heads, lines = tables[title]
    shown = dict(zip(heads, lines[1], strict=True))
    assert shown["run"] == "speculative deadline windows"
    assert shown["TTST"] == "2.00 s"
    assert shown["full/TTST"] == "4.50"
    assert shown["same tokens"] == "yes"
    assert tables["bytes by path"][1][1] == [
        "speculative deadline windows",
        "4 B",
        "1.5 MB",
        "700 B",
        "0",
        "12",
        "75 %",
    ]
    assert tables["on-demand ratio by decode step"][1][1][1:] == ["0.500", "0.200", "0.000", "0.000"]
    assert tables["on-demand ratio, had half of the blocks been sent"][1][1] == ["optimal", "0.100", "-"]
    tree = json.loads(made.to_json())
    run = tree["selections"][0]["runs"][1]
    assert tree["tokens_equal"] is True
    assert tree["link_bit_per_s"] == 1_600_000
    assert run["mode"] == "speculative"
    assert run["ttst_s"] == 2.0
    assert run["full_over_ttst"] == 4.5
    assert run["on_demand_ratio"] == [0.5, 0.2, 0.0, 0.0]


def test_other_tokens_are_told() -> None:
    made = comparison(run_of(tokens=[5, 6, 7, 8, 1]))
    assert not made.tokens_equal
    assert made.tables()[0][2][0][-1] == "NO"
    assert json.loads(made.to_json())["tokens_equal"] is False


def test_the_median_run_counts_unless_one_has_other_tokens() -> None:
    runs = [run_of(times=[1.0, ttst, ttst + 1, ttst + 2, ttst + 3]) for ttst in (4.0, 2.0, 3.0, 5.0)]
    chosen = median_run(runs)
    assert chosen.ttst_s == 3.0
    assert chosen.others_s == [4.0, 2.0, 5.0]
    runs[3] = dataclasses.replace(runs[3], tokens=[1, 2, 3, 4, 5])
    assert median_run(runs).tokens == [1, 2, 3, 4, 5]


def test_settings_of_one_configuration_stand_next_to_each_other() -> None:
    options = Options(new_tokens=8, speculative=("windows", "adaptive"))
    assert [setting.name for setting in options.settings()] == [
        "full",
        "partial",
        "profile fixed",
        "parallel fixed",
        "speculative fixed windows",
        "speculative fixed adaptive",
        "profile deadline",
        "parallel deadline",
        "speculative deadline windows",
        "speculative deadline adaptive",
    ]
    few = Options(new_tokens=8, modes=("speculative", "full"), budgets=("deadline",))
    assert [setting.name for setting in few.settings()] == ["full", "speculative deadline adaptive"]
    both = Options(new_tokens=8, modes=("speculative", "full"), budgets=("deadline",), masks=("token", "head"))
    names = ["full", "speculative deadline adaptive", "speculative deadline adaptive by head"]
    assert [setting.name for setting in both.settings()] == names


def test_columns_are_aligned() -> None:
    rows = [["run", "TTST"], ["full", "12.0 s"], ["a", ""]]
    assert aligned(rows, numbers=True) == "run     TTST\nfull  12.0 s\na"
    assert aligned(rows) == "run   TTST\nfull  12.0 s\na"


def test_the_picture_is_a_png() -> None:
    pytest.importorskip("matplotlib")
    from kvd.demo.picture import picture

    made = comparison(run_of(FULL), run_of())
    assert picture(made).startswith(b"\x89PNG\r\n")
    assert picture(dataclasses.replace(made, selections=[])).startswith(b"\x89PNG\r\n")
