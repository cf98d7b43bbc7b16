"""``kvd profile selections``: what each of some prompts selects, step by step, to replay without the model."""

from __future__ import annotations

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
    ModelId,
    SelectorWeights,
    check_context,
    check_packages,
    folder_of,
    own_domains,
)
from kvd.errors import InvalidArgument

if TYPE_CHECKING:
    from kvd.profiling.evaluate.texts import Domain
    from kvd_client.selectors import Selector

_QUESTION = "In two or three sentences: what is the text above about?"


def selections(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the recordings go.", show_default=False)
    ],
    texts: Domains = None,
    model: ModelFolder = None,
    model_id: ModelId = "",
    selector: Annotated[
        str,
        typer.Option("--selector", metavar="S", help="KV selection algorithm, with parameters as in hata:bits=128."),
    ] = "quest",
    weights: SelectorWeights = None,
    share: Annotated[
        float,
        typer.Option(
            "--share", min=0.0001, max=1.0, metavar="SHARE", help="Share of a prompt's tokens that a step selects."
        ),
    ] = 0.2,
    tokens: Annotated[int, typer.Option("--tokens", min=64, metavar="N", help="Length of each prompt.")] = 1024,
    prompts: Annotated[int, typer.Option("--prompts", min=1, metavar="N", help="Prompts of each domain.")] = 6,
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Decode steps of each prompt.")] = 16,
    question: Annotated[
        str,
        typer.Option(
            "--question", metavar="TEXT", help='Behind each text, in chat form where the model has one; "" for none.'
        ),
    ] = _QUESTION,
) -> None:
    """Record what prompts of several domains select, a file for each.

    Each prompt is prefilled and decoded here, greedily, with the selection at work; its file has what each step
    selected, and what the prompt's last queries would. Orders of sending are compared on such files without running a
    model again: tests/bench has bench_prompt and bench_learning. Finished files stay, so the same command goes on where
    it was stopped, and more prompts add to it. A minute for each prompt of 1,024 tokens on one core. Needs the packages
    of the extra "demo".
    """
    check_packages("recording from a model", model)
    from kvd_client import selectors

    algorithm = selectors.parse(selector, weights=weights)
    own = own_domains(texts)
    with LongProgress() as progress:
        try:
            made, there = _record(
                *(output, model, model_id, algorithm, own, progress),
                share=share,
                tokens=tokens,
                most=prompts,
                steps=steps,
                question=question,
            )
        except KeyboardInterrupt:
            progress.close()
            typer.echo("kvd: stopped; the same command goes on from here", err=True)
            raise typer.Exit(INTERRUPTED) from None
    typer.echo(f"{printable(str(output))}: {made} prompts recorded, {there} were there")


def _record(
    output: Path,
    folder: Path | None,
    model_id: str,
    algorithm: Selector,
    own: Sequence[Domain],
    progress: LongProgress,
    *,
    share: float,
    tokens: int,
    most: int,
    steps: int,
    question: str,
) -> tuple[int, int]:
    """How many prompts were recorded, and how many had been before."""
    from kvd.demo import inference
    from kvd.demo.model import cache_folder
    from kvd.profiling.evaluate.texts import built_in
    from kvd.profiling.record_run import Recording

    domains = own or built_in(cache_folder(), progress.say)
    folder = folder_of(folder, progress.told)
    loaded, tokenizer = inference.load(folder)
    from kvd_client.engines.transformers import spec_of

    check_context(tokens, steps, inference.context_of(loaded))
    spec = spec_of(loaded, model_id or folder.name)
    if algorithm.weights is not None:
        algorithm.weights.for_model(spec)
    work = {one.name: _prompts(tokenizer, one, question, tokens, most) for one in domains}
    recording = Recording(output, algorithm, spec.model, share, steps)
    total = sum(map(len, work.values()))
    missing = recording.missing(work)
    there = total - len(missing)
    for _ in recording.run(loaded, missing, lambda path, number: progress.told(path.stem, there + number, total)):
        pass
    return len(missing), there


def _prompts(tokenizer: Any, domain: Domain, question: str, tokens: int, most: int) -> list[list[int]]:
    """A prompt of each of a domain's first documents, as a user's turn."""
    from kvd.demo.texts import prompt_ids

    made = [prompt_ids(tokenizer, text, question, tokens) for text in domain.documents[:most]]
    if len(made) < most:
        raise InvalidArgument(
            f"domain {domain.name!r} has texts for {len(made)} prompts, not for {most}; give --prompts {len(made)}, or "
            "a longer text",
            domain=domain.name,
        )
    if short := [ids for ids in made if len(ids) < tokens]:
        raise InvalidArgument(
            f"domain {domain.name!r} has a text that makes a prompt of {len(short[0])} tokens, not of {tokens}; give a "
            f"longer text, or --tokens {len(short[0])}",
            domain=domain.name,
        )
    return made
