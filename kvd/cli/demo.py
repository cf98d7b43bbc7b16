"""``kvd demo``: its options, and how it ends."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from kvd.errors import InvalidArgument
from kvd.units import Rate, parse_rate

EXIT_DIFFERENT = 1
SIGNALLED = 128
"""Added to a signal's number for the exit code, as shells do."""

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")
_CONVERSION = ("gguf",)

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _rate(text: str) -> Rate:
    if text == "unlimited":
        return Rate(0)
    try:
        found = parse_rate(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not found:
        raise typer.BadParameter('a link of rate 0 moves nothing; write "unlimited" for no limit')
    return found


@app.command()
def demo(
    link: Annotated[
        Rate,
        typer.Option(
            "--link",
            parser=_rate,
            metavar="RATE",
            help='Rate of the link between the nodes, as "200mbit", "1.5GB/s" or "unlimited".',
        ),
    ] = "200mbit",  # type: ignore[assignment]  # typer parses the default, too
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, metavar="N", help="Most tokens to generate.")
    ] = 32,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            "--prompt-file", metavar="FILE", help="Prompt, as UTF-8 text. [default: one that Python has]"
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--prompt-tokens",
            min=64,
            metavar="N",
            help="Cut the prompt to N tokens. [default: 1000; a file whole]",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", metavar="DIR", help="Folder of a Hugging Face model. [default: SmolLM2-135M]"
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON object; all else to standard error.")
    ] = False,
) -> None:
    """Move a real model's KV cache between two daemons on this machine, and show the figures.

    A prompt is prefilled in one process and decoded in another, with a daemon for each and a link of the
    given rate between them; then a single process does the same, and the tokens are compared. The first run
    fetches the model (93 MB) and converts it. Exit code: 0 the tokens are equal, 1 they are not or the demo
    failed, 2 usage, 130 interrupted.
    """
    missing = [
        name for name in _PACKAGES + (() if model else _CONVERSION) if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise InvalidArgument(
            f"the demo needs {', '.join(missing)}, which this Python lacks: pip install 'kvd-transport[demo]'",
            missing=missing,
        )

    from kvd.demo.display import display
    from kvd.demo.run import Interrupted, Options, run

    shown = display(as_json=as_json)
    options = Options(
        link=link, new_tokens=tokens, prompt_file=prompt_file, prompt_tokens=prompt_tokens, model=model
    )
    try:
        report = run(options, shown)
    except Interrupted as signalled:
        shown.say("kvd: the demo was interrupted; nothing of it is left behind")
        raise typer.Exit(SIGNALLED + signalled.number) from None
    shown.report(report)
    raise typer.Exit(0 if report.tokens_equal else EXIT_DIFFERENT)
