"""The demo's decode process. Commands: ``open``, ``decode``; run as a module."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path

from kvd.demo.lines import Line, run_child
from kvd_client import Client, DecodeTransfer, KvdError, Placement


def main() -> None:
    """``python -m kvd.demo.decode_process SOCKET MODEL``"""
    socket, folder = sys.argv[1], Path(sys.argv[2])
    run_child(lambda line: _serve(line, socket, folder))


def _serve(line: Line, socket: str, folder: Path) -> None:
    from kvd.demo import inference, texts

    inference.be_first_to_go()
    model, tokenizer = inference.load(folder)
    from kvd_client.engines import transformers as engine

    spec = engine.spec_of(model, folder.name)
    eos = engine.eos_of(model)
    line.emit("loaded", layers=spec.layers)

    command = line.command()
    lengths, new_tokens = [command["tokens"]], command["new_tokens"]
    with (
        Client(socket, name="kvd demo decode") as client,
        client.decode(
            command["request"],
            spec,
            lengths,
            capacity=lengths[0] + new_tokens - 1,
            source=inference.NODES["prefill"],
            placement=_placement(command["layout"]),
        ) as transfer,
    ):
        watch = threading.Thread(target=_watch, args=(line, transfer), daemon=True)
        watch.start()
        first = line.command()["token"]
        text = texts.TextStream(tokenizer)
        text.push(first)
        for step in engine.decode(model, [first], transfer, lengths=lengths, max_new_tokens=new_tokens, eos=eos):
            token = step.tokens[0]
            line.emit("token", token=token, text=text.push(token), at=step.at, waited_s=step.waited_s)
        watch.join()
    line.emit("done", peak_memory=inference.peak_memory())
    line.command()


def _placement(layout: str) -> Placement | None:
    """On the decode node's device; the model computes in fp32."""
    from kvd.demo.inference import DEVICE

    return Placement(layout=layout, device=DEVICE, dtype="f32") if layout else None


def _watch(line: Line, transfer: DecodeTransfer) -> None:
    """Tell when each layer has arrived, which is all that the achieved link rate can be told from."""
    with contextlib.suppress(KvdError):  # decode meets the same error, and reports it
        for layer in range(transfer.layout.layers):
            transfer.wait_ready(layer)
            line.emit("arrived", layer=layer, at=time.monotonic())


if __name__ == "__main__":
    main()
