"""``kvd profile record``: from a model and texts, or from what a running daemon has seen."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvd.cli.output import check_output, printable
from kvd.cli.profile_daemon import Socket, described, export
from kvd.cli.profile_model import (
    ModelFolder,
    ModelId,
    Notes,
    Revision,
    SelectorWeights,
    check_packages,
    folder_of,
    prompts_of,
)
from kvd.errors import InvalidArgument
from kvd.units import Rate, parse_rate

if TYPE_CHECKING:
    from kvd.demo.display import Display
    from kvd.profiling.profile import Profile


def rate_of(text: str) -> Rate:
    """An option's rate, above 0."""
    try:
        found = parse_rate(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not found:
        raise typer.BadParameter("a link of rate 0 moves nothing")
    return found


def record(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Profile file to write.", show_default=False)
    ],
    more: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help="More texts.", show_default=False)] = None,
    texts: Annotated[
        list[Path] | None,
        typer.Option("--texts", metavar="FILE...", help="Texts to run, UTF-8; further ones may follow."),
    ] = None,
    model: ModelFolder = None,
    model_id: ModelId = "",
    revision: Revision = "",
    selector: Annotated[
        str | None,
        typer.Option(
            "--selector",
            metavar="S",
            help="KV selection algorithm: quest, hata, infinigen, exact …, with parameters as in hata:bits=128. "
            "[default: quest; from a daemon: none named]",
        ),
    ] = None,
    weights: SelectorWeights = None,
    share: Annotated[
        float,
        typer.Option(
            "--share", min=0.0001, max=1.0, metavar="SHARE", help="Share of a prompt's tokens that a step selects."
        ),
    ] = 0.1,
    tokens: Annotated[
        list[int] | None,
        typer.Option("--tokens", min=32, metavar="N", help="Prompt length; repeat it for several. [default: 1024]"),
    ] = None,
    prompts: Annotated[int, typer.Option("--prompts", min=1, metavar="N", help="Most prompts of each length.")] = 32,
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Decode steps of each prompt.")] = 16,
    blocks: Annotated[
        int, typer.Option("--blocks", min=1, max=65536, metavar="M", help="KV blocks a layer, M.")
    ] = 1000,
    link_rate: Annotated[
        Rate | None,
        typer.Option("--link-rate", parser=rate_of, metavar="RATE", help='What the link carries, as "10gbit".'),
    ] = None,
    link: Annotated[
        Path | None, typer.Option("--link", metavar="FILE", help="The same, as kvd profile link -o wrote it.")
    ] = None,
    from_daemon: Annotated[
        bool, typer.Option("--from-daemon", help="Take what the running daemon has recorded of --model-id.")
    ] = False,
    notes: Notes = "",
    socket: Socket = None,
) -> None:
    """Record a profile: from a model and texts, or --from-daemon.

    From a model: each text is cut into prompts, which are prefilled and decoded here while the selections are counted
    and prefill is timed. The time of transfer comes from --link-rate or --link. Needs the packages of the extra "demo".
    """
    from kvd.profiling.link import transfer_times

    files = [*(texts or []), *(more or [])]
    check_output(output)
    rate, latency_s = _link(link_rate, link)  # before minutes are spent, as all that can be wrong with the options
    if from_daemon:
        if files or model is not None or weights is not None:
            raise InvalidArgument("--from-daemon records from no texts or model; give --model-id, and --selector")
        if not model_id:
            raise InvalidArgument("--from-daemon needs --model-id, the model's name in transfers; see kvd status")
        profile = export(model_id, selector or "", socket)
        lengths: list[int] = sorted({group.low for group in profile.groups} | {g.high - 1 for g in profile.groups})
    else:
        if not files:
            raise InvalidArgument("there is nothing to record from; give --texts FILE..., or --from-daemon")
        lengths = sorted(set(tokens or [1024]))
        profile = _from_model(
            files,
            folder=model,
            model_id=model_id,
            revision=revision,
            selector=selector or "quest",
            weights=weights,
            share=share,
            lengths=lengths,
            most=prompts,
            steps=steps,
            blocks=blocks,
        )
    if rate:
        token_bytes = profile.layers * profile.kv_heads * profile.entry_bytes
        times = transfer_times(rate, latency_s, lengths, token_bytes)
        profile = dataclasses.replace(profile, transfer=times, link_rate=rate)
    _write(dataclasses.replace(profile, notes=notes) if notes else profile, output)


def _link(link_rate: Rate | None, link: Path | None) -> tuple[int, float]:
    """Bytes a second and latency of the link; 0 where neither option says."""
    from kvd.profiling.link import read

    if link_rate is not None and link is not None:
        raise InvalidArgument("--link-rate and --link say the same; give one of them")
    return read(link) if link is not None else (int(link_rate or 0), 0.0)


def _write(profile: Profile, output: Path) -> None:
    from kvd.profiling.files import write
    from kvd.profiling.summary import warnings

    write(profile, output)
    for warning in warnings(profile):
        typer.echo(f"kvd: warning: {warning}", err=True)
    recorded = sum(group.samples for group in profile.groups), sum(group.steps for group in profile.groups)
    typer.echo(f"{printable(str(output))}: written, {recorded[0]} prompts and {recorded[1]} decode steps")
    for line in described(profile):
        typer.echo(line)


def _from_model(
    files: list[Path],
    *,
    folder: Path | None,
    model_id: str,
    revision: str,
    selector: str,
    weights: Path | None,
    share: float,
    lengths: list[int],
    most: int,
    steps: int,
    blocks: int,
) -> Profile:
    check_packages("recording from a model", folder)
    from datetime import UTC, datetime

    from kvd.demo import inference
    from kvd.demo.display import display
    from kvd.demo.texts import read_text
    from kvd.profiling.recorder import Recorder
    from kvd.profiling.run import run
    from kvd.profiling.timing import Times
    from kvd_client import selectors

    algorithm = selectors.parse(selector, weights=weights)
    read_texts = [read_text(path) for path in files]
    shown = display(as_json=False)
    try:
        folder = folder_of(folder, shown.progress)
        loaded, tokenizer = inference.load(folder)
        from kvd_client.engines.transformers import spec_of

        spec = spec_of(loaded, model_id or folder.name, revision)
        if algorithm.weights is not None:
            algorithm.weights.for_model(spec)
        recorder = Recorder(spec.layers, blocks=blocks)
        context = inference.context_of(loaded)
        work = [prompts_of(tokenizer, read_texts, n, most=most, steps=steps, context=context) for n in lengths]
        times = []
        for n, mine in zip(lengths, work, strict=True):
            told = functools.partial(_told, shown, f"prompts of {n} tokens", len(mine))
            told(0)
            times.append(run(loaded, mine, algorithm, recorder, share=share, steps=steps, on_prompt=told))
    finally:
        shown.close()
    return recorder.profile(
        spec,
        selector=algorithm.name,
        parameters=algorithm.parameters | {"share": share},
        prefill=Times(tuple(n for one in times for n in one.tokens), tuple(s for one in times for s in one.seconds)),
        created=datetime.now(UTC),
    )


def _told(shown: Display, what: str, total: int, done: int) -> None:
    shown.progress(what, done, total)
