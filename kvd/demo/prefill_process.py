"""The demo's prefill process. Commands: ``prepare``, ``prefill``, ``reference``; run as a module."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from kvd.demo.errors import DemoFailed
from kvd.demo.lines import Line, run_child


def main() -> None:
    """``python -m kvd.demo.prefill_process SOCKET MODEL``"""
    socket, folder = sys.argv[1], Path(sys.argv[2])
    run_child(lambda line: _serve(line, socket, folder))


def _serve(line: Line, socket: str, folder: Path) -> None:
    from kvd.demo import inference, texts
    from kvd_client import Client

    inference.be_first_to_go()
    model, tokenizer = inference.load(folder)
    from kvd_client.engines import transformers as engine

    spec = engine.spec_of(model, folder.name)
    eos = engine.eos_of(model)
    line.emit("loaded", layers=spec.layers)

    command = line.command()
    most = inference.context_of(model) - command["new_tokens"]
    limit = command["prompt_tokens"] or most
    if limit > most:
        raise DemoFailed(
            f"a prompt of {limit} tokens and {command['new_tokens']} new ones exceed the model's context of "
            f"{inference.context_of(model)}; ask for fewer"
        )
    prompt = texts.prompt_ids(tokenizer, command["text"], command["question"], limit)
    line.emit("prepared", tokens=len(prompt))

    command = line.command()
    with Client(socket, name="kvd demo prefill") as client:
        with client.prefill(command["request"], spec, [len(prompt)]) as transfer:
            done = engine.prefill(
                model,
                [prompt],
                transfer,
                on_layer=lambda layer, stop: line.emit("layer", layer=layer, at=time.monotonic()),
            )
            at = time.monotonic()
            text = texts.TextStream(tokenizer).push(done.tokens[0])
            line.emit("first", token=done.tokens[0], text=text, at=at)
        line.emit("delivered", kv_bytes=len(prompt) * spec.layers * spec.kv_heads * spec.entry_bytes)

    command = line.command()
    local = engine.generate_local(
        model, [prompt], command["new_tokens"], eos=eos, on_token=lambda: line.emit("reference_token")
    )
    line.emit("reference", tokens=local.tokens[0], peak_memory=inference.peak_memory())
    line.command()


if __name__ == "__main__":
    main()
