"""The source's side of a transfer: layers are put in place and rung."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd_client.arguments import deadline_of, whole
from kvd_client.arrays import Bytes, floats_of, items_of
from kvd_client.connection import Connection
from kvd_client.errors import DeadlineExceeded, InvalidArgument, KvdError
from kvd_client.exchange import error_of
from kvd_client.parts import Part, raise_if_failed, released_error
from kvd_client.protocol import RANK_WEIGHT, Failure, Finish, RankBlocks
from kvd_client.ring import ALL_ROWS, EVENT_LAYER_READY, EVENT_METADATA_READY, SLOT_DELIVERED
from kvd_client.spec import PartLayout
from kvd_client.transfer import Transfer


class PrefillTransfer(Transfer):
    """A transfer at its source: put each layer's entries in place, ring, and :meth:`finish`.

    As a context manager it finishes and releases at the end of the block, and aborts if the block raises.
    """

    def __init__(self, connection: Connection, part: Part, layout: PartLayout, lengths: Sequence[int]) -> None:
        super().__init__(connection, part, layout, lengths)
        self._rankings: set[int] = set()
        """Requests that nobody waits for, and whose answers have not been looked at."""
        self._wanted = True
        """Whether rankings are of use, as far as the daemon has said."""

    def put_layer(
        self,
        layer: int,
        entries: Any = None,
        *,
        k: Any = None,
        v: Any = None,
        row: int | None = None,
        start: int = 0,
    ) -> None:
        """Copy tokens ``start`` and following of a layer into the lease, and tell the daemon that they are there.

        Either ``k`` and ``v``, each (rows, heads, tokens, dim) of a dtype whose ``dim`` values fill half an entry
        (K first); or ``entries``, (rows, tokens, heads, entry_bytes) of bytes. NumPy arrays and torch tensors, on
        any device, of any dtype. With ``row`` the arrays are one sequence's, without the first axis or with 1 there.
        Rows are padded on the right: tokens beyond a row's length are neither copied nor sent.

        Raises :class:`InvalidArgument` for a shape that does not fit, before anything is copied.
        """
        layer, start = self._check(layer), whole("start", start)
        p = self.layout
        if row is not None:
            row = self._check_row(row)
        rows, heads = p.sequences if row is None else 1, p.kv_heads
        if start < 0:
            raise InvalidArgument(f"start is {start}; it must not be negative", start=start)
        # Opaque items of half an entry, or a whole one, copy faster than bytes do, and need no common dtype.
        if entries is not None and k is None and v is None:
            sources = [items_of(entries, "entries", row, p.entry_bytes)]
        elif entries is None and k is not None and v is not None:
            if p.entry_bytes % 2:
                raise InvalidArgument(f"entries of {p.entry_bytes} bytes have no K and V of equal size; give entries")
            half = p.entry_bytes // 2
            sources = [items_of(x, name, row, half).transpose(0, 2, 1) for name, x in (("k", k), ("v", v))]
        else:
            raise InvalidArgument("put_layer needs either entries, or both k and v")
        tokens = sources[0].shape[1]
        for source in sources:
            if source.shape != (rows, tokens, heads):
                raise InvalidArgument(
                    f"put_layer got (rows, tokens, heads) = {source.shape} where ({rows}, {tokens}, {heads}) is needed",
                    layer=layer,
                    got=list(source.shape),
                )
        target = self._layer(layer).view(sources[0].dtype)
        for i, source in enumerate(sources):
            self._copy(target[..., i], source, row, start, tokens)
        if p.placed:
            self._put_placed(layer, target.view(np.uint8), row, start, tokens)
        self._ring(layer, start, min(start + tokens, self._longest), row)

    def _put_placed(self, layer: int, layer_bytes: Bytes, row: int | None, start: int, tokens: int) -> None:
        """Put a chunk of a layer, token-major, into the tensors on the device."""
        p = self.layout
        for r in range(p.rows) if row is None else (row,):
            token = np.arange(start, min(start + tokens, self.lengths[r]), dtype=np.int64)
            entries = ((r * p.capacity + token)[:, None] * p.heads + np.arange(p.heads)).ravel()
            values = layer_bytes.reshape(-1, p.entry_bytes)[entries]
            self.tensors.scatter(layer, entries, values)

    def _copy(
        self, target: npt.NDArray[Any], source: npt.NDArray[Any], row: int | None, start: int, tokens: int
    ) -> None:
        if row is None and self._equal:
            stop = min(start + tokens, self._longest)
            if stop > start:
                target[:, start:stop] = source[:, : stop - start]
            return
        for i, r in enumerate(range(self.layout.sequences) if row is None else (row,)):
            stop = min(start + tokens, self.lengths[r])
            if stop > start:
                target[r, start:stop] = source[i, : stop - start]

    def layer_ready(self, layer: int, start: int = 0, stop: int | None = None, row: int | None = None) -> None:
        """Tell the daemon that tokens ``[start, stop)`` of a layer are in place, in ``row`` or in every row.

        ``stop`` defaults to the end; ranges are clipped to each row's length. Only needed where the bytes were
        written through :meth:`layer`. Raises :class:`Busy` if the daemon takes no events for the client's timeout.
        """
        layer, start = self._check(layer), whole("start", start)
        if row is not None:
            row = self._check_row(row)
        stop = None if stop is None else whole("stop", stop)
        last = self._longest if stop is None else min(stop, self._longest)
        if start < 0 or (stop is not None and stop < start):
            raise InvalidArgument(
                f"tokens [{start}, {stop}) are no range; give 0 <= start <= stop", start=start, stop=stop
            )
        self._ring(layer, start, last, row)

    def _ring(self, layer: int, start: int, stop: int, row: int | None) -> None:
        if row is not None:
            stop = min(stop, self.lengths[row])
        if stop > start:
            self._connection.ring(self._part, EVENT_LAYER_READY, layer, ALL_ROWS if row is None else row, start, stop)

    def metadata_ready(self, layer: int) -> None:
        """Tell the daemon that the metadata arrays of a layer are complete; they travel ahead of its entries. Raises
        :class:`InvalidArgument` for a transfer that was opened without any, :class:`Busy` as :meth:`layer_ready`."""
        layer = self._check(layer)
        if not self.layout.metadata:
            raise InvalidArgument(f"transfer {self.id} was opened without metadata; name the arrays then", layer=layer)
        self._connection.ring(self._part, EVENT_METADATA_READY, layer, ALL_ROWS, 0, 0)

    def rank(self, layer: int, shares: Any, *, weight: float = RANK_WEIGHT, wait: bool = True) -> bool:
        """Say what the prompt's last queries would select of a layer, which sorts what is unsent of it.

        ``shares``: (rows, blocks), for any number of blocks of equal size (relative positions, as profiles have them)
        the share of what could have been selected there, 0 to 1. ``weight`` is what that counts against the profile.
        Changes the order only; the profile's holds until then. False where the transfer's mode has no order to change,
        so that further rankings are of no use. ``shares`` may also be (rows * heads, blocks), each head's own: with a
        mask by head they sort each head's entries, else their mean counts.

        Raises :class:`InvalidArgument` for a layer or numbers that make no sense.
        """
        layer = self._check(layer)
        array = floats_of(shares)
        rows, heads = self.layout.sequences, self.layout.kv_heads
        if array.ndim != 2 or len(array) not in (rows, rows * heads):
            raise InvalidArgument(
                f"a ranking has shape (rows, blocks), here ({rows}, blocks), or ({rows * heads}, blocks) by head, not "
                f"{array.shape}",
                layer=layer,
            )
        if len(array) > self.layout.rows:
            array = array.reshape(rows, heads, array.shape[1]).mean(axis=1)
        elif len(array) < self.layout.rows:
            array = array.repeat(heads, axis=0)
        message = RankBlocks(
            transfer=self.id, layer=layer, blocks=array.shape[1], shares=array.tobytes(), weight=weight
        )
        if wait:
            reply, _ = self._connection.request(message)
            return bool(getattr(reply, "wanted", False))
        self._rankings.add(self._connection.submit(message))
        return self._still_wanted()

    def _still_wanted(self) -> bool:
        """What the daemon has answered to rankings that nobody waited for."""
        self._connection.look()
        for number in sorted(self._rankings):
            reply = self._connection.answer(number)
            if reply is None:
                break  # the daemon answers them in order
            self._forget({number})
            if isinstance(reply, Failure):
                raise error_of(reply)
            self._wanted = bool(getattr(reply, "wanted", False))
        return self._wanted

    def _forget(self, rankings: set[int]) -> None:
        for number in rankings:
            self._connection.forget(number)
            self._rankings.discard(number)

    def release(self) -> None:
        self._forget(set(self._rankings))
        super().release()

    def finish(self, wait: bool = True, timeout_s: float | None = None) -> None:
        """Say that every token of every layer has been rung, and wait until all is delivered.

        Raises the error with which the transfer failed; :class:`InvalidArgument` if something has not been rung;
        :class:`DeadlineExceeded` after ``timeout_s`` seconds, with the transfer going on.
        """
        try:
            if self._delivered():
                return  # whether or not the daemon still lives
            self._check(0)
            self._connection.request(Finish(transfer=self._part.transfer))
            if wait:
                self.wait_delivered(timeout_s)
        except KvdError:
            self._told = True
            raise

    def poll_delivered(self) -> bool:
        """Whether the sink has everything; one system call, and no waiting. Raises as :meth:`finish`."""
        if self._delivered():
            return True
        self.check()
        return False

    def wait_delivered(self, timeout_s: float | None = None) -> None:
        """Wait until the sink has everything; raises as :meth:`finish`."""
        connection, part = self._connection, self._part

        def delivered() -> bool | None:
            if part.released:
                raise released_error(part)
            raise_if_failed(part)
            return self._delivered() or None

        self._connection.check()
        if not connection.wait(delivered, deadline_of(timeout_s)):
            raise DeadlineExceeded(
                f"transfer {part.transfer} was not delivered within {timeout_s:g} s; it goes on, wait again or abort",
                transfer=part.transfer,
                timeout_s=timeout_s,
            )

    def _delivered(self) -> bool:
        part = self._part
        if part.released:
            return False
        ended = part.ended is not None and part.ended.code == "OK"
        return ended or self._connection.doorbell.state(part.slot) == SLOT_DELIVERED

    def _leave(self) -> None:
        # Whoever has caught the error of a finish, or has aborted, need not hear of it again at the end of the block.
        if not self._told:
            self.finish()
