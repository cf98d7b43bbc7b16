"""The ``kvd`` command: its subcommands, and how errors end it.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 no daemon answers. ``kvd status`` adds 1 for degraded.
Only what a subcommand needs is imported, when it runs: ``kvd --help`` has to be quick.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import kvd
from kvd.cli.output import printable
from kvd.cli.plan import plan_app
from kvd.cli.profile import profile_app
from kvd.errors import ConfigError, DaemonUnreachable, InvalidArgument, KvdError

EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHABLE = 1, 2, 3


class _Commands(TyperGroup):
    """Ends a subcommand's KvdError as one sentence and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KvdError as error:
            typer.echo(f"kvd: {printable(error.message)}", err=True)
            raise typer.Exit(exit_code(error)) from None


def exit_code(error: KvdError) -> int:
    """What a command that ends with this error returns to the shell. What may mend itself is no wrong usage: a service
    manager tries again."""
    if isinstance(error, ConfigError | InvalidArgument) and not error.fields.get("passing"):
        return EXIT_USAGE
    return EXIT_UNREACHABLE if isinstance(error, DaemonUnreachable) else EXIT_FAILED


app = typer.Typer(
    name="kvd",
    cls=_Commands,
    help="Moves KV caches between the prefill and decode nodes of disaggregated LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Look at the configuration.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")
app.add_typer(profile_app, name="profile")
app.add_typer(plan_app, name="plan")

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Configuration file. [default: $KVD_CONFIG, /etc/kvd/kvd.toml, or built-in values]",
    ),
]
Socket = Annotated[str | None, typer.Option("--socket", metavar="PATH", help="Unix socket of the local API.")]
Node = Annotated[str | None, typer.Option("--node", metavar="ID", help="Name of this node among its peers.")]
Listen = Annotated[str | None, typer.Option("--listen", metavar="HOST:PORT", help="Where peers connect.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]


@app.command()
def serve(config: ConfigFile = None, socket: Socket = None, node: Node = None, listen: Listen = None) -> None:
    """Run the daemon."""
    from kvd.cli import serve as command

    raise typer.Exit(command.serve(config, socket=socket, node=node, listen=listen))


@app.command()
def status(
    socket: Socket = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
    watch: Annotated[
        float | None,
        typer.Option("--watch", metavar="SECONDS", min=0.1, max=86400, help="Show it again and again, so often."),
    ] = None,
) -> None:
    """Show what the daemon does. Exit code: 0 ok, 1 degraded, 2 usage, 3 unreachable."""
    from kvd.cli import status as command

    raise typer.Exit(command.status(socket, config, as_json=as_json, watch_s=watch))


@app.command()
def metrics(
    socket: Socket = None,
    config: ConfigFile = None,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="Serve them at http://HOST:PORT/metrics.")
    ] = None,
) -> None:
    """Write the daemon's metrics in Prometheus' format, or serve them. Exit code: 3 unreachable."""
    from kvd.cli import metrics as command

    raise typer.Exit(command.metrics(socket, config, listen=listen))


@app.command()
def doctor(config: ConfigFile = None) -> None:
    """Find what keeps RDMA, cards and peers from working with this host. Exit code: 0 nothing, 1 something."""
    from kvd.cli import doctor as command

    raise typer.Exit(command.doctor(config))


@config_app.command("check")
def config_check(config: ConfigFile = None) -> None:
    """Check the configuration on this host. Exit code: 0 usable, 2 not."""
    from kvd.cli import config as command

    raise typer.Exit(command.check(config))


@config_app.command("show")
def config_show(config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Show the configuration in effect, defaults included. Keys are never shown, only their file's name."""
    from kvd.cli import config as command

    raise typer.Exit(command.show(config, as_json=as_json))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def demo(context: typer.Context) -> None:
    """Move a real model's KV cache between two daemons on this machine, and show the figures."""
    _run("demo", context.args)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def simulate(context: typer.Context) -> None:
    """Plan a cluster: the daemon's own decisions on a virtual clock, for a model, a link and a load."""
    _run("simulate", context.args)


def _run(name: str, args: list[str]) -> None:
    """A subcommand whose options are its own module's business, which is loaded only when it is wanted."""
    command = typer.main.get_command(importlib.import_module(f"kvd.cli.{name}").app)
    outcome = command.main(args, prog_name=f"kvd {name}", standalone_mode=False)
    raise typer.Exit(outcome if isinstance(outcome, int) else 0)


@app.command()
def errors() -> None:
    """Show every error code: who sees it, how soon, what has been given back, whether to retry."""
    from kvd_client.failures import table

    typer.echo(table())


@app.command()
def version() -> None:
    """Show the version."""
    typer.echo(f"kvd {kvd.__version__}")
