"""vLLM's paged KV cache as rows of entries, and the copies between it and a lease.

vLLM gives each layer as a tensor (blocks, heads, tokens of a block, elements), or without the heads for MLA, whatever
its strides. A *unit*, which is what the transfer calls a token, is one block of one head (whose inside stays as the
attention backend has packed it) or, where asked for, one token.

Device tensors are gathered on the device, copied to pinned memory on a stream of their own, and from there into the
lease; host tensors go straight into it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvd_client.arrays import Bytes
from kvd_client.errors import UnsupportedLayout

LARGE = 64 << 10
"""Bytes of a block from which it is copied by itself: index_copy_ has a loop for elements, which a memcpy beats."""


class PagedCache:
    """The caches of one rank, by layer. Raises :class:`UnsupportedLayout` for what is none of the forms above.

    ``block_tokens`` are the tokens of the scheduler's blocks; a kernel may cut them into smaller ones.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], block_tokens: int, unit: str) -> None:
        self.index: dict[str, int] = {}
        """The layer of each name; layers that share one tensor are one layer."""
        self.layers: list[torch.Tensor] = []
        seen: dict[tuple[Any, ...], int] = {}
        for name, cache in sorted(caches.items(), key=lambda one: _numbers(one[0])):
            if not isinstance(cache, torch.Tensor) or cache.ndim not in (3, 4):
                shape = tuple(cache.shape) if isinstance(cache, torch.Tensor) else type(cache).__name__
                raise UnsupportedLayout(
                    f"{name} has a KV cache of {shape}; KvdConnector takes (blocks, heads, tokens, elements); use an "
                    "attention backend with that shape, and no state-space layers",
                    layer=name,
                )
            tensor = cache if cache.ndim == 4 else cache.unsqueeze(1)
            place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
            if place not in seen:
                seen[place] = len(self.layers)
                self.layers.append(tensor)
            self.index[name] = seen[place]
        forms = {(t.shape[1:], t.dtype, t.device) for t in self.layers}
        if len(forms) != 1:
            raise UnsupportedLayout(
                f"the layers' KV caches have {len(forms)} different forms; a transfer has one",
                forms=sorted(str(tuple(shape)) for shape, _, _ in forms),
            )
        first = self.layers[0]
        self.heads, self._inner, elements = (int(n) for n in first.shape[1:])
        if block_tokens % self._inner:
            raise UnsupportedLayout(
                f"blocks of {block_tokens} tokens can't consist of the kernel's, of {self._inner}",
                block_tokens=block_tokens,
            )
        self.block_tokens = block_tokens
        self._cuts = block_tokens // self._inner
        self.unit = unit
        self.unit_tokens = block_tokens if unit == "block" else 1
        self.entry_bytes = elements * first.element_size() * self.unit_tokens
        self.dtype, self.device = first.dtype, first.device
        self._stream = torch.cuda.Stream(first.device) if first.is_cuda else None

    def units(self, tokens: int) -> int:
        """Units that hold ``tokens`` tokens, the last perhaps in part."""
        return -(-tokens // self.unit_tokens)

    def whole_units(self, tokens: int) -> int:
        """Units that are full when ``tokens`` tokens are there."""
        return tokens // self.unit_tokens

    def mark(self) -> Any:
        """The present point of the device's queue; copies given it come behind. None on the host."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    # --- copies ---------------------------------------------------------------------------------------------------

    def gather(self, layer: int, blocks: Sequence[int], start: int, stop: int, out: Bytes) -> Callable[[], None] | None:
        """Copy units ``[start, stop)`` of a request into ``out``, uint8 (units, heads, entry_bytes).

        On the host they are there on return, and the result is None. Else the result waits until they are.
        """
        target = self._typed(out)
        cache = self.layers[layer]
        if self._stream is None:
            self._gather(cache, blocks, start, stop, target)
            return None
        picked = torch.empty_like(target, device=self.device)
        self._gather(cache, blocks, start, stop, picked)  # in the pass's own stream, before the blocks can change
        here = self.mark()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(here)
            staged = torch.empty_like(target, pin_memory=True)
            staged.copy_(picked, non_blocking=True)
            picked.record_stream(self._stream)
            done = torch.cuda.Event()
            done.record(self._stream)

        def wait() -> None:
            done.synchronize()
            target.copy_(staged)

        return wait

    def scatter(self, layer: int, blocks: Sequence[int], start: int, stop: int, entries: Bytes, after: Any) -> None:
        """Copy ``entries``, uint8 (units, heads, entry_bytes), to units ``[start, stop)`` of a request; they are there
        on return. ``after``: what :meth:`mark` gave when the blocks became the request's."""
        source = self._typed(entries)
        cache = self.layers[layer]
        if self._stream is None:
            self._scatter(cache, blocks, start, stop, source)
            return
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            staged = torch.empty_like(source, pin_memory=True)
            staged.copy_(source)
            self._scatter(cache, blocks, start, stop, staged.to(self.device, non_blocking=True))
            self._stream.synchronize()

    def _typed(self, array: Bytes) -> torch.Tensor:
        """(units, heads, entry_bytes) of bytes in the cache's elements: (units, cuts, heads, tokens, elements) for
        blocks, (units, heads, elements) for tokens; no copy."""
        units, heads = array.shape[:2]
        flat = torch.from_numpy(array).view(self.dtype)
        if self.unit == "token":
            return flat
        # A block's cuts lie behind each other inside an entry.
        return flat.view(units, heads, self._cuts, self._inner, -1).transpose(1, 2)

    def _gather(self, cache: torch.Tensor, blocks: Sequence[int], start: int, stop: int, out: torch.Tensor) -> None:
        if self.unit == "token":
            block, at = self._tokens(blocks, start, stop)
            out.copy_(cache[block, :, at])
        elif self._cuts == 1 and out.is_contiguous():
            torch.index_select(cache, 0, self._blocks(blocks, start, stop), out=out[:, 0])
        else:
            picked = cache.index_select(0, self._blocks(blocks, start, stop))
            out.copy_(picked.view(-1, self._cuts, *cache.shape[1:]))

    def _scatter(self, cache: torch.Tensor, blocks: Sequence[int], start: int, stop: int, source: torch.Tensor) -> None:
        if self.unit == "token":
            block, at = self._tokens(blocks, start, stop)
            cache[block, :, at] = source
            return
        rows = source.reshape(-1, *cache.shape[1:])
        index = self._blocks(blocks, start, stop)
        if rows[0].nbytes >= LARGE and not cache.is_cuda:
            torch._foreach_copy_([cache[block] for block in index.tolist()], list(rows.unbind(0)))
        else:
            cache.index_copy_(0, index, rows)

    def _blocks(self, blocks: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """The kernel's blocks of units that are blocks."""
        found = torch.tensor(blocks[start:stop], dtype=torch.int64)
        if self._cuts > 1:
            found = (found[:, None] * self._cuts + torch.arange(self._cuts)).flatten()
        return found.to(self.device)

    def _tokens(self, blocks: Sequence[int], start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernel's block of each token, and its place there."""
        size = self._cuts * self._inner
        token = torch.arange(start, stop)
        slot = torch.tensor(blocks, dtype=torch.int64)[token // size] * size + token % size
        return (slot // self._inner).to(self.device), (slot % self._inner).to(self.device)


def _numbers(name: str) -> list[int]:
    """By which layers are in the model's order on every rank and every node."""
    return [int(digits) for digits in re.findall(r"\d+", name)]
