"""What the commands of ``kvd profile`` that run a model have in common: options, the model, its prompts, progress."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvd.errors import InvalidArgument

if TYPE_CHECKING:
    from kvd.profiling.evaluate.texts import Domain

INTERRUPTED = 130
"""Exit code of a command that the user stopped; the same command goes on."""

ModelFolder = Annotated[
    Path | None,
    typer.Option("--model", metavar="DIR", help="Folder of a Hugging Face model. [default: SmolLM2-135M]"),
]
ModelId = Annotated[
    str,
    typer.Option(
        "--model-id", metavar="M", help="The model's name in transfers. [default: the folder's]", show_default=False
    ),
]
Revision = Annotated[
    str, typer.Option("--revision", metavar="R", help="Its revision in transfers.", show_default=False)
]
SelectorWeights = Annotated[
    Path | None,
    typer.Option("--weights", metavar="FILE", help="The selector's weights, as kvd profile train wrote them."),
]
Notes = Annotated[str, typer.Option("--notes", metavar="TEXT", help="Kept in the file.", show_default=False)]
Domains = Annotated[
    list[str] | None,
    typer.Option(
        "--texts",
        metavar="DOMAIN=FILE",
        help="A domain of your own, UTF-8; repeat it. [default: code, documentation, prose and dialogue, from "
        "Python, Debian's jargon-text and npm]",
    ),
]

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")
_CONVERSION = ("gguf",)


def check_packages(what: str, folder: Path | None, *more: str) -> None:
    """Raise :class:`InvalidArgument` where this Python lacks what running a model needs, or one of ``more``."""
    wanted = (*_PACKAGES, *more, *(() if folder else _CONVERSION))
    if missing := [name for name in wanted if importlib.util.find_spec(name) is None]:
        raise InvalidArgument(
            f"{what} needs {', '.join(missing)}, which this Python lacks: pip install 'kvd-transport[demo]'",
            missing=missing,
        )


def folder_of(given: Path | None, progress: Any) -> Path:
    """The model's folder, absolute: the given one, or SmolLM2's, which is fetched if need be."""
    from kvd.demo import model

    return (given or model.cached() or model.fetch_and_convert(progress)).resolve()


def prompts_of(
    tokenizer: Any, texts: list[str], tokens: int, *, most: int, steps: int, context: int
) -> list[list[int]]:
    """Token ids of the prompts of one length, each with the token that begins a text, if the model has one."""
    from kvd.profiling.run import cut

    check_context(tokens, steps, context)
    head = [token for token in tokenizer.encode("") if token == tokenizer.bos_token_id]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    found = [[*head, *piece] for piece in cut(ids, tokens - len(head), most)]
    if not found:
        longest = max(map(len, ids)) + len(head)
        raise InvalidArgument(
            f"no text has {tokens} tokens, the longest has {longest}; give longer texts, or --tokens {longest}",
            tokens=tokens,
            longest=longest,
        )
    return found


def check_context(tokens: int, steps: int, context: int) -> None:
    """Raise :class:`InvalidArgument` where a prompt and its decode steps are more than the model was made for."""
    if tokens + steps > context:
        raise InvalidArgument(
            f"a prompt of {tokens} tokens and {steps} decode steps exceed the model's context of {context}; give "
            "--tokens or --steps a smaller number",
            tokens=tokens,
        )


def own_domains(given: Sequence[str] | None) -> list[Domain]:
    """The domains of ``--texts NAME=FILE``."""
    from kvd.profiling.evaluate import texts

    found = []
    for one in given or ():
        name, equals, path = one.partition("=")
        if not equals or not name or not name.replace("-", "").isalnum():
            raise InvalidArgument(f"--texts {one!r} is no domain; write a name and a file, as in letters=letters.txt")
        found.append(texts.own(name, Path(path)))
    if len({domain.name for domain in found}) < len(found):
        raise InvalidArgument("--texts names a domain twice; give each a name of its own")
    return found


class LongProgress:
    """Of hours: one bar on a terminal's standard error, whatever is done just now, or a line for each such thing where
    none is."""

    def __init__(self) -> None:
        self._bars: Any = None
        self._task: Any = None
        self._last = ""

    def __enter__(self) -> LongProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, text: str) -> None:
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False)
        else:
            typer.echo(text, err=True)

    def told(self, what: str, done: int, total: int) -> None:
        """``done`` of ``total`` is done, and ``what`` comes; a total of 0 is unknown."""
        if not sys.stderr.isatty():
            if what != self._last:
                self.say(f"{what}: {done} of {total} done" if total else what)
        else:
            self._draw(what, done, total)
        self._last = what

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _draw(self, what: str, done: int, total: int) -> None:
        from kvd.demo.display import started_bars

        if self._bars is None:
            self._bars = started_bars(sys.stderr, remaining=True)
            self._task = self._bars.add_task(what)
        self._bars.update(self._task, description=what, completed=done, total=total or None)
