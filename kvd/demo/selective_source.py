"""The prefill process of the demo with selective transfer; run as a module.

Commands, by ``do``: ``train`` (the selector's weights, if it has any), ``prepare`` (the prompt, and the KV cache of its
prefix), ``measure`` (T_p), ``record`` (the profile), ``local`` (the same selection in this process alone), ``request``
and ``release``.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvd.demo import importance, inference, orders, texts, weights
from kvd.demo.errors import DemoFailed
from kvd.demo.lines import Line, run_child
from kvd.profiling import files
from kvd.profiling.profile import Profile
from kvd_client import Client, KvdError, PrefillTransfer, selectors

BLOCKS = 1000
_WARM_UP = 48
_MEASURED = 3
_CHUNK = 256


def main() -> None:
    """``python -m kvd.demo.selective_source MODEL SELECTOR``"""
    folder, selector = Path(sys.argv[1]), sys.argv[2]
    run_child(lambda line: _Source(line, folder, selector).serve())


class _Source:
    def __init__(self, line: Line, folder: Path, selector: str) -> None:
        self._line, self._folder, self._wanted = line, folder, selector
        self._selector = selectors.parse(selector)
        inference.be_first_to_go()
        self._model, self._tokenizer = inference.load(folder)
        from kvd_client.engines import transformers as engine

        self._spec = engine.spec_of(self._model, folder.name)
        self._prompt: list[int] = []
        self._prefix: Any = None
        self._profile: Profile | None = None

    def serve(self) -> None:
        """Until the parent closes the pipe."""
        self._line.emit("loaded", layers=self._spec.layers)
        while True:
            command = self._line.command()
            getattr(self, f"_{command.pop('do')}")(**command)

    def _train(self) -> None:
        """Find the selector's weights, or train them."""
        path = weights.find(
            self._model,
            self._tokenizer,
            self._folder.name,
            self._folder,
            self._wanted,
            lambda what, done, total: self._line.emit("progress", what=what, done=done, total=total),
        )
        self._selector = selectors.parse(self._wanted, weights=path)
        warm_up(self._model, self._selector)
        self._line.emit("trained", weights=str(path) if path is not None else None)

    def _prepare(
        self, text: str, question: str, prompt_tokens: int | None, prefix_share: float, new_tokens: int
    ) -> None:
        from kvd_client.engines import selective

        context = inference.context_of(self._model)
        limit = prompt_tokens or context - new_tokens
        if limit + new_tokens > context:
            raise DemoFailed(
                f"a prompt of {limit} tokens and {new_tokens} new ones exceed the model's context of {context}; ask "
                "for fewer"
            )
        self._prompt = texts.prompt_ids(self._tokenizer, text, question, limit)
        held = min(int(prefix_share * len(self._prompt)), len(self._prompt) - 1)
        if held:
            self._line.emit("progress", what="the document's KV cache, which the source holds", done=0, total=0)
            self._prefix = selective.prefix_of(self._model, self._prompt[:held], chunk=_CHUNK)
        shape = selective.shape_of(self._model, [len(self._prompt)])
        metadata = sum(array.layer_bytes for array in self._selector.metadata(shape))
        self._line.emit(
            "prepared",
            tokens=len(self._prompt),
            prefix=held,
            kv_bytes=len(self._prompt) * self._spec.layers * self._spec.kv_heads * self._spec.entry_bytes,
            metadata_bytes=metadata * self._spec.layers,
        )

    def _measure(self) -> None:
        """T_p: what a request does here, without a daemon."""
        from kvd_client.engines import selective

        found = []
        for _ in range(_MEASURED if self._prefix is not None else 1):
            local = selective.LocalTransfer(self._spec, [len(self._prompt)], self._selector)
            since = time.monotonic()
            selective.prefill_selective(
                self._model, [self._prompt], local, self._selector, prefix=self._prefix, chunk=self._chunk
            )
            found.append(time.monotonic() - since)
        self._line.emit("measured", seconds=found)

    def _record(self) -> None:
        """Find the profile, or record it."""
        what = "importance from other texts, recorded once, prompts"
        self._profile, path = importance.profile(
            self._model,
            self._tokenizer,
            self._folder.name,
            self._folder,
            self._selector,
            len(self._prompt),
            lambda done, total: self._line.emit("progress", what=what, done=done, total=total),
        )
        self._line.emit("recorded", profile=importance.described(self._profile, path))

    def _write_profile(self, folder: str, prefill_s: float, transfer_s: float, link: int) -> None:
        """Put the profile, with the times of this run, where the daemons look for it."""
        if self._profile is not None:
            timed = importance.timed(self._profile, len(self._prompt), prefill_s, transfer_s, link)
            files.write(timed, Path(folder) / "demo.kvdprofile")
        self._line.emit("written")

    def _local(self, share: float, new_tokens: int) -> None:
        """The same selection in one process, what it selects, and how long its steps take."""
        from kvd_client.engines import selective

        counts, first = np.zeros((2, self._spec.layers, min(BLOCKS, len(self._prompt))), np.int64)
        at: list[float] = []
        spent: list[float] = []

        def count(layer: int, index: Any) -> None:
            from kvd_kernels import accumulate_blocks

            lengths = np.array([len(self._prompt)], np.int64)
            accumulate_blocks(index, counts[layer], lengths, beyond="skip")
            if not at:
                accumulate_blocks(index, first[layer], lengths, beyond="skip")

        def told(step: selective.SelectiveStep) -> None:
            at.append(step.at)
            spent.append(step.select_s)

        found = selective.decode_selective_local(
            self._model,
            [self._prompt],
            self._selector,
            share=share,
            max_new_tokens=new_tokens,
            prefix=self._prefix,
            chunk=self._chunk,
            on_step=told,
            on_select=count,
        )
        matrix = self._profile.importance.nearest(len(self._prompt)).matrix if self._profile is not None else None
        by_order = [orders.compare(each, len(self._prompt), matrix) for each in (first, counts)]
        self._line.emit(
            "local",
            tokens=found.tokens[0],
            text=self._tokenizer.decode(found.tokens[0], skip_special_tokens=True),
            step_s=[b - a for a, b in itertools.pairwise(at)],
            select_s=spent[1:],
            entries=selective.entries_of([len(self._prompt)], share)[0],
            orders={name: {"first": by_order[0][name], "all": by_order[1][name]} for name in by_order[0]},
        )

    def _request(self, socket: str, request: str, prefill_s: float, mask: str) -> None:
        """Serve one request, from the opening of the transfer until ``release``."""
        from kvd_client.engines import selective

        lengths = [len(self._prompt)]
        with Client(socket, name="kvd demo prefill") as client:
            transfer = selective.open_source(
                client,
                request,
                self._model,
                lengths,
                self._selector,
                spec=self._spec,
                prefill_s=prefill_s,
                mask=mask,
            )
            done = selective.prefill_selective(
                self._model, [self._prompt], transfer, self._selector, prefix=self._prefix, chunk=self._chunk
            )
            self._line.emit("first", token=done.tokens[0], at=time.monotonic())
            transfer.finish(wait=False)
            watch = threading.Thread(target=self._watch, args=(transfer,), daemon=True)
            watch.start()
            command = self._line.command()
            assert command["do"] == "release"
            transfer.release()
            watch.join()
        self._line.emit("released")

    def _watch(self, transfer: PrefillTransfer) -> None:
        """Tell when everything is at the sink; a sink that lets go before looks the same."""
        with contextlib.suppress(KvdError):
            transfer.wait_delivered()
            self._line.emit("delivered", at=time.monotonic())

    @property
    def _chunk(self) -> int | None:
        """A question is computed at once; a whole prompt in pieces, which bounds the memory of attention."""
        return None if self._prefix is not None else _CHUNK


def warm_up(model: Any, selector: selectors.Selector) -> None:
    """Run everything once: memory, caches and kernels are chosen then."""
    from kvd_client.engines import selective

    prompt = [token % inference.vocabulary_of(model) for token in range(1, _WARM_UP)]
    selective.decode_selective_local(model, [prompt], selector, share=0.2, max_new_tokens=4)


if __name__ == "__main__":
    main()
