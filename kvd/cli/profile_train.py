"""``kvd profile train``: weights of a KV selection algorithm, from a model and calibration texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvd.cli.output import check_output, printable
from kvd.cli.profile_model import ModelFolder, ModelId, Notes, Revision, check_packages, folder_of, prompts_of
from kvd.errors import InvalidArgument


def train(
    selector: Annotated[str, typer.Argument(metavar="SELECTOR", help="infinigen, hata …", show_default=False)],
    texts: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Calibration texts, UTF-8.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Weights file to write.", show_default=False)
    ],
    model: ModelFolder = None,
    model_id: ModelId = "",
    revision: Revision = "",
    tokens: Annotated[int, typer.Option("--tokens", min=64, metavar="N", help="Length of each prompt.")] = 512,
    prompts: Annotated[int, typer.Option("--prompts", min=1, metavar="N", help="Most prompts.")] = 8,
    bits: Annotated[
        int | None, typer.Option("--bits", min=64, metavar="N", help="hata: bits of a code. [default: 256]")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, metavar="N", help="hata: steps of gradient descent. [default: 200]")
    ] = None,
    notes: Notes = "",
) -> None:
    """Train a selector for a model: the skewing of infinigen, the hashes of hata.

    The texts are cut into prompts, which are prefilled here. Both ends of a transfer need the file; minutes on one
    core. Needs the packages of the extra "demo".
    """
    from kvd_client import selectors

    given: dict[str, Any] = {name: value for name, value in (("bits", bits), ("steps", steps)) if value is not None}
    kind = selectors.kind_of(selector)
    if not kind.trained:
        raise InvalidArgument(f"selector {selector!r} is not trained; it works without weights")
    check_output(output)
    kind.training(1, 1, 1, **given)  # before minutes are spent, as all that can be wrong with the options
    check_packages("training", model)
    from kvd.demo import inference
    from kvd.demo.display import display
    from kvd.demo.texts import read_text
    from kvd.profiling import calibration
    from kvd.profiling.files import replace_file
    from kvd_client.selectors import weights

    read_texts = [read_text(path) for path in texts]
    shown = display(as_json=False)
    try:
        folder = folder_of(model, shown.progress)
        loaded, tokenizer = inference.load(folder)
        from kvd_client.engines.transformers import spec_of

        context = inference.context_of(loaded)
        work = prompts_of(tokenizer, read_texts, tokens, most=prompts, steps=0, context=context)
        spec = spec_of(loaded, model_id or folder.name, revision)
        made = calibration.train(selector, loaded, work, spec=spec, told=shown.progress, notes=notes, **given)
    finally:
        shown.close()
    replace_file(output, weights.encode(made))
    typer.echo(
        f"{printable(str(output))}: written, {selector} of {printable(made.model)} from {len(work)} prompts of "
        f"{tokens} tokens; sha256 {made.fingerprint}"
    )
