"""``kvd profile link``: what the link between two nodes carries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvd.cli.output import check_output, printable, seconds
from kvd.cli.profile_daemon import Socket
from kvd.errors import InvalidArgument
from kvd.units import about

if TYPE_CHECKING:
    from kvd.profiling.link import Link, Round
    from kvd_client import Client

TOKENS = 1024
"""For which T_t is given."""

INTERRUPTED = 130


def link(
    serve: Annotated[bool, typer.Option("--serve", help="On the source's host: answer measurements.")] = False,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="NODE", help="On the sink's host: the source's node id.", show_default=False),
    ] = None,
    request: Annotated[
        str,
        typer.Option("--request", metavar="ID", help="Request id; the same on both hosts. [default: kvd-profile-link]"),
    ] = "",
    mib: Annotated[int, typer.Option("--mib", min=1, max=4096, metavar="N", help="MiB of a round.")] = 64,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, metavar="N", help="Rounds.")] = 5,
    wait: Annotated[
        float, typer.Option("--wait", min=0.1, max=3600, metavar="SECONDS", help="How long to wait for the other side.")
    ] = 10.0,
    once: Annotated[bool, typer.Option("--once", help="With --serve: end after one measurement.")] = False,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Folder of a Hugging Face model, for T_t.")
    ] = None,
    layers: Annotated[int | None, typer.Option("--layers", min=1, metavar="N", help="Layers, for T_t.")] = None,
    heads: Annotated[int | None, typer.Option("--heads", min=1, metavar="N", help="KV heads a layer, for T_t.")] = None,
    entry_bytes: Annotated[
        int | None,
        typer.Option("--entry-bytes", min=1, metavar="N", help="Bytes of K and V of a token and KV head, for T_t."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write JSON to a file, for kvd profile record --link."),
    ] = None,
    socket: Socket = None,
) -> None:
    """Measure what the link between two nodes carries.

    Run it with --serve on the source's host, and with --from and the source's node id on the sink's. It uses transfers
    as inference processes do, so a configured rate holds, and other transfers take their part of the link. Given a
    model's cache, it says how long a full transfer takes (T_t).
    """
    if serve == (source is not None):
        raise InvalidArgument("give one of --serve (on the source's host) and --from NODE (on the sink's host)")
    check_output(output)
    from kvd.cli.status import find_socket
    from kvd.profiling import link as links
    from kvd_client import Client

    cache = _cache(model, layers, heads, entry_bytes)
    request = request or links.REQUEST
    try:
        with Client(find_socket(socket, None), name="kvd profile link") as client:
            if source is None:
                _serve(client, request, once)
                return
            found = links.measure(client, source, request, mib=mib, rounds=rounds, wait_s=wait, on_round=_said(rounds))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    fields = found.fields() | ({"transfer": _transfer(found, *cache)} if cache else {})
    if output is not None:
        from kvd.profiling.files import replace_file

        replace_file(output, json.dumps(fields, indent=2).encode() + b"\n")
    if as_json:
        typer.echo(json.dumps(fields))
    else:
        for line in _shown(fields):
            typer.echo(printable(line))
        if output is not None:
            typer.echo(f"{printable(str(output))}: written")


def _serve(client: Client, request: str, once: bool) -> None:
    from kvd.profiling import link as links

    node = client.status().node
    option = "" if request == links.REQUEST else f" --request {request}"
    typer.echo(printable(f"node {node} answers as {request}; on the sink's host: "), nl=False)
    typer.echo(printable(f"kvd profile link --from {node}{option}"))
    links.serve(client, request, measurements=1 if once else None, say=lambda text: typer.echo(printable(text)))


def _said(rounds: int) -> Any:
    number = 0

    def say(one: Round) -> None:
        nonlocal number
        number += 1
        typer.echo(f"round {number} of {rounds}: {speed(one.rate)}, latency {seconds(one.latency_s)}", err=True)

    return say


def _cache(
    model: Path | None, layers: int | None, heads: int | None, entry_bytes: int | None
) -> tuple[int, int, int] | None:
    """Layers, KV heads and entry bytes, if any are given."""
    given = (layers, heads, entry_bytes)
    if model is not None:
        from kvd.profiling.link import geometry

        if any(given):
            raise InvalidArgument("--model says what --layers, --heads and --entry-bytes say; give one or the others")
        return geometry(model)
    if not any(given):
        return None
    if layers is None or heads is None or entry_bytes is None:
        raise InvalidArgument("T_t needs all of --layers, --heads and --entry-bytes, or --model")
    return layers, heads, entry_bytes


def _transfer(found: Link, layers: int, heads: int, entry_bytes: int) -> dict[str, Any]:
    from kvd.profiling.link import transfer_times

    times = transfer_times(found.rate, found.latency_s, [TOKENS], layers * heads * entry_bytes)
    return {
        "layers": layers,
        "kv_heads": heads,
        "entry_bytes": entry_bytes,
        "tokens": TOKENS,
        "seconds": times.seconds[0],
    }


def _shown(found: dict[str, Any]) -> list[str]:
    rate, latency = found["bytes_per_s"], found["latency_s"]
    lines = [
        f"{found['source']} to {found['sink']}, {len(found['rounds'])} rounds of {found['mib']} MiB",
        f"  rate      {speed(rate['median'])} (median), {speed(rate['min'])} to {speed(rate['max'])}",
        f"  latency   {seconds(latency['median'])} (median), {seconds(latency['min'])} to {seconds(latency['max'])}, "
        "open to delivered",
    ]
    if one := found.get("transfer"):
        cache = f"{one['layers']} layers, {one['kv_heads']} KV heads, {about(one['entry_bytes'])} an entry"
        lines.append(f"  T_t       {seconds(one['seconds'])} for {one['tokens']} tokens ({cache})")
    return lines


def speed(rate: float) -> str:
    """``200 mbit`` or ``9.4 gbit``: a rate for human eyes."""
    bits = 8 * rate
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if bits >= 0.9995 * factor:
            value = bits / factor
            return f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"
    return f"{bits:.0f} bit"
