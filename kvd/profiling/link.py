"""What the link between two nodes carries, measured with ordinary transfers: the input of T_t (SmartGen, section 4.1).

A process beside the source's daemon serves (:func:`serve`), one beside the sink's measures (:func:`measure`), both with
nothing but the client library. The sink asks first, by a tiny transfer in the other direction. For each round the
source then opens three transfers, and the sink takes them in the reverse order: a *gate*, which tells that the others
are open; a *small* one, whose time is the latency; a *bulk* one, whose rate is taken from the arrival of layer 0 to
that of the last layer, so that neither the meeting of the two sides nor the making of memory is part of it. One more
transfer, of nothing until the end, tells the source that the sink's process is still *here*.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
import numpy as np

from kvd.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidArgument,
    PeerLost,
    PeerRestarted,
    ProcessLost,
    RendezvousTimeout,
)
from kvd.profiling.timing import Times
from kvd.reading import read_bounded
from kvd_client import Client, DecodeTransfer, KVSpec, PrefillTransfer
from kvd_client.spec import MASK_REMOTE

REQUEST = "kvd-profile-link"
"""Request id of the question, where the user does not choose one."""

MAX_MIB, MAX_ROUNDS = 4096, 100
FORMAT, VERSION = "kvd-link", 1

PATIENCE_S = 60.0
"""Longest time from one transfer of a round to the next."""
SECONDS_A_MIB = 1.0
"""Links slower than that are given up."""
_LOOK_S = 0.2
"""How often a source that waits looks whether the sink's process is still there."""

_SMALL = KVSpec(layers=1, kv_heads=1, entry_bytes=256, dtype="bytes", model="kvd-link")
_BULK = KVSpec(layers=16, kv_heads=1, entry_bytes=1 << 16, dtype="bytes", model="kvd-link")  # 1 MiB a token

Say = Callable[[str], None]


class Round(msgspec.Struct, frozen=True):
    """One measurement."""

    bytes: int
    """Bulk bytes that arrived within :attr:`seconds`."""
    seconds: float
    latency_s: float
    """From opening the small transfer to its last byte."""

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What a link carries, from ``source`` to ``sink``."""

    source: str
    sink: str
    mib: int
    rounds: tuple[Round, ...]

    @property
    def rate(self) -> int:
        """Median, in bytes a second."""
        return round(median(one.rate for one in self.rounds))

    @property
    def latency_s(self) -> float:
        """Median."""
        return median(one.latency_s for one in self.rounds)

    def fields(self) -> dict[str, Any]:
        """Plain values, as :func:`read` takes them from a JSON file."""
        rates = [round(one.rate) for one in self.rounds]
        latencies = [one.latency_s for one in self.rounds]
        return {
            "format": FORMAT,
            "version": VERSION,
            "source": self.source,
            "sink": self.sink,
            "mib": self.mib,
            "bytes_per_s": {"median": self.rate, "min": min(rates), "max": max(rates)},
            "latency_s": {"median": self.latency_s, "min": min(latencies), "max": max(latencies)},
            "rounds": [msgspec.to_builtins(one) for one in self.rounds],
        }


class _Median(msgspec.Struct):
    median: Annotated[float, msgspec.Meta(ge=0)]


class _File(msgspec.Struct):
    """Of a result's JSON, what :func:`read` needs."""

    format: str
    version: int
    bytes_per_s: _Median
    latency_s: _Median


class _Ask(msgspec.Struct, forbid_unknown_fields=True):
    """The question: JSON in the one entry of the transfer, with zeros behind it."""

    run: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    mib: Annotated[int, msgspec.Meta(ge=1, le=MAX_MIB)]
    rounds: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROUNDS)]


def read(path: str | os.PathLike[str]) -> tuple[int, float]:
    """Rate (bytes a second) and latency (seconds) of a result that was written as JSON.

    Raises :class:`InvalidArgument` for a file that can't be read, or holds something else.
    """
    name = os.fspath(path)
    try:
        found = msgspec.json.decode(read_bounded(path), type=_File)
    except OSError as error:
        raise InvalidArgument(f"{name!r} can't be read: {error.strerror}", file=name) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidArgument(f"{name!r} is no result of kvd profile link: {error}", file=name) from None
    rate = round(found.bytes_per_s.median)
    if found.format != FORMAT or found.version != VERSION or not rate:
        raise InvalidArgument(
            f"{name!r} is {found.format} {found.version} with {rate} bytes a second; measure with kvd profile link -o",
            file=name,
        )
    return rate, found.latency_s.median


