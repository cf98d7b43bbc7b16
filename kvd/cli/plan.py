"""``kvd plan``: what a transfer between two layouts would send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvd.cli.output import printable, write_parts
from kvd.errors import InvalidArgument
from kvd.reading import read_text
from kvd.units import about

if TYPE_CHECKING:
    from kvd.layout.descriptor import Layout
    from kvd.layout.summary import Summary

plan_app = typer.Typer(
    help="Plans: what a transfer between two layouts would send.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]


@plan_app.command()
def show(
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL", help="A name, a config.json, or layers=N,kv_heads=N,head_dim=N.", show_default=False
        ),
    ],
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of the request.", show_default=False)],
    source: Annotated[
        str,
        typer.Option(
            "--from", metavar="LAYOUT", help="Layout at the source: a name or a TOML file.", show_default=False
        ),
    ],
    target: Annotated[
        str,
        typer.Option("--to", metavar="LAYOUT", help="Layout at the sink: a name or a TOML file.", show_default=False),
    ],
    channels: Annotated[int, typer.Option(metavar="C", help="Memory channels of a device.")] = 8,
    alignment: Annotated[int, typer.Option(metavar="BYTES", help="Alignment of a device's pages.")] = 64,
    dtype: Annotated[str, typer.Option(metavar="CODEC", help="Number format at the source.")] = "bf16",
    to_dtype: Annotated[
        str, typer.Option(metavar="CODEC", help="Number format at the sink, such as bfp8_b. [default: as the source's]")
    ] = "",
    from_block: Annotated[int, typer.Option(metavar="N", help="Tokens of a block at the source.")] = 16,
    to_block: Annotated[int, typer.Option(metavar="N", help="Tokens of a block at the sink.")] = 32,
    shard: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Tiles that a shard is wide (width-sharded), or its pages (height-sharded; 0: as few as do).",
        ),
    ] = 0,
    from_tp: Annotated[int, typer.Option(metavar="N", help="Tensor-parallel ranks at the source.")] = 1,
    to_tp: Annotated[int, typer.Option(metavar="N", help="Tensor-parallel ranks at the sink.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Show requests, sizes, padding and the regroup, for every way to send it. Moves nothing."""
    from kvd.layout.models import model as model_named
    from kvd.layout.summary import summarise

    found = summarise(
        model_named(model),
        tokens,
        _layout(source, dtype, from_block, channels, alignment, shard),
        _layout(target, to_dtype or dtype, to_block, channels, alignment, shard),
        source_ranks=from_tp,
        target_ranks=to_tp,
    )
    if as_json:
        typer.echo(json.dumps(_fields(found)))
    else:
        write_parts(_shown(found))


@plan_app.command()
def layouts(as_json: AsJson = False) -> None:
    """List the layouts that have names."""
    from kvd.layout.named import NAMED

    if as_json:
        typer.echo(json.dumps({name: one.about for name, one in NAMED.items()}))
    else:
        width = max(map(len, NAMED))
        write_parts(f"{name:<{width}}  {one.about}" for name, one in NAMED.items())


def _layout(text: str, codec: str, block: int, channels: int, alignment: int, shard: int) -> Layout:
    from kvd.layout import named, notation

    if not text.endswith(".toml"):
        return named.get(text, codec=codec, block=block, channels=channels, alignment=alignment, shard=shard)
    try:
        written = read_text(text)
    except OSError as error:
        raise InvalidArgument(f"{text[-255:]} can't be read: {error.strerror}", file=text[-255:]) from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"{text} is not text", file=text) from None
    try:
        return notation.from_toml(written)
    except InvalidArgument as error:
        raise InvalidArgument(f"{text}: {error.message}", **error.fields | {"file": text}) from None


def _shown(found: Summary) -> Iterator[str]:
    shape, padding = found.model, found.staging_bytes - found.payload_bytes
    yield printable(
        f"{shape.name}: {shape.layers} layers, {shape.kv_heads} KV heads, {shape.parts} x {shape.head_dim}, "
        f"{found.tokens} tokens"
    )
    for side, layout in (("from", found.source), ("to", found.target)):
        yield printable(f"  {side:<8}{_described(layout)}")
    yield f"  bytes   {about(found.payload_bytes)} of elements, {about(padding)} of padding"
    for pair in found.pairs:
        ranks = f"rank {pair.source_rank} to {pair.target_rank}: " if len(found.pairs) > 1 else ""
        size = about(pair.plan.staging_bytes)
        yield f"  regroup {ranks}{_regroup(pair.plan)}; {size} in {_counted(len(pair.plan.requests), 'request')}"
    yield ""
    yield f"{'requests':>11}  {'bytes each':>23}  way"
    for way in found.ways:
        yield f"{way.requests:>11,}  {_sizes(way.smallest, way.largest):>23}  {way.name}: {way.about}"


def _described(layout: Layout) -> str:
    from kvd.layout.notation import axes_text, order_text

    place = layout.placement
    parts = [layout.name, layout.codec, f"[{order_text(layout)}]"]
    parts += [f"{axis} = {text}" for axis, text in axes_text(layout).items()]
    if place.kind != "flat":
        shards = f" in shards of {_counted(place.shard_pages, 'page')}" if place.shard_pages else ""
        parts.append(f"{place.kind} over {place.channels} channels{shards}")
    return ", ".join(parts)


def _regroup(plan: Any) -> str:
    boxes = sum(len(copy.places) for copy in plan.copies)
    items = sorted({copy.item_bytes for copy in plan.copies})
    steps = [f"decode {plan.decode.block.name}"] if plan.decode else []
    steps.append(
        f"{_counted(len(plan.copies), 'kernel call')}, {_counted(boxes, 'box', 'boxes')} in pieces of "
        f"{_sizes(items[0], items[-1])} B"
    )
    if len(plan.zero):
        steps.append(f"{_counted(len(plan.zero), 'page')} padded")
    if plan.encode:
        steps.append(f"encode {plan.encode.block.name}")
    return ", ".join(steps)


def _counted(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def _sizes(smallest: int, largest: int) -> str:
    return f"{smallest:,}" if smallest == largest else f"{smallest:,}-{largest:,}"


def _fields(found: Summary) -> dict[str, Any]:
    from kvd.layout.notation import fingerprint, to_wire

    return {
        "model": {
            "name": found.model.name,
            "layers": found.model.layers,
            "kv_heads": found.model.kv_heads,
            "head_dim": found.model.head_dim,
            "parts": found.model.parts,
        },
        "tokens": found.tokens,
        "from": to_wire(found.source) | {"fingerprint": fingerprint(found.source)},
        "to": to_wire(found.target) | {"fingerprint": fingerprint(found.target)},
        "payload_bytes": found.payload_bytes,
        "staging_bytes": found.staging_bytes,
        "padding_bytes": found.staging_bytes - found.payload_bytes,
        "ranks": [
            {
                "from": pair.source_rank,
                "to": pair.target_rank,
                "heads": list(pair.heads),
                "staging_bytes": pair.plan.staging_bytes,
                "requests": len(pair.plan.requests),
                "padded_pages": len(pair.plan.zero),
                "regroup": [
                    {
                        "channel": copy.channel,
                        "boxes": len(copy.places),
                        "shape": list(copy.shape),
                        "source_strides": list(copy.source_strides),
                        "target_strides": list(copy.target_strides),
                        "item_bytes": copy.item_bytes,
                    }
                    for copy in pair.plan.copies
                ],
            }
            for pair in found.pairs
        ],
        "ways": {
            way.name: {"requests": way.requests, "smallest": way.smallest, "largest": way.largest} for way in found.ways
        },
    }
