"""The engine with KV selection through real daemons: tokens and logits equal one process with the same selection."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvd_client.engines.selective import (  # noqa: E402
    LocalTransfer,
    decode_selective,
    decode_selective_local,
    open_sink,
    open_source,
    prefill_selective,
    prefix_of,
)
from kvd_client.engines.transformers import spec_of  # noqa: E402
from kvd_client.protocol import MODES  # noqa: E402
from kvd_client.selectors import create, parse  # noqa: E402
from tests.engine_models import random_model, random_prompts  # noqa: E402
from tests.integration.daemons import DaemonProcess, two_daemons  # noqa: E402

NEW, SHARE, WAIT_S = 10, 0.1, 30.0


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, DaemonProcess]]:
    with two_daemons(tmp_path_factory.mktemp("daemons"), fabric={"rate": "10mbit"}) as pair:
        yield pair


class Prefill(threading.Thread):
    """The prefill side in a thread with a client of its own; it lives until the sink has let go."""

    def __init__(self, daemon: DaemonProcess, request: str, selector: Any, prompts: list[list[int]], **how: Any):
        super().__init__(daemon=True)
        self._daemon, self._request, self._selector, self._prompts = daemon, request, selector, prompts
        self._how = how
        self._known, self._over = threading.Event(), threading.Event()
        self._first: list[int] = []
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            model, lengths = self._how.pop("model"), [len(prompt) for prompt in self._prompts]
            mask = self._how.pop("mask", "token")
            with self._daemon.client("prefill") as client:
                transfer = open_source(client, self._request, model, lengths, self._selector, mask=mask)
                self._first = prefill_selective(model, self._prompts, transfer, self._selector, **self._how).tokens
                transfer.finish(wait=False)
                self._known.set()
                assert self._over.wait(WAIT_S)
                transfer.release()
        except BaseException as error:
            self.error = error
        self._known.set()

    def first(self) -> list[int]:
        assert self._known.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return self._first

    def end(self) -> None:
        self._over.set()
        self.join(WAIT_S)
        assert self.error is None


def sink_of(
    client: Any, request: str, model: Any, selector: Any, lengths: list[int], mode: str, mask: str = "token"
) -> Any:
    return open_sink(client, request, model, lengths, selector, share=SHARE, source="prefill", mode=mode, mask=mask)


CASES = [
    ("llama-gqa", "quest"),
    ("gemma3", "hata"),
    ("qwen3", "random"),
    ("llama-gqa", "streaming"),
    ("gemma3", "infinigen"),
    ("qwen3", "hata:ahead=true"),
]
BY_HEAD = [("llama-gqa", "quest", "full"), ("gemma3", "hata", "parallel"), ("qwen3", "hata:ahead=true", "speculative")]


@pytest.mark.parametrize(
    ("name", "selector", "mode", "mask"),
    [*((*case, mode, "token") for case in CASES for mode in MODES), *((*case, "auto") for case in BY_HEAD)],
)
def test_every_mode_equals_one_process(
    daemons: tuple[DaemonProcess, DaemonProcess], name: str, selector: str, mode: str, mask: str
) -> None:
    algorithm = parse(selector)
    # A model serves one call at a time, so each side has its own.
    model, prompts = random_model(name), random_prompts(400, 250)
    request, lengths = f"{name} {selector} {mode} {mask}", [400, 250]
    source = Prefill(daemons[0], request, algorithm, prompts, model=random_model(name), chunk=100, mask=mask)
    with (
        daemons[1].client("decode") as client,
        sink_of(client, request, model, algorithm, lengths, mode, mask) as transfer,
    ):
        assert transfer.mask_by == ("head" if mask == "auto" and spec_of(model).kv_heads > 1 else "token")
        first = source.first()
        steps = list(
            decode_selective(
                model,
                first,
                transfer,
                algorithm,
                share=SHARE,
                mode=mode,
                max_new_tokens=NEW,
                timeout_s=WAIT_S,
            )
        )
    source.end()
    alone = decode_selective_local(model, prompts, algorithm, share=SHARE, max_new_tokens=NEW, chunk=100)
    for row in range(2):
        assert [first[row], *(step.tokens[row] for step in steps)] == alone.tokens[row]
        assert torch.equal(torch.stack([step.logits[row] for step in steps]), alone.logits[row][1:])
    if mode == "full":
        assert all(step.fetched == 0 for step in steps)


def test_a_document_that_the_source_has_and_two_requests_about_it(
    daemons: tuple[DaemonProcess, DaemonProcess],
) -> None:
    model, selector = random_model("llama-gqa"), create("quest")
    document, *questions = random_prompts(350, 9, 14)
    prefix = prefix_of(model, document)
    prompts = [document + question for question in questions]
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(daemons[1].client("decode"))
        sources, sinks, first = [], [], []
        for at, prompt in enumerate(prompts):
            request = f"question {at}"
            sources.append(
                Prefill(daemons[0], request, selector, [prompt], model=random_model("llama-gqa"), prefix=prefix)
            )
            sink = sink_of(client, request, model, selector, [len(prompt)], "speculative")
            sinks.append(stack.enter_context(sink))
        for source in sources:
            first += source.first()
        how: dict[str, Any] = {"share": SHARE, "max_new_tokens": NEW}
        steps = list(decode_selective(model, first, sinks, selector, timeout_s=WAIT_S, **how))
    for source in sources:
        source.end()
    locals_ = [LocalTransfer(spec_of(model), [len(prompt)], selector) for prompt in prompts]
    for prompt, local in zip(prompts, locals_, strict=True):
        prefill_selective(model, [prompt], local, selector, prefix=prefix)
    for mine, its in zip(steps, decode_selective(model, first, locals_, selector, **how), strict=True):
        assert mine.tokens == its.tokens
        assert torch.equal(mine.logits, its.logits)
