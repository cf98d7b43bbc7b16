"""The probe of a path, step by step, on a device of this file's own. Needs pyverbs, but no device."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("pyverbs.device", reason="no pyverbs here: python -m tests.verbs.build links Debian's")

if "KVD_VERBS_GUEST" in os.environ:
    pytest.skip("needs no device, and an emulated CPU is slow", allow_module_level=True)

from kvd.fabric.verbs import binding as ib
from kvd.fabric.verbs import probe as probe_module
from kvd.fabric.verbs.path import Finding, Trouble
from kvd.fabric.verbs.probe import SMALL_BYTES, Probe
from kvd.types import Lane

RETRIES_EXCEEDED = 12
PACKET = 4096


class Registration:
    lkey, rkey = 1, 2
    closed = 0

    def close(self) -> None:
        self.closed += 1


class Device:
    def __init__(self) -> None:
        self.registration = Registration()

    def register(self, *_: Any, **__: Any) -> Registration:
        return self.registration


Answer = Callable[[Lane, ib.Item], int | None]
"""The status of a request, or None if it gets no answer."""


def find(answer: Answer, *, late: bool = False) -> tuple[Finding, list[tuple[Lane, int, int]]]:
    """What a probe into its own memory finds, and what it posted: lane, opcode, length. ``late``: completions are seen
    only when the probe asks for them."""
    posted: list[tuple[Lane, int, int]] = []
    waiting: list[tuple[Lane, int]] = []

    async def body() -> Finding:
        loop = asyncio.get_running_loop()

        def post(lane: Lane, item: ib.Item) -> None:
            opcode, _, local, nbytes, lkey, remote, rkey = item
            assert (lkey, rkey) == (1, 2)
            posted.append((lane, opcode, nbytes))
            if (status := answer(lane, item)) is None:
                return
            if status == ib.SUCCESS:
                ctypes.memmove(*((remote, local) if opcode == ib.WRITE else (local, remote)), nbytes)
            waiting.append((lane, status))
            if not late:
                loop.call_soon(complete)

        def complete() -> None:
            while waiting:
                probe.completed(*waiting.pop(0))

        device: Any = Device()
        probe = Probe(device, post)
        found = await probe.run(probe.offer, PACKET, complete)
        assert probe.passed == (not found.trouble)
        probe.close()
        probe.close()
        assert device.registration.closed == 1
        return found

    return asyncio.run(body()), posted


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "PATIENCE_S", 0.05)


def test_a_good_path_is_tried_small_and_whole_both_ways_on_both_lanes() -> None:
    found, posted = find(lambda lane, item: ib.SUCCESS)
    assert found == Finding()
    for lane in Lane:
        mine = [entry[1:] for entry in posted if entry[0] is lane]
        assert mine == [(ib.WRITE, SMALL_BYTES), (ib.WRITE, PACKET), (ib.READ, PACKET)]


def test_completions_that_are_there_count_though_the_timer_was_first() -> None:
    """As after a stop of the whole process."""
    assert find(lambda lane, item: ib.SUCCESS, late=True)[0] == Finding()


@pytest.mark.parametrize("status", [None, RETRIES_EXCEEDED])
@pytest.mark.parametrize("lanes", [[Lane.URGENT], [Lane.BULK], [*Lane]])
def test_a_path_without_answers_is_silent(lanes: list[Lane], status: int | None) -> None:
    found, posted = find(lambda lane, item: status if lane in lanes else ib.SUCCESS)
    assert found.trouble is Trouble.SILENT
    assert ("IBV_WC_RETRY_EXC_ERR" in found.reason) if status else ("nothing came back within" in found.reason)
    assert all(nbytes == SMALL_BYTES for lane, _, nbytes in posted if lane in lanes)


@pytest.mark.parametrize("status", [None, RETRIES_EXCEEDED])
@pytest.mark.parametrize("opcode", [ib.WRITE, ib.READ])
def test_a_path_that_drops_whole_packets_in_either_direction_is_short(opcode: int, status: int | None) -> None:
    found, _ = find(lambda lane, item: status if item[0] == opcode and item[3] == PACKET else ib.SUCCESS)
    assert found.trouble is Trouble.SHORT


def test_a_device_that_refuses_is_named_so() -> None:
    found, _ = find(lambda lane, item: ib.REMOTE_ACCESS if item[0] == ib.READ else ib.SUCCESS)
    assert found.trouble is Trouble.REFUSED
    assert "IBV_WC_REM_ACCESS_ERR" in found.reason


def test_changed_bytes_are_noticed() -> None:
    def change(lane: Lane, item: ib.Item) -> int:
        if item[0] == ib.READ and lane is Lane.BULK:
            byte = ctypes.c_uint8.from_address(item[5] + PACKET - 1)
            byte.value ^= 1
        return ib.SUCCESS

    assert find(change)[0].trouble is Trouble.DAMAGED


def test_an_endpoint_that_ends_ends_the_probe() -> None:
    async def body() -> None:
        device: Any = Device()

        def broken(lane: Lane, item: ib.Item) -> None:
            probe.abort("the device takes no work request")
            probe.close()

        probe = Probe(device, broken)
        found = await probe.run(probe.offer, PACKET, lambda: None)
        assert (found.trouble, found.reason) == (Trouble.SILENT, "the device takes no work request")
        assert not probe.passed

    asyncio.run(body())
