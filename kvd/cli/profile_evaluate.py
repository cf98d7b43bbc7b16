"""``kvd profile evaluate``: what selection costs in accuracy, and how well profiles predict it."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvd.cli.output import printable
from kvd.cli.profile_model import (
    INTERRUPTED,
    Domains,
    LongProgress,
    ModelFolder,
    check_packages,
    folder_of,
    own_domains,
)
from kvd.errors import InvalidArgument

if TYPE_CHECKING:
    from kvd.profiling.evaluate.plan import Settings, Variant, Work
    from kvd.profiling.evaluate.store import Store
    from kvd.profiling.evaluate.texts import Domain

INFINIGEN = (
    *("infinigen@0.2", "infinigen@0.1", "infinigen:ahead=false@0.2", "infinigen:ahead=false@0.1"),
    # As in the paper: when it asks, and how much it takes; then how many columns.
    *("infinigen:query=input,alpha=5@0.2", "infinigen:query=input,alpha=5@0.1", "infinigen:columns=0.3@0.2"),
)
SELECTIONS = (
    *("exact@0.2", "exact@0.1", "exact@0.05", "exact:reduce=softmax@0.2", "exact:reduce=softmax@0.1"),
    *INFINIGEN,
    *("infinigen:query=input@0.2", "infinigen:query=input@0.1", "infinigen:alpha=5@0.2", "infinigen:alpha=5@0.1"),
    *("hata@0.2", "hata@0.1", "hata@0.05", "hata-untrained@0.2", "quest@0.2", "quest@0.1", "streaming@0.2"),
    "random@0.2",
)
RECORDED = ("exact@0.2", "infinigen@0.2", "hata@0.2")
RECALLING = (
    *("exact@0.2", "exact@0.1", "exact:reduce=softmax@0.2"),
    *INFINIGEN,
    *("hata@0.2", "hata@0.1", "quest@0.2", "streaming@0.2", "random@0.2"),
)
_SELECTIONS, _RECORDED, _RECALLING = " ".join(SELECTIONS), " ".join(RECORDED), " ".join(RECALLING)
LENGTHS = (1024, 2048, 4096)
QUICK = {"lengths": (512,), "prompts": 2, "compared": 1, "hidden": 1}


def evaluate(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the report goes.", show_default=False)
    ],
    model: ModelFolder = None,
    select: Annotated[
        list[str] | None,
        typer.Option(
            "--select",
            metavar="S@SHARE",
            help='Selection to measure, as "hata@0.2" or "quest:page=8@0.1"; repeat it for several. Behind a name, '
            f"-untrained leaves out its weights. [default: {_SELECTIONS}]",
        ),
    ] = None,
    record: Annotated[
        list[str] | None,
        typer.Option(
            "--record",
            metavar="S@SHARE",
            help="Those whose on-demand ratios and correlations are computed. "
            f"[default: those of {_RECORDED} that are measured, or all]",
        ),
    ] = None,
    recall: Annotated[
        list[str] | None,
        typer.Option(
            "--recall",
            metavar="S@SHARE",
            help=f"Those that look for hidden facts. [default: those of {_RECALLING} that are measured, or all]",
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            "--tokens",
            min=64,
            metavar="N",
            help="Prompt length; repeat it for several. [default: 1024 2048 4096; with --quick: 512]",
        ),
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option(
            "--prompts",
            min=0,
            metavar="N",
            help="Prompts of a domain at the shortest length, for on-demand ratios; of longer ones as many tokens. "
            "0: recall only. [default: 4; with --quick: 2]",
        ),
    ] = None,
    compared: Annotated[
        int | None,
        typer.Option(
            "--compared",
            min=1,
            metavar="N",
            help="How many of them run with every selection, for divergence. [default: 1]",
        ),
    ] = None,
    hidden: Annotated[
        int | None,
        typer.Option(
            "--hidden",
            min=0,
            metavar="N",
            help="Prompts with five hidden facts, of a domain at the shortest length, for recall. "
            "[default: 2; with --quick: 1]",
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Tokens behind each prompt to run.")] = 64,
    blocks: Annotated[
        int, typer.Option("--blocks", min=1, max=65536, metavar="M", help="KV blocks a layer, M.")
    ] = 1000,
    calibration: Annotated[
        str,
        typer.Option("--calibration", metavar="DOMAIN", help="Whose texts weights and the profile are made from."),
    ] = "code",
    texts: Domains = None,
    measured: Annotated[
        list[str] | None,
        typer.Option("--domain", metavar="DOMAIN", help="Measure on this domain only; repeat it. [default: all]"),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", min=0.0, metavar="N", help="Stop after that time; the report has what is finished."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few short prompts: minutes instead of hours.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write the report as JSON to standard output, too.")] = False,
) -> None:
    """Measure selection on a real model: recall, divergence, on-demand ratios.

    Facts hidden in texts are asked for; the tokens behind texts are run with each selection and compared with the full
    KV cache; orders of sending are judged by what was selected. Weights and profiles are made from one domain's texts
    and measured on the others'. FOLDER/work keeps every finished piece, so the same command goes on where it was
    stopped, and more selections or prompts add to it; it takes 58 KB a prompt token of SmolLM2. Needs the packages of
    the extra "demo".
    """
    check_packages("the evaluation", model, "matplotlib")
    from kvd.profiling.evaluate import plan

    defaults: dict[str, Any] = QUICK if quick else {"lengths": LENGTHS, "prompts": 4, "compared": 1, "hidden": 2}
    chosen = _variants(select or SELECTIONS)
    wanted, asked = (
        _variants(given) if given else [one for one in chosen if one.label in known] or chosen
        for given, known in ((record, RECORDED), (recall, RECALLING))
    )
    lengths = sorted(set(tokens or defaults["lengths"]))
    settings = plan.Settings(steps=steps, calibration=calibration)
    own = own_domains(texts)
    names = tuple(domain.name for domain in own) if own else ("code", "documentation", "prose", "dialogue")
    if calibration not in names or len(names) < 2:
        raise InvalidArgument(
            f"calibration on {calibration!r} and measurement on other domains is impossible with {', '.join(names)}; "
            "give --calibration one of at least two domains",
            calibration=calibration,
        )
    if unknown := [name for name in measured or () if name not in names]:
        raise InvalidArgument(f"there is no domain {unknown[0]!r}; there are {', '.join(names)}", domain=unknown[0])
    most, full = defaults["prompts"] if prompts is None else prompts, plan.Variant(plan.FULL)
    work = plan.Work(
        domains=tuple(name for name in names if not measured or name == calibration or name in measured),
        variants=(full, *dict.fromkeys([*chosen, *wanted, *asked])),
        recorded=tuple(wanted),
        recalling=(full, *asked),
        compared=plan.counts(min(compared or defaults["compared"], most), lengths),
        texts=plan.counts(most, lengths),
        hidden=plan.counts(defaults["hidden"] if hidden is None else hidden, lengths),
    )
    stop_at = None if minutes is None else time.monotonic() + 60 * minutes
    with LongProgress() as progress:
        try:
            _evaluate(output, model, settings, work, own, blocks, stop_at, progress, as_json=as_json)
        except KeyboardInterrupt:
            progress.close()
            typer.echo("kvd: stopped; the same command goes on from here", err=True)
            raise typer.Exit(INTERRUPTED) from None


def _evaluate(
    output: Path,
    folder: Path | None,
    settings: Settings,
    work: Work,
    own: Sequence[Domain],
    blocks: int,
    stop_at: float | None,
    progress: LongProgress,
    *,
    as_json: bool,
) -> None:
    from kvd.demo.model import cache_folder
    from kvd.profiling.evaluate import report as reports
    from kvd.profiling.evaluate import texts
    from kvd.profiling.evaluate.store import Store

    domains = own or texts.built_in(cache_folder(), progress.say)
    folder = folder_of(folder, progress.told)
    store = Store(output / "work", reports.identity(folder, settings, domains))
    try:
        complete, report = _run(store, folder, settings, work, domains, blocks, stop_at, progress)
    finally:
        store.close()
    reports.write(report, output)
    progress.close()
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _show(report, output)
    if not complete:
        typer.echo("kvd: time is up before the end; the same command goes on from here", err=True)


def _run(
    store: Store,
    folder: Path,
    settings: Settings,
    work: Work,
    domains: Sequence[Domain],
    blocks: int,
    stop_at: float | None,
    progress: LongProgress,
) -> tuple[bool, dict[str, Any]]:
    from kvd.demo import inference
    from kvd.profiling.evaluate import plan
    from kvd.profiling.evaluate import report as reports
    from kvd.profiling.evaluate.run import Runner

    loaded, tokenizer = inference.load(folder)
    context = inference.context_of(loaded)
    longest = max(work.texts)
    if longest + max(settings.steps, 256) > context:
        raise InvalidArgument(
            f"prompts of {longest} tokens and what is run behind them exceed the model's context of {context}; give "
            "--tokens smaller numbers",
            tokens=longest,
        )
    runner = Runner(loaded, plan.Tokens(tokenizer, domains, settings), store, work, told=progress.told, stop_at=stop_at)
    complete = runner.run()
    report = reports.report(
        store,
        work,
        settings,
        blocks,
        command=shlex.join(["kvd", *sys.argv[1:]]),
        model=folder.name,
        domains=domains,
        parameters=runner.parameters,
        told=progress.told,
    )
    return complete, report | {"complete": complete}


def _show(report: dict[str, Any], output: Path) -> None:
    from kvd.demo.display import aligned
    from kvd.profiling.evaluate.report import REPORT
    from kvd.profiling.evaluate.tables import marks, tables

    for each in tables(report):
        # Wider than 80 columns, and no figure may be cut where no terminal is.
        typer.echo(f"{printable(each.title)}\n{aligned([each.heads, *each.rows], numbers=True)}\n")
    for line in marks(report):
        typer.echo(printable(line))
    typer.echo(f"{printable(str(output))}: report.md, {REPORT} and pictures written")


def _variants(labels: Sequence[str]) -> list[Variant]:
    from kvd.profiling.evaluate.plan import FULL, Variant
    from kvd_client import selectors

    found = []
    for label in labels:
        variant = Variant.parse(label)
        if variant.label != FULL:
            selectors.parse(variant.spec)  # before minutes are spent
            found.append(variant)
    return list(dict.fromkeys(found))
