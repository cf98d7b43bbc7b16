"""``kvd simulate``: what a cluster would do, on a virtual clock (:mod:`kvd.sim`)."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvd.cli.output import check_output, seconds, table, write_parts
from kvd.errors import InvalidArgument
from kvd.importance.matrix import ImportanceMatrix
from kvd.profiling import files
from kvd.sim.cluster import Cluster
from kvd.sim.report import PERCENTILES, Result, plot, summarise, to_json
from kvd.sim.workload import BLOCKS, MODELS, Scenario, Shape
from kvd.units import about, parse_rate

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_OPTIONS = {
    "arrivals": "--rate", "duration_s": "--hours", "delay_s": "--delay", "step_s": "--step", "selected": "--select",
    "surprise": "--surprise", "prefix_hit": "--prefix-hit", "prefill_rate": "--prefill-rate", "link_rate": "--link",
    "prefill_nodes": "--prefill-nodes", "decode_nodes": "--nodes", "prompt_tokens": "--prompt-tokens",
    "output_tokens": "--output-tokens",
}  # fmt: skip
"""Under which option users know a scenario's field."""


def shape_of(model: str) -> Shape:
    """A known model's, or ``LAYERSxHEADSxENTRY_BYTES``. Raises :class:`InvalidArgument`."""
    if model in MODELS:
        return MODELS[model]
    try:
        layers, heads, entry = (int(part) for part in model.split("x"))
    except ValueError:
        raise InvalidArgument(
            f"there is no model {model!r}; choose one of {', '.join(MODELS)}, or give its layers, KV heads and bytes "
            "of a KV entry, as in 32x8x512",
            model=model,
        ) from None
    return Shape(layers, heads, entry)


def link_rate(text: str) -> float:
    """Bytes a second; raises :class:`InvalidArgument`."""
    try:
        return float(parse_rate(text))
    except ValueError as error:
        raise InvalidArgument(f"--link: {error}", link=text) from None


def importance(path: Path | None, shape: Shape, prompt_tokens: int) -> ImportanceMatrix | None:
    """What a profile file knows about prompts of this length, in as many blocks as are simulated."""
    if path is None:
        return None
    profile = files.read(path)
    if profile.layers != shape.layers:
        raise InvalidArgument(
            f"the profile in {path} has {profile.layers} layers, and the model {shape.layers}; use its model's",
            layers=[profile.layers, shape.layers],
        )
    return profile.importance.nearest(prompt_tokens).matrix.resampled(BLOCKS)


