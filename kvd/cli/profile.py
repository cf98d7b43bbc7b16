"""``kvd profile``: profile files, for people and for programs.

The commands only: what they need is imported when one runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvd.cli import profile_daemon, profile_evaluate, profile_link, profile_record, profile_selections, profile_train
from kvd.cli.output import check_output, number, printable, seconds, table, write_parts
from kvd.units import Rate, about, format_rate

if TYPE_CHECKING:
    from rich.table import Table

    from kvd.profiling.compare import Likeness

MAX_TIMES = 12
_BARS = "▁▂▃▄▅▆▇█"

profile_app = typer.Typer(
    help="Profiles: which KV blocks the decode of a model selects.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

profile_app.command()(profile_record.record)
profile_app.command()(profile_selections.selections)
profile_app.command()(profile_train.train)
profile_app.command()(profile_daemon.install)
profile_app.command("export")(profile_daemon.export_learnt)
profile_app.command()(profile_link.link)
profile_app.command()(profile_evaluate.evaluate)

ProfileFile = Annotated[Path, typer.Argument(metavar="FILE", help="Profile file.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]


@profile_app.command()
def show(file: ProfileFile, as_json: AsJson = False) -> None:
    """Show groups, times and budget of a profile."""
    from kvd.profiling.files import fingerprint, read
    from kvd.profiling.summary import summary

    profile = read(file)
    found = summary(profile) | {"sha256": fingerprint(profile)}
    if as_json:
        typer.echo(json.dumps(found))
    else:
        write_parts(_shown(found))


@profile_app.command()
def check(file: ProfileFile) -> None:
    """Check that a profile is whole. Exit code: 0 usable, 1 damaged or no profile, 2 usage."""
    from kvd.profiling.files import read
    from kvd.profiling.summary import warnings

    found = warnings(read(file))
    for warning in found:
        typer.echo(f"kvd: warning: {printable(str(file))}: {warning}", err=True)
    remark = f", with {len(found)} warning{'s' * (len(found) != 1)}" if found else ""
    typer.echo(f"{printable(str(file))}: usable{remark}")


@profile_app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="Profile file.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="B", help="Profile file.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Compare two profiles: correlation per layer and group."""
    from kvd.profiling.compare import compare as compared
    from kvd.profiling.files import read

    found = compared(read(first), read(second))
    if as_json:
        typer.echo(json.dumps(_compared_fields(found)))
    else:
        write_parts(_compared(found))


@profile_app.command()
def plot(
    file: ProfileFile,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PNG", help="Picture to write.", show_default=False)
    ],
) -> None:
    """Draw a profile: layers against positions. Needs matplotlib."""
    from kvd.profiling.files import read
    from kvd.profiling.plot import plot as draw

    check_output(output)
    draw(read(file), output)
    typer.echo(f"{printable(str(output))}: written")


def _shown(found: Mapping[str, Any]) -> Iterator[str | Table]:
    revision = f" at {found['revision']}" if found["revision"] else ""
    parameters = ", ".join(f"{name} {value}" for name, value in sorted(found["parameters"].items()))
    yield printable(f"{found['model']}{revision}")
    yield f"  cache     {found['layers']} layers, {found['kv_heads']} KV heads, {about(found['entry_bytes'])} an entry"
    yield printable(f"  selector  {found['selector']}{f' ({parameters})' if parameters else ''}")
    yield f"  blocks    {found['blocks']} a layer"
    yield f"  link      {format_rate(Rate(found['link_rate'])) if found['link_rate'] else 'not measured'}"
    yield printable(f"  created   {found['created'][:19].replace('T', ' ')} by kvd {found['kvd']}")
    yield f"  sha256    {found['sha256']}"
    for line in found["notes"].splitlines():
        yield f"  | {printable(line)}"
    for warning in found["warnings"]:
        yield f"  ! {warning}"
    yield ""
    yield _groups_table(found["groups"])
    yield "MISS: on-demand ratio to expect at the first step, with 1/2 or 1/4 of all sent"
    if any(group["cells"] for group in found["groups"]):
        yield "BY HEAD: the same with masks by head, as the profile tells heads apart"
    if found["times"]:
        yield ""
        yield _times_table(found["times"])


