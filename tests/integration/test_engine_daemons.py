"""The reference engine through real daemons: prefill beside one, decode beside the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvd_client.engines.transformers import decode, generate_local, prefill, spec_of  # noqa: E402
from kvd_client.errors import Aborted, FingerprintMismatch  # noqa: E402
from tests.engine_models import CONFIGS, random_model, random_prompts  # noqa: E402
from tests.integration.daemons import DaemonProcess, two_daemons  # noqa: E402

NEW = 10
WAIT_S = 30.0


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, DaemonProcess]]:
    with two_daemons(tmp_path_factory.mktemp("daemons"), fabric={"rate": "50mbit"}) as pair:
        yield pair


class Prefill(threading.Thread):
    """The prefill side in a thread with a client of its own."""

    def __init__(self, daemon: DaemonProcess, request: str, model: Any, prompts: list[list[int]], **how: Any) -> None:
        super().__init__(daemon=True)
        self._daemon, self._request, self._model, self._prompts, self._how = (
            daemon,
            request,
            model,
            prompts,
            how,
        )
        self._known = threading.Event()
        self._first: list[int] = []
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            lengths = [len(prompt) for prompt in self._prompts]
            with (
                self._daemon.client("prefill") as client,
                client.prefill(self._request, spec_of(self._model), lengths) as transfer,
            ):
                self._first = prefill(self._model, self._prompts, transfer, **self._how).tokens
                self._known.set()
        except BaseException as error:
            self.error = error
            self._known.set()

    def first(self) -> list[int]:
        assert self._known.wait(WAIT_S)
        return self._first


def through_daemons(
    daemons: tuple[DaemonProcess, DaemonProcess],
    request: str,
    model: Any,
    prompts: list[list[int]],
    **how: Any,
) -> tuple[list[list[int]], list[Any]]:
    lengths = [len(prompt) for prompt in prompts]
    source = Prefill(daemons[0], request, model, prompts, **how)
    with (
        daemons[1].client("decode") as client,
        client.decode(request, spec_of(model), lengths, capacity=max(lengths) + NEW - 1, source="prefill") as transfer,
    ):
        first = source.first()
        assert source.error is None
        steps = list(decode(model, first, transfer, lengths=lengths, max_new_tokens=NEW))
    source.join(WAIT_S)
    assert source.error is None
    rows = range(len(prompts))
    return (
        [[first[row], *(step.tokens[row] for step in steps)] for row in rows],
        [torch.stack([step.logits[row] for step in steps]) for row in rows],
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_one_row_equals_a_single_process_bit_by_bit(daemons: tuple[DaemonProcess, DaemonProcess], name: str) -> None:
    model, prompts = random_model(name), random_prompts(300)
    tokens, logits = through_daemons(daemons, f"one-{name}", model, prompts)
    alone = generate_local(model, prompts, NEW)
    assert tokens == alone.tokens
    assert torch.equal(logits[0], alone.logits[0][1:])


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("name", CONFIGS)
def test_unequal_rows_equal_each_alone(
    daemons: tuple[DaemonProcess, DaemonProcess], name: str, chunk: int | None
) -> None:
    model, prompts = random_model(name), random_prompts(7, 200, 91)
    tokens, _ = through_daemons(daemons, f"rows-{name}-{chunk}", model, prompts, chunk=chunk)
    assert tokens == generate_local(model, prompts, NEW).tokens


def test_a_prefill_that_fails_ends_decode_with_its_reason(
    daemons: tuple[DaemonProcess, DaemonProcess],
) -> None:
    model, prompts = random_model("llama-gqa"), random_prompts(50)
    go = threading.Event()

    def fail(layer: int, stop: int) -> None:
        if layer == 2:
            assert go.wait(WAIT_S)
            raise RuntimeError("the device fell over")

    source = Prefill(daemons[0], "fails", model, prompts, on_layer=fail)
    mine = random_model("llama-gqa")
    with daemons[1].client("decode") as client:
        transfer = client.decode("fails", spec_of(mine), [50], capacity=60, source="prefill")
        transfer.wait_ready(1, timeout_s=WAIT_S)
        go.set()
        with pytest.raises(Aborted, match="the device fell over"):
            next(decode(mine, [1], transfer, lengths=[50], max_new_tokens=NEW))
        transfer.release()
    source.join(WAIT_S)
    assert isinstance(source.error, RuntimeError)


def test_another_model_on_the_other_side_is_refused(daemons: tuple[DaemonProcess, DaemonProcess]) -> None:
    mine, other = random_model("llama-gqa"), random_model("llama-mha")
    source = Prefill(daemons[0], "differs", mine, random_prompts(20))
    with daemons[1].client("decode") as client:
        transfer = client.decode("differs", spec_of(other), [20], capacity=30, source="prefill")
        with pytest.raises(FingerprintMismatch) as caught:
            transfer.wait_ready(timeout_s=WAIT_S)
        transfer.release()
    assert "kv_heads" in str(caught.value.fields) + caught.value.message
    # The refused side does not end the other: a matching one is served.
    with (
        daemons[1].client("decode") as client,
        client.decode("differs", spec_of(mine), [20], capacity=30, source="prefill") as transfer,
    ):
        transfer.wait_ready(timeout_s=WAIT_S)
    source.join(WAIT_S)
    assert source.error is None
