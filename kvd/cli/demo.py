"""``kvd demo``: its options, and how it ends."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvd.cli.output import check_output
from kvd.errors import InvalidArgument
from kvd.units import Rate, parse_rate

if TYPE_CHECKING:
    from kvd.demo import compare
    from kvd.demo.display import Display
    from kvd.demo.figures import Comparison
    from kvd.demo.report import Report

EXIT_DIFFERENT = 1
SIGNALLED = 128
"""Added to a signal's number for the exit code, as shells do."""
AUTO = Rate(-1)
"""A link that depends on what is measured."""
PLAIN_LINK = "200mbit"
PLAIN_TOKENS, SELECTIVE_TOKENS = 32, 96

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")
_CONVERSION = ("gguf",)
_BUDGETS = ("fixed", "deadline")
_SPECULATIVE = ("adaptive", "windows")

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _rate(text: str) -> Rate:
    if text == "auto":
        return AUTO
    if text == "unlimited":
        return Rate(0)
    try:
        found = parse_rate(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not found:
        raise typer.BadParameter('a link of rate 0 moves nothing; write "unlimited" for no limit')
    return found


def _names(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Comma-separated names, each once."""
    found = tuple(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))
    if not found or not set(found) <= set(known):
        raise typer.BadParameter(f'"{text}" is not a list of {", ".join(known)}', param_hint=option)
    return found


def _shares(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(each) for each in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < share <= 1 for share in found):
        raise typer.BadParameter(
            f'"{text}" is not a list of shares above 0 and at most 1, as in "0.05,0.1"', param_hint="--select"
        )
    return found


@app.command()
def demo(
    link: Annotated[
        Rate | None,
        typer.Option(
            "--link",
            parser=_rate,
            metavar="RATE",
            help='Rate of the link between the nodes, as "200mbit", "1.5GB/s" or "unlimited"; "auto": a full transfer '
            "takes 6.5 times as long as prefill. [default: 200mbit; with --mode or --compare: auto]",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            min=1,
            metavar="N",
            help=f"Most tokens to generate. [default: {PLAIN_TOKENS}; with --mode or --compare: {SELECTIVE_TOKENS}]",
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", metavar="FILE", help="Prompt, as UTF-8 text. [default: one that Python has]"),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--prompt-tokens",
            min=64,
            metavar="N",
            help="Cut the prompt to N tokens. [default: 1000, with --mode or --compare 2000; a file whole]",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="DIR", help="Folder of a Hugging Face model. [default: SmolLM2-135M]"),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run every mode of selective transfer on the same prompt and link.")
    ] = False,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            metavar="MODE",
            help="Decode with KV selection, in this mode: full, partial, profile, parallel or speculative; several "
            "with commas.",
        ),
    ] = None,
    select: Annotated[
        str | None,
        typer.Option(
            "--select",
            metavar="SHARE",
            help="Share of the prompt that each step selects; several with commas. [default: 0.1]",
        ),
    ] = None,
    selector: Annotated[
        str | None,
        typer.Option(
            "--selector",
            metavar="S",
            help="KV selection algorithm: quest, hata, infinigen, hata:bits=128,ahead=true ... [default: quest]",
        ),
    ] = None,
    prefix: Annotated[
        bool | None,
        typer.Option(
            "--prefix/--no-prefix",
            help="Whether the source holds the KV cache of the prompt's first part before the request. [default: yes]",
            show_default=False,
        ),
    ] = None,
    prefix_share: Annotated[
        float | None,
        typer.Option(
            "--prefix-share", min=0.0, max=1.0, metavar="SHARE", help="How much of the prompt that is. [default: 0.95]"
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="B",
            help="Budget policy, fixed or deadline; several with commas. [default: deadline; with --compare both]",
        ),
    ] = None,
    speculative: Annotated[
        str | None,
        typer.Option(
            "--speculative",
            metavar="S",
            help="Speculative policy, adaptive or windows; several with commas. [default: adaptive]",
        ),
    ] = None,
    mask: Annotated[
        str | None,
        typer.Option(
            "--mask",
            metavar="M",
            help="What is sent and marked by itself: token, or head, each head's entry of it; several with commas. "
            "[default: auto, by head where the model has several]",
        ),
    ] = None,
    repeat: Annotated[
        int | None,
        typer.Option(
            "--repeat", min=1, metavar="N", help="Run each setting N times, and show the median by TTST. [default: 1]"
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the times of tokens as a PNG.")
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            metavar="L",
            help="Bring the KV cache into a device layout, over 8 memory channels: tenstorrent, for example.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object; all else to standard error.")] = False,
) -> None:
    """Move a real model's KV cache between two daemons on this machine, and show the figures.

    A prompt is prefilled in one process and decoded in another, with a daemon for each and a link of the given rate
    between them; then a single process does the same, and the tokens are compared. The first run fetches the model
    (93 MB) and converts it.

    With --compare or --mode, decode selects KV entries, and the modes of selective transfer are compared by when the
    second token comes. The first such run records a profile from other texts.

    Exit code: 0 the tokens are equal, 1 they are not or the demo failed, 2 usage, 130 interrupted.
    """
    selective = compare or mode is not None
    given = {
        "--select": select, "--selector": selector, "--prefix": prefix, "--prefix-share": prefix_share,
        "--budget": budget, "--speculative": speculative, "--mask": mask, "--repeat": repeat, "--plot": plot,
    }  # fmt: skip
    extra = [name for name, value in given.items() if value is not None]
    if not selective and (extra or link == AUTO):
        raise InvalidArgument(f"{(extra or ['--link auto'])[0]} is for selective transfer; add --mode or --compare")
    if prefix is False and prefix_share is not None:
        raise InvalidArgument("--no-prefix and --prefix-share contradict each other; give one of them")
    if selective and layout is not None:
        raise InvalidArgument("--layout is for the plain demo; leave --mode and --compare out")
    if layout is not None:
        _check_layout(layout)
    _check_packages((*_PACKAGES, *(() if model else _CONVERSION), *(("matplotlib",) if plot else ())))

    check_output(plot)

    from kvd.demo.display import display
    from kvd.demo.stage import Interrupted

    shown = display(as_json=as_json)
    report: Report | Comparison
    try:
        if selective:
            from kvd.demo import compare as comparing
            from kvd_client import selectors
            from kvd_client.protocol import MODES
            from kvd_client.spec import AUTO as ANY_MASK
            from kvd_client.spec import MASKS

            algorithm = selector or "quest"
            if not selectors.parse(algorithm).deployable:
                raise InvalidArgument(f"selector {algorithm!r} needs every key; choose one that can be deployed")
            held = 0.0 if prefix is False else 0.95 if prefix_share is None else prefix_share
            report = _compare(
                comparing.Options(
                    modes=_names("--mode", mode, MODES) if mode is not None else MODES,
                    budgets=_names("--budget", budget or (",".join(_BUDGETS) if compare else "deadline"), _BUDGETS),
                    speculative=_names("--speculative", speculative or "adaptive", _SPECULATIVE),
                    masks=_names("--mask", mask or ANY_MASK, (ANY_MASK, *MASKS)),
                    shares=_shares(select or "0.1"),
                    selector=algorithm,
                    prefix_share=held,
                    link=None if link == AUTO else link,
                    new_tokens=SELECTIVE_TOKENS if tokens is None else tokens,
                    prompt_file=prompt_file,
                    prompt_tokens=prompt_tokens,
                    model=model,
                    plot=plot,
                    repeat=repeat or 1,
                ),
                shown,
            )
        else:
            from kvd.demo import run as plain

            report = plain.run(
                plain.Options(
                    link=Rate(parse_rate(PLAIN_LINK)) if link is None else link,
                    new_tokens=PLAIN_TOKENS if tokens is None else tokens,
                    prompt_file=prompt_file,
                    prompt_tokens=prompt_tokens,
                    model=model,
                    layout=layout or "",
                ),
                shown,
            )
    except Interrupted as signalled:
        shown.say("kvd: the demo was interrupted; nothing of it is left behind")
        raise typer.Exit(SIGNALLED + signalled.number) from None
    shown.report(report)
    raise typer.Exit(0 if report.tokens_equal else EXIT_DIFFERENT)


def _check_layout(name: str) -> None:
    """Raise :class:`~kvd.errors.InvalidArgument` or :class:`~kvd.errors.UnsupportedLayout` before anything starts."""
    from kvd.demo.run import CHANNELS
    from kvd.tensors import device_layout
    from kvd_client.layouts import Placement

    device_layout(Placement(layout=name, dtype="f32"), channels=CHANNELS, alignment=64)


def _compare(options: compare.Options, shown: Display) -> Comparison:
    from kvd.demo import compare

    return compare.run(options, shown)


def _check_packages(names: tuple[str, ...]) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidArgument(
            f"the demo needs {', '.join(missing)}, which this Python lacks: pip install 'kvd-transport[demo]'",
            missing=missing,
        )
