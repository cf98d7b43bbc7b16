"""The decode process of the demo with selective transfer; run as a module.

Commands: first the selector's weights, then for each request itself, its first token and its release. Steps are told at
the end: what is measured is not to be disturbed by telling it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvd.demo import inference
from kvd.demo.lines import Line, run_child
from kvd.demo.selective_source import warm_up
from kvd_client import Client, selectors


def main() -> None:
    """``python -m kvd.demo.selective_sink MODEL SELECTOR``"""
    folder, selector = Path(sys.argv[1]), sys.argv[2]
    run_child(lambda line: _serve(line, folder, selector))


def _serve(line: Line, folder: Path, name: str) -> None:
    from kvd_client.engines import selective
    from kvd_client.engines.transformers import spec_of

    inference.be_first_to_go()
    model, _ = inference.load(folder)
    spec = spec_of(model, folder.name)
    line.emit("loaded", layers=spec.layers)
    selector = selectors.parse(name, weights=line.command()["weights"])
    if selector.weights is not None:
        selector.weights.for_model(spec)
    warm_up(model, selector)
    line.emit("warm")
    while True:
        request = line.command()
        lengths, share = [request["tokens"]], request["share"]
        with (
            Client(request["socket"], name="kvd demo decode") as client,
            selective.open_sink(
                client,
                request["request"],
                model,
                lengths,
                selector,
                share=share,
                spec=spec,
                source=inference.NODES["prefill"],
                mode=request["mode"],
                mask=request["mask"],
            ) as transfer,
        ):
            first = line.command()["token"]
            steps = list(
                selective.decode_selective(
                    model,
                    [first],
                    transfer,
                    selector,
                    share=share,
                    mode=request["mode"],
                    max_new_tokens=request["new_tokens"],
                )
            )
            line.emit(
                "decoded",
                tokens=[first, *(step.tokens[0] for step in steps)],
                at=[step.at for step in steps],
                selected=[step.selected for step in steps],
                fetched=[step.fetched for step in steps],
                waited_s=[step.waited_s for step in steps],
                fetch_wait_s=[step.fetch_wait_s for step in steps],
                fetch_s=[step.fetch_s for step in steps],
                select_s=[step.select_s for step in steps],
                mask=transfer.mask_by,
                complete=all(transfer.poll_ready(layer) for layer in range(spec.layers)),
            )
            line.command()
        line.emit("released")


if __name__ == "__main__":
    main()
