"""One rank of an engine as its node's daemon sees it: what its KV cache is, and how its transfers are opened."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvd_client import parallel
from kvd_client.client import Client
from kvd_client.decode import DecodeTransfer
from kvd_client.engines._vllm_plan import Load, Options, Rejection, Save
from kvd_client.errors import Busy, DaemonUnreachable, KvdError
from kvd_client.prefill import PrefillTransfer
from kvd_client.spec import KVSpec

T = TypeVar("T")

AnyPrefill = PrefillTransfer | parallel.ParallelPrefill
AnyDecode = DecodeTransfer | parallel.ParallelDecode

REST_S = 5.0
"""A daemon that did not answer in time is left alone for so long: other requests should not wait for it, too."""


class Node:
    """Opens transfers; any thread may."""

    def __init__(self, client: Client, spec: KVSpec, options: Options, rank: int = 0, ranks: int = 1) -> None:
        self._client, self._spec, self._options = client, spec, options
        self._rank, self._ranks, self._peer_ranks = rank, ranks, options.peer_ranks or ranks
        self._rest_until = float("-inf")

    def source(self, save: Save, units: int) -> AnyPrefill:
        """Raises as :meth:`Client.prefill`."""
        spec = self._of(save.prompt)
        if self._alone:
            return self._do(
                lambda: self._client.prefill(
                    save.transfer, spec, [units], sink=save.sink, mode="full", deadline_s=self._options.deadline_s
                )
            )
        return self._do(
            lambda: parallel.prefill(
                self._client, save.transfer, spec, [units], rank=self._rank, ranks=self._ranks,
                peer_ranks=self._peer_ranks, sink=save.sink, deadline_s=self._options.deadline_s,
            )
        )  # fmt: skip

    def sink(self, load: Load, units: int, held: int) -> AnyDecode:
        """Raises as :meth:`Client.decode`. ``held`` units at the begin are marked as being there."""
        spec, ranges = self._of(load.prompt), [(0, 0, held)] if held else []
        if self._alone:
            transfer: AnyDecode = self._do(
                lambda: self._client.decode(
                    load.transfer, spec, [units], source=load.source, handle=load.handle, held=ranges, mode="full",
                    deadline_s=self._options.deadline_s,
                )
            )  # fmt: skip
        else:
            transfer = self._do(
                lambda: parallel.decode(
                    self._client, load.transfer, spec, [units], rank=self._rank, ranks=self._ranks,
                    peer_ranks=self._peer_ranks, source=load.source, held=ranges, deadline_s=self._options.deadline_s,
                )
            )  # fmt: skip
        if held:
            transfer.mark_held(0, 0, held)
        return transfer

    def reject(self, rejection: Rejection) -> None:
        """Raises as :meth:`Client.reject`."""
        named = {"handle": rejection.handle} if rejection.handle else {
            "request": rejection.transfer, "source": rejection.source,
        }  # fmt: skip
        self._do(lambda: self._client.reject(reason=rejection.reason, **named))

    def close(self) -> None:
        self._client.close()

    @property
    def _alone(self) -> bool:
        """One rank at both ends: transfers write into the lease itself, and have handles."""
        return self._ranks == self._peer_ranks == 1

    def _of(self, prompt: str) -> KVSpec:
        # Both ends compare specs before a byte is sent: so a prompt is never served with another one's cache.
        return msgspec.structs.replace(self._spec, revision=f"{self._spec.revision} prompt {prompt}")

    def _do(self, do: Callable[[], T]) -> T:
        now = time.monotonic()
        if now < self._rest_until:
            raise Busy(
                f"the daemon at {self._client.socket_path} has not answered lately; it is asked again in "
                f"{self._rest_until - now:.1f} s",
                socket=self._client.socket_path,
                retry_after_s=round(self._rest_until - now, 3),
            )
        try:
            return do()
        except DaemonUnreachable as error:
            if "timeout_s" in error.fields:
                self._rest_until = time.monotonic() + REST_S
            raise


def parts_of(transfer: AnyPrefill | AnyDecode) -> tuple[PrefillTransfer | DecodeTransfer, ...]:
    """The transfers of one, or of several."""
    return transfer.parts if isinstance(transfer, parallel.Parallel) else (transfer,)


def give_back(transfer: AnyPrefill | AnyDecode | None, reason: str = "") -> None:
    """Release a transfer, and with a reason end it at the other side before. What goes wrong on this way is of no use
    to anybody: the failure that led here has been told, and a lost daemon has taken all back."""
    if transfer is None:
        return
    if reason:
        for part in parts_of(transfer):
            with contextlib.suppress(KvdError):
                part.abort(reason)
    with contextlib.suppress(KvdError):
        transfer.release()


def reason_of(error: Exception) -> str:
    """What the other side is told."""
    return f"{type(error).__name__}: {error}"[:200]