def transfer_times(rate: int, latency_s: float, lengths: Sequence[int], token_bytes: int) -> Times:
    """T_t by prompt length: the whole KV cache, ``token_bytes`` a token over all layers and heads."""
    if rate < 1 or not latency_s >= 0:
        raise InvalidArgument(f"a link of {rate} bytes a second and {latency_s} s latency has no T_t", rate=rate)
    return Times(tuple(lengths), tuple(latency_s + tokens * token_bytes / rate for tokens in lengths))


def geometry(folder: Path) -> tuple[int, int, int]:
    """``(layers, KV heads, entry bytes)`` of a Hugging Face model, from its config.json and in the dtype that this
    names; raises :class:`InvalidArgument` where it does not say."""
    path = folder / "config.json"
    try:
        config: Any = json.loads(path.read_bytes())
        config = config.get("text_config", config)
        heads = config["num_attention_heads"]
        dim = config.get("head_dim") or config["hidden_size"] // heads
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        found = (config["num_hidden_layers"], config.get("num_key_value_heads") or heads, 2 * dim * _ITEM[dtype])
    except OSError as error:
        raise InvalidArgument(f"{str(path)!r} can't be read: {error.strerror}", file=str(path)) from None
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise InvalidArgument(
            f"{str(path)!r} does not describe a KV cache ({type(error).__name__}: {error}); give --layers, --heads and "
            "--entry-bytes",
            file=str(path),
        ) from None
    if not all(isinstance(number, int) and number > 0 for number in found):
        raise InvalidArgument(f"{str(path)!r} describes a KV cache of {found}; those must be positive", file=str(path))
    return found


_ITEM = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


# --- at the source --------------------------------------------------------------------------------------------------


def serve(client: Client, request: str = REQUEST, *, measurements: int | None = None, say: Say) -> None:
    """Answer measurements, one after the other; after ``measurements`` of them return, by default never.

    A measurement that breaks off on the sink's side is said and counted. Raises what this node's daemon refuses.
    """
    left = measurements
    while left is None or left > 0:
        ask = _next_ask(client, request, say)
        if ask is None:
            continue
        say(f"{ask.rounds} round{'s' * (ask.rounds != 1)} of {ask.mib} MiB asked for")
        try:
            with client.decode(f"{ask.run}.here", _SMALL, [1], mode="full", deadline_s=_whole_s(ask)) as here:
                for number in range(ask.rounds):
                    _offer(client, f"{ask.run}.{number}", ask.mib, here)
        except (*_GONE, RendezvousTimeout, DeadlineExceeded) as error:
            say(f"broken off: {error.message}")
        else:
            say("done")
        left = None if left is None else left - 1


_GONE = (Aborted, PeerLost, PeerRestarted, ProcessLost)
"""The other side has left, which is its good right."""


def _next_ask(client: Client, request: str, say: Say) -> _Ask | None:
    """Wait for a question; None when none has come for as long as the daemon waits."""
    try:
        with client.decode(request, _SMALL, [1], mode="full") as transfer:
            transfer.wait_ready()
            data = transfer.layer(0)[0, 0, 0].tobytes()
    except (RendezvousTimeout, DeadlineExceeded):
        return None
    except _GONE as error:
        say(f"broken off: {error.message}")
        return None
    try:
        return msgspec.json.decode(data.rstrip(b"\0"), type=_Ask)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        say(f"a question that is none was dropped: {error}")
        return None


def _offer(client: Client, name: str, mib: int, here: DecodeTransfer) -> None:
    with contextlib.ExitStack() as stack:
        offered = []
        for kind, spec, tokens in (("bulk", _BULK, mib), ("small", _SMALL, 1), ("gate", _SMALL, 1)):
            transfer = stack.enter_context(
                client.prefill(f"{name}.{kind}", spec, [tokens], mode="full", deadline_s=_deadline_s(mib))
            )
            for layer in range(spec.layers):
                transfer.layer(layer)[...] = 0xA5  # pages that were never written might be sent faster
                transfer.layer_ready(layer)
            offered.append(transfer)
        for transfer in reversed(offered):  # in the order of the sink: the gate is delivered first
            transfer.finish(wait=False)
            _wait_delivered(transfer, here)


