"""``kvd config check`` and ``kvd config show``, and how every command gets its configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer
from msgspec.structs import replace

from kvd.config import Config, find, load, resolve, to_builtins, to_toml
from kvd.config_check import Problem
from kvd.config_check import check as problems_of
from kvd.errors import ConfigError


def read(
    path: Path | None, *, socket: str | None = None, node: str | None = None, listen: str | None = None
) -> tuple[Config, str]:
    """The configuration in effect, and what to call it in messages. Options of the command line win over the file and
    the environment. Raises :class:`ConfigError`."""
    path = find() if path is None else path
    config = resolve(Config() if path is None else load(path), path=path)
    if socket is not None:
        config = replace(config, api=replace(config.api, socket=str(Path(socket).absolute())))
    if node is not None:
        config = replace(config, node=replace(config.node, id=node))
    if listen is not None:
        config = replace(config, peers=replace(config.peers, listen=listen))
    return config, "the defaults" if path is None else str(path)


def judge(config: Config, name: str, more: Sequence[Problem] = ()) -> list[Problem]:
    """Write the problems, and those that are known already, to standard error, one a line; returns the warnings. Raises
    :class:`ConfigError` if there are errors: with the error's sentence if it is the only one."""
    from kvd.fabric import registry  # here, since NumPy comes with it

    found = [*problems_of(config, fabrics=registry.names()), *more]
    errors = [problem for problem in found if problem.level == "error"]
    warnings = [problem for problem in found if problem.level == "warning"]
    for problem in warnings:
        typer.echo(f"kvd: warning: {name}: {problem}", err=True)
    if len(errors) == 1:
        raise ConfigError(f"{name}: {errors[0]}", key=errors[0].key)
    for problem in errors:
        typer.echo(f"kvd: {name}: {problem}", err=True)
    if errors:
        raise ConfigError(f"{name} has {len(errors)} errors; see above", keys=[e.key for e in errors])
    return warnings


def check(path: Path | None) -> int:
    """0 if the daemon would start with this configuration; raises :class:`ConfigError` if not."""
    config, name = read(path)
    warnings = judge(config, name, [*_verbs(config)])
    remark = f", with {len(warnings)} warning{'s' * (len(warnings) != 1)}" if warnings else ""
    typer.echo(f"{name}: usable{remark}")
    return 0


def _verbs(config: Config) -> Iterator[Problem]:
    """What is in the way of RDMA, where it is wanted; tried out, as the daemon does when it starts."""
    fabric = config.fabric
    if fabric.name not in ("auto", "verbs"):
        return
    from kvd.fabric.verbs import doctor

    for finding in doctor.examine(
        pool=config.memory.pool, device=fabric.device, port=fabric.port, gid_index=fabric.gid_index
    ):
        if finding.ok:
            continue
        message = f"{finding.what}; {finding.fix}"
        if finding.key and fabric.name == "verbs":
            yield Problem("error", f"$.{finding.key}", message)
        else:
            key, start = (finding.key, "auto means tcp here: ") if finding.key else ("fabric.name", "")
            yield Problem("warning", f"$.{key}", start + message)


def show(path: Path | None, *, as_json: bool) -> int:
    """The configuration in effect on standard output, as TOML or JSON."""
    config, _ = read(path)
    typer.echo(json.dumps(to_builtins(config), indent=2) if as_json else to_toml(config).rstrip("\n"))
    return 0