@app.command()
def simulate(
    nodes: Annotated[int, typer.Option("--nodes", min=2, help="All nodes together.")] = 4,
    prefill_nodes: Annotated[
        int | None, typer.Option("--prefill-nodes", min=1, help="Of them, how many prefill.")
    ] = None,
    model: Annotated[
        str,
        typer.Option("--model", help="A known model, or LAYERSxHEADSxENTRY_BYTES. A wrong name lists the known ones."),
    ] = "llama-3.1-8b",
    link: Annotated[str, typer.Option("--link", help="Rate of each node's NIC.")] = "25gbit",
    delay: Annotated[float, typer.Option("--delay", help="One way between two nodes, in seconds.")] = 50e-6,
    rate: Annotated[float, typer.Option("--rate", help="Requests a second, all nodes together.")] = 2.0,
    hours: Annotated[float, typer.Option("--hours", help="How long requests arrive.")] = 1 / 60,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=16, help="Median prompt.")] = 8192,
    prefix_hit: Annotated[
        float, typer.Option("--prefix-hit", help="Of each prompt, held by the source already.")
    ] = 0.75,
    output_tokens: Annotated[int, typer.Option("--output-tokens", min=2, help="Mean tokens decoded.")] = 256,
    prefill_rate: Annotated[
        float, typer.Option("--prefill-rate", help="Tokens a second of a prefill node.")
    ] = 10_000.0,
    step: Annotated[float, typer.Option("--step", help="A decode step with everything local, in seconds.")] = 0.03,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Requests that a decode node decodes at a time.")] = 32,
    selected: Annotated[float, typer.Option("--select", help="Of each layer's entries, in a step.")] = 0.1,
    surprise: Annotated[
        float, typer.Option("--surprise", help="How far prompts stray from the profile: sigma of log importance.")
    ] = 0.5,
    mode: Annotated[str, typer.Option("--mode", help="Modes to compare, with commas between.")] = "full,speculative",
    budget: Annotated[str, typer.Option("--budget", help="deadline or fixed.")] = "deadline",
    speculative: Annotated[str, typer.Option("--speculative", help="adaptive or windows.")] = "adaptive",
    profile: Annotated[
        Path | None, typer.Option("--profile", metavar="FILE", help="Importance as recorded. [default: synthetic]")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Decides every request.")] = 1,
    picture: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Write a PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Simulate a cluster: the daemon's own decisions on a virtual clock, everything around them modelled."""
    for name, value, known_values in (
        ("--budget", budget, ("deadline", "fixed")),
        ("--speculative", speculative, ("adaptive", "windows")),
    ):
        if value not in known_values:
            raise InvalidArgument(f"{name} is {value!r}; choose {' or '.join(known_values)}", option=name)
    first = prefill_nodes if prefill_nodes is not None else nodes // 2
    if first >= nodes:
        raise InvalidArgument(
            f"{first} of {nodes} nodes prefill, which leaves none to decode; give fewer --prefill-nodes", nodes=nodes
        )
    fields = dict[str, Any](
        model=model,
        shape=shape_of(model),
        prefill_nodes=first,
        decode_nodes=nodes - first,
        link_rate=link_rate(link),
        delay_s=delay,
        arrivals=rate,
        duration_s=hours * 3600,
        prompt_tokens=prompt_tokens,
        prefix_hit=prefix_hit,
        output_tokens=output_tokens,
        prefill_rate=prefill_rate,
        step_s=step,
        batch=batch,
        selected=selected,
        surprise=surprise,
        budget=budget,
        speculative=speculative,
        seed=seed,
    )
    try:
        scenario = Scenario(**fields)
    except InvalidArgument as error:
        option = _OPTIONS.get(error.fields.get("field", ""))
        raise InvalidArgument(f"{option}: {error.message}" if option else error.message, **error.fields) from None
    compare(scenario, [name.strip() for name in mode.split(",")], profile, picture, as_json=as_json)


def compare(scenario: Scenario, modes: list[str], profile: Path | None, picture: Path | None, *, as_json: bool) -> None:
    """Run every mode on the same requests, and write what was found."""
    check_output(picture)
    known = importance(profile, scenario.shape, scenario.prompt_tokens)
    scenarios = [dataclasses.replace(scenario, mode=mode) for mode in modes]
    results = [run(one, known) for one in scenarios]
    if as_json:
        typer.echo(json.dumps(to_json(scenario, results)))
    else:
        show(scenario, results)
    if picture is not None:
        plot(results, picture)


def run(scenario: Scenario, known: ImportanceMatrix | None) -> Result:
    """One mode, with progress on a terminal."""
    cluster = Cluster(scenario, known)
    began = time.monotonic()

    def watch() -> None:
        if sys.stderr.isatty():
            done, spent = len(cluster.measured), time.monotonic() - began
            sys.stderr.write(
                f"\r{scenario.mode}: {seconds(cluster.clock.now)} simulated in {seconds(spent)}, {done} requests done "
            )
            sys.stderr.flush()

    cluster.run(watch)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    return summarise(cluster)


def show(scenario: Scenario, results: list[Result]) -> None:
    cache = scenario.prompt_tokens * scenario.token_bytes
    typer.echo(
        f"{scenario.prefill_nodes} prefill and {scenario.decode_nodes} decode nodes, {scenario.model}; "
        f"{scenario.arrivals:g} requests/s for {seconds(scenario.duration_s)}, seed {scenario.seed}\n"
        f"median prompt {scenario.prompt_tokens} tokens, {about(cache)}: T_t {seconds(cache / scenario.link_rate)}, "
        f"T_p {seconds(scenario.prompt_tokens * (1 - scenario.prefix_hit) / scenario.prefill_rate)}, "
        f"a decode step {seconds(scenario.step_s)}\n"
    )
    rows = [["requests", *(str(result.requests) for result in results)]]
    for name, times in (("TTFT", "ttft_s"), ("TTST", "ttst_s"), ("stall", "stall_s"), ("TBT", "tbt_s")):
        for place, percent in enumerate(PERCENTILES):
            values = (getattr(result, times) for result in results)
            rows.append([f"{name} p{percent}", *(seconds(found[place]) if found else "-" for found in values)])
    rows += [
        [f"queued p{PERCENTILES[-1]}", *(seconds(r.queued_s[-1]) if r.queued_s else "-" for r in results)],
        ["fetched in the first step", *(f"{100 * result.on_demand_ratio:.1f} %" for result in results)],
        ["busiest source's link", *(f"{100 * result.source_link:.0f} %" for result in results)],
        ["requests at a time, most", *(str(result.most_running) for result in results)],
        ["pool of a decode node", *(about(result.pool_bytes) for result in results)],
        ["transfers left at the end", *(str(result.left) for result in results)],
        ["ended", *(", ".join(f"{code} {n}" for code, n in result.codes.items()) or "-" for result in results)],
    ]
    write_parts([table(["", *(result.mode for result in results)], rows)])