def _groups_table(groups: Sequence[Mapping[str, Any]]) -> Table:
    bars = _encodable(_BARS)
    split = any(group["cells"] for group in groups)
    return table(
        ("TOKENS", "PROMPTS", "STEPS", "MEAN", "MISS 1/2", "MISS 1/4", *(("BY HEAD",) if split else ()), "BY POSITION"),
        [
            (
                f"{group['low']}-{group['high'] - 1}",
                str(group["prompts"]),
                str(group["steps"]),
                number(group["mean"]),
                *(number(ratio) for ratio in group["on_demand_ratio"].values()),
                *((", ".join(number(each) for each in group["on_demand_ratio_by_head"].values()),) if split else ()),
                _bars(group["positions"]) if bars else "-",
            )
            for group in groups
        ],
    )


def _times_table(times: Sequence[Mapping[str, Any]]) -> Table:
    step = -(-len(times) // MAX_TIMES)
    return table(
        ("TOKENS", "PREFILL", "TRANSFER", "RATIO", "BUDGET"),
        [
            (
                str(row["tokens"]),
                seconds(row["prefill_s"]),
                seconds(row["transfer_s"]),
                f"{row['transfer_s'] / row['prefill_s']:.1f}" if row["prefill_s"] else "-",
                f"{row['budget']} ({100 * row['budget_share']:.0f}%)",
            )
            for row in times[::step]
        ],
    )


def _compared(found: Likeness) -> Iterator[str | Table]:
    for name, pair in found.differences.items():
        yield printable(f"  ! {name}: {_plain(pair[0])} and {_plain(pair[1])}")
    yield (
        f"{found.blocks} blocks a layer: Pearson {number(found.pearson)}, Spearman {number(found.spearman)}, "
        f"top half shared {number(found.overlap)}"
        + (f", differences of heads {number(found.heads)}" if found.heads is not None else "")
    )
    yield ""
    yield table(
        ("TOKENS", "AGAINST", "PEARSON", "SPEARMAN", "TOP HALF"),
        [
            (
                f"{group.first[0]}-{group.first[1] - 1}",
                f"{group.second[0]}-{group.second[1] - 1}",
                number(group.pearson),
                number(group.spearman),
                number(group.overlap),
            )
            for group in found.groups
        ],
    )
    yield ""
    yield table(
        ("LAYER", "PEARSON", "SPEARMAN"),
        [(str(layer.layer), number(layer.pearson), number(layer.spearman)) for layer in found.layers()],
    )


def _compared_fields(found: Likeness) -> dict[str, Any]:
    def layers(of: Iterable[Any]) -> list[dict[str, Any]]:
        return [{"layer": one.layer, "pearson": one.pearson, "spearman": one.spearman} for one in of]

    return {
        "blocks": found.blocks,
        "differences": {name: [_plain(one) for one in pair] for name, pair in found.differences.items()},
        "pearson": found.pearson,
        "spearman": found.spearman,
        "top_half": found.overlap,
        "heads": found.heads,
        "layers": layers(found.layers()),
        "groups": [
            {
                "first": list(group.first),
                "second": list(group.second),
                "pearson": group.pearson,
                "spearman": group.spearman,
                "top_half": group.overlap,
                "heads": group.heads,
                "layers": layers(group.layers),
            }
            for group in found.groups
        ],
    }


def _bars(values: Sequence[float]) -> str:
    highest = max(values, default=0.0)
    return "".join(
        _BARS[min(int(len(_BARS) * value / highest), len(_BARS) - 1)] if highest else " " for value in values
    )


def _encodable(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value
