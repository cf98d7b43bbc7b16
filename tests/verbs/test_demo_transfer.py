"""The demo's transfer with a tiny random model: a prefill process and a decode process, each with its own daemon and
RDMA device, and the tokens of one process. Importing torch takes minutes on an emulated CPU, so the model is NumPy's
and the client library is what inference processes use."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.daemons import DaemonProcess
from tests.verbs.devices import needs_devices
from tests.verbs.tiny_model import DENSE_LAYERS, DIM, KV_HEADS, SPEC, Floats, TinyModel

pytestmark = [needs_devices, pytest.mark.timeout(180)]

WAIT_S = 90.0
PROMPT = np.random.default_rng(7).integers(0, 211, 256).tolist()
COUNT = 8
SELECTED = 40


def in_one_process(mode: str) -> list[int]:
    """The tokens without any transfer."""
    model, out, cache = TinyModel(), [], []
    for _, k, v in model.prefill(PROMPT, out):
        cache.append((k, v))

    def prompt(layer: int, queries: Floats) -> tuple[Floats, Floats]:
        k, v = cache[layer]
        if mode == "full" or layer < DENSE_LAYERS:
            return k, v
        index = model.select(queries, len(PROMPT), SELECTED)[..., None]
        return np.take_along_axis(k, index, axis=1), np.take_along_axis(v, index, axis=1)

    return model.decode(len(PROMPT), out[0], COUNT, prompt)


class PrefillProcess:
    """A process of its own: computes layer by layer, hands each over, tells the first token, and stays until it is
    told to go."""

    def __init__(self, daemon: DaemonProcess, request: str, mode: str) -> None:
        (self._told, tell), (go, self._go) = os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(tell)
            os.close(go)
            return
        code = 1
        try:
            os.close(self._go)
            model, out = TinyModel(), []
            with daemon.client("prefill") as client, client.prefill(request, SPEC, [len(PROMPT)]) as transfer:
                layers = model.prefill(PROMPT, out)
                # What a selective mode pushes depends on how long prefill takes: a fast one leaves most to be fetched.
                for layer, k, v in layers if mode == "full" else list(layers):
                    transfer.put_layer(layer, k=k[None], v=v[None])
                os.write(tell, out[0].to_bytes(2))
                transfer.finish(wait=False)
                os.read(go, 1)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def first_token(self) -> int:
        return int.from_bytes(os.read(self._told, 2))

    def end(self) -> int:
        """Its exit code."""
        os.close(self._go)
        os.close(self._told)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


@pytest.fixture
def prefill_process(daemons: tuple[DaemonProcess, DaemonProcess], mode: str) -> Iterator[PrefillProcess]:
    process = PrefillProcess(daemons[0], f"tiny-{mode}", mode)
    yield process
    assert process.end() == 0


@pytest.mark.parametrize("mode", ["full", "speculative"])
def test_tokens_are_those_of_one_process(
    daemons: tuple[DaemonProcess, DaemonProcess], mode: str, prefill_process: PrefillProcess
) -> None:
    model = TinyModel()
    options: dict[str, Any] = {} if mode == "full" else {"mode": mode, "landing_entries": SELECTED}
    with (
        daemons[1].client("decode") as client,
        client.decode(f"tiny-{mode}", SPEC, [len(PROMPT)], source="prefill", **options) as transfer,
    ):

        def prompt(layer: int, queries: Floats) -> tuple[Floats, Floats]:
            if mode == "full" or layer < DENSE_LAYERS:
                transfer.wait_ready(layer, timeout_s=WAIT_S)
                k, v = (half(layer, np.float32)[0].swapaxes(0, 1) for half in (transfer.k, transfer.v))
                return k[:, : len(PROMPT)], v[:, : len(PROMPT)]
            index = model.select(queries, len(PROMPT), SELECTED)
            order = np.zeros_like(index)
            entries = transfer.select(layer, index, order=order, timeout_s=WAIT_S)
            in_order = np.take_along_axis(entries, np.argsort(order, axis=1)[..., None], axis=1)
            values = in_order.view(np.float32).reshape(KV_HEADS, SELECTED, 2, DIM)
            return values[:, :, 0], values[:, :, 1]

        tokens = model.decode(len(PROMPT), prefill_process.first_token(), COUNT, prompt)
        if mode != "full":
            assert transfer.selection_counters().fetched.sum() > 0
        fabrics = {peer.node: peer.fabric for peer in client.status().peers}
    assert tokens == in_one_process(mode)
    assert len(set(tokens)) > COUNT // 2, "a model that says the same all the time shows nothing"
    assert fabrics["prefill"] == "verbs"
    for daemon in daemons:
        assert "torch" not in Path(f"/proc/{daemon.pid}/maps").read_text()
