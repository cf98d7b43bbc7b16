"""``kvd profile install`` and ``export``, and recording from a running daemon."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvd.cli.output import printable
from kvd.errors import InvalidArgument

if TYPE_CHECKING:
    from kvd.profiling.profile import Profile

Socket = Annotated[str | None, typer.Option("--socket", metavar="PATH", help="Unix socket of the local API.")]


def install(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Profile file.", show_default=False)],
    socket: Socket = None,
) -> None:
    """Give a profile to the running daemon, for transfers that begin from now on. Exit code: 1 refused."""
    from kvd.cli.status import find_socket
    from kvd.profiling.files import encode, fingerprint, read
    from kvd_client import Client

    profile = read(file)
    with Client(find_socket(socket, None), name="kvd profile install") as client:
        try:
            client.install_profile(encode(profile))
        except InvalidArgument as error:
            # Not the user's usage is wrong: the daemon can't take or keep this file.
            typer.echo(f"kvd: {printable(str(file))} was refused: {error.message}", err=True)
            raise typer.Exit(1) from None
        node = client.status().node
    typer.echo(printable(f"{file}: installed on node {node}, for transfers that begin from now on"))
    for line in described(profile):
        typer.echo(line)
    typer.echo(f"  sha256    {fingerprint(profile)}")


def export_learnt(
    model: Annotated[
        str, typer.Option("--model-id", metavar="M", help="The model's name in transfers.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Profile file to write.", show_default=False)
    ],
    selector: Annotated[
        str, typer.Option("--selector", metavar="S", help="KV selection algorithm. [default: none named]")
    ] = "",
    socket: Socket = None,
) -> None:
    """Write what the running daemon has learnt, and uses for new transfers, as a profile file.

    kvd status lists what there is. Exit code: 1 nothing has been learnt of that model.
    """
    from kvd.profiling.files import fingerprint, write

    profile = export(model, selector, socket, learnt=True)
    write(profile, output)
    typer.echo(printable(f"{output}: written, learnt from {sum(g.samples for g in profile.groups)} requests"))
    for line in described(profile):
        typer.echo(line)
    typer.echo(f"  sha256    {fingerprint(profile)}")


def export(model: str, selector: str, socket: str | None, *, learnt: bool = False) -> Profile:
    """What the running daemon has recorded, or learnt; raises :class:`~kvd.errors.NotFound` with the names it has."""
    from kvd.cli.status import find_socket
    from kvd.profiling.files import decode
    from kvd_client import Client

    with Client(find_socket(socket, None), name="kvd profile") as client:
        what = "what the daemon learnt" if learnt else "what the daemon recorded"
        return decode(client.export_profile(model, selector, learnt=learnt), what)


def described(profile: Profile) -> list[str]:
    """Model, selector and groups of a profile, a line each."""
    parameters = ", ".join(f"{name} {value}" for name, value in sorted(profile.parameters.items()))
    ranges = [f"{group.low}-{group.high - 1}" for group in profile.groups]
    shown = ranges if len(ranges) <= 4 else [*ranges[:2], "…", ranges[-1]]
    lines = [
        f"  model     {profile.model}{f' at {profile.revision}' if profile.revision else ''}",
        f"  selector  {profile.selector}{f' ({parameters})' if parameters else ''}",
        f"  groups    {len(ranges)}: {', '.join(shown)} tokens, {profile.blocks} blocks a layer",
    ]
    return [printable(line) for line in lines]