def _wait_delivered(transfer: PrefillTransfer, here: DecodeTransfer) -> None:
    """Wait for a delivery, and no longer than the sink's process is ``here``: it may leave between two transfers."""
    while True:
        try:
            transfer.wait_delivered(_LOOK_S)
            return
        except DeadlineExceeded as error:
            if "timeout_s" not in error.fields:  # the transfer's own
                raise
        with contextlib.suppress(RendezvousTimeout, DeadlineExceeded):  # which say nothing of the process
            here.poll_ready(0)


def _deadline_s(mib: int) -> float:
    return PATIENCE_S + SECONDS_A_MIB * mib


def _whole_s(ask: _Ask) -> float:
    return ask.rounds * _deadline_s(ask.mib)


# --- at the sink ----------------------------------------------------------------------------------------------------


def measure(
    client: Client,
    source: str,
    request: str = REQUEST,
    *,
    mib: int = 64,
    rounds: int = 5,
    wait_s: float = 10.0,
    on_round: Callable[[Round], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Link:
    """Measure the link from a node whose :func:`serve` has the same ``request``.

    Raises :class:`RendezvousTimeout` where nobody there has answered for ``wait_s`` seconds, :class:`InvalidArgument`
    for sizes out of range, and what ended a transfer.
    """
    if not (1 <= mib <= MAX_MIB and 1 <= rounds <= MAX_ROUNDS):
        raise InvalidArgument(
            f"{rounds} rounds of {mib} MiB can't be measured; give 1 to {MAX_ROUNDS} rounds of 1 to {MAX_MIB} MiB",
            rounds=rounds,
            mib=mib,
        )
    ask = _Ask(run=f"kvd-link-{secrets.token_hex(8)}", mib=mib, rounds=rounds)
    _put_ask(client, source, request, ask, wait_s)
    found = []
    # Open for as long as this process measures, so that the source knows when it leaves.
    with client.prefill(f"{ask.run}.here", _SMALL, [1], sink=source, mode="full", deadline_s=_whole_s(ask)) as here:
        for number in range(rounds):
            found.append(_take_round(client, source, f"{ask.run}.{number}", mib, clock))
            if on_round is not None:
                on_round(found[-1])
        here.layer_ready(0)
    return Link(source=source, sink=client.status().node, mib=mib, rounds=tuple(found))


def _put_ask(client: Client, source: str, request: str, ask: _Ask, wait_s: float) -> None:
    data = msgspec.json.encode(ask)
    entry = np.zeros((1, 1, 1, _SMALL.entry_bytes), np.uint8)
    entry[0, 0, 0, : len(data)] = np.frombuffer(data, np.uint8)
    try:
        with client.prefill(request, _SMALL, [1], sink=source, mode="full", deadline_s=wait_s) as transfer:
            transfer.put_layer(0, entry)
    except (RendezvousTimeout, DeadlineExceeded):
        raise RendezvousTimeout(
            f"nobody answers as {request!r} on node {source!r} for {wait_s:g} s; start there: kvd profile link --serve"
            + ("" if request == REQUEST else f" --request {request}"),
            request=request,
            peer=source,
        ) from None


def _take_round(client: Client, source: str, name: str, mib: int, clock: Callable[[], float]) -> Round:
    _take_small(client, source, f"{name}.gate")
    since = clock()
    _take_small(client, source, f"{name}.small")
    latency_s = clock() - since
    with client.decode(
        f"{name}.bulk", _BULK, [mib], source=source, mode="full", deadline_s=_deadline_s(mib)
    ) as transfer:
        opened = clock()
        transfer.wait_ready(0)
        since = clock()
        layers = range(_BULK.layers)
        remote = sum(int(np.count_nonzero(transfer.mask(layer) == MASK_REMOTE)) for layer in layers)
        transfer.wait_ready()
        until = clock()
    if not remote:  # all came at once
        remote, since = mib * _BULK.layers, opened
    if until <= since:
        raise InvalidArgument(f"the clock says that {mib} MiB took no time; measure more at once", mib=mib)
    return Round(remote * _BULK.entry_bytes, until - since, latency_s)


def _take_small(client: Client, source: str, request: str) -> None:
    with client.decode(request, _SMALL, [1], source=source, mode="full", deadline_s=PATIENCE_S) as transfer:
        transfer.wait_ready()
