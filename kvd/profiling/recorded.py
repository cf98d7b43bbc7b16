"""What one prompt really selected, kept: for comparing orders of sending without running a model again.

A :class:`Recorded` has the selection of each decode step and of the prompt's last queries, as prefill asks them: a bit
for each (layer, KV head, token). One safetensors file holds one prompt, so that recording can go on where it stopped;
1,024 tokens of SmolLM2 with 16 steps and 17 queries take 380 KB. :mod:`kvd.profiling.record_run` makes them.

**File, version 1.** Tensors ``steps`` (U8, (L, S, H, B)) and ``queries`` (U8, (L, W, H, B)), B = ceil(tokens / 8), bit
t % 8 of byte t // 8 is token t; ``__metadata__`` has ``format`` (``kvd-recorded``), ``version`` and ``recorded``, a
JSON object with the other fields.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from kvd.blocks import block_bounds
from kvd.errors import InvalidArgument, InvalidProfile
from kvd.importance.counts import SelectionCounts
from kvd.importance.matrix import ALWAYS_LAYERS
from kvd.profiling.files import replace_file
from kvd.reading import read_bounded
from kvd_client.spec import MAX_TOKENS

FORMAT, VERSION, SUFFIX = "kvd-recorded", 1, ".kvdrecorded"
MAX_BYTES = 1 << 30

Bits = npt.NDArray[np.uint8]
"""Shape (layers, steps or queries, KV heads, bytes): a bit a token, the lowest first."""
Mask = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """The selections of one prompt. Raises :class:`InvalidArgument` for arrays that do not fit ``length``."""

    name: str
    """What was recorded: a domain, a file."""
    selector: str
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: str = ""
    share: float
    """Of the prompt, selected in each step."""
    query_share: float
    """The same of the prompt's queries."""
    length: int
    """Tokens of the prompt."""
    steps: Bits
    queries: Bits
    """The prompt's last query last, in its narrow selection too."""
    asked_ahead: int = 0
    """Over how many positions behind the prompt the queries were spread; 0: they were asked where they stand."""

    def __post_init__(self) -> None:
        if not 1 <= self.length <= MAX_TOKENS:
            raise InvalidArgument(f"length is {self.length}; it must be between 1 and {MAX_TOKENS}", field="length")
        for name in ("steps", "queries"):
            bits = getattr(self, name)
            fits = bits.dtype == np.uint8 and bits.ndim == 4 and bits.shape[3] == -(-self.length // 8)
            if not fits or bits.shape[::2] != self.steps.shape[::2]:
                raise InvalidArgument(
                    f"{name} is {bits.dtype} of shape {bits.shape}; that is no prompt of {self.length} tokens",
                    field=name,
                )
            if self.length % 8 and (bits[..., -1] >> self.length % 8).any():
                raise InvalidArgument(f"{name} selects tokens behind the prompt's {self.length}", field=name)
            bits.setflags(write=False)

    @property
    def layers(self) -> int:
        return int(self.steps.shape[0])

    @property
    def kv_heads(self) -> int:
        return int(self.steps.shape[2])

    @property
    def step_count(self) -> int:
        return int(self.steps.shape[1])

    @property
    def query_count(self) -> int:
        return int(self.queries.shape[1])

    def step_mask(self, layer: int | slice = slice(None)) -> Mask:
        """bool (layers, steps, KV heads, tokens), or without the first axis for one layer."""
        return self._unpacked(self.steps[layer])

    def query_mask(self, layer: int | slice = slice(None)) -> Mask:
        """The same of the prompt's last queries."""
        return self._unpacked(self.queries[layer])

    def counts(self, blocks: int, *, steps: slice | int = slice(None), heads: bool = False) -> npt.NDArray[np.int64]:
        """How often entries of each block were selected in these steps: int64 (layers, blocks), or (layers, KV heads,
        blocks) with ``heads``."""
        chosen = self.steps[:, steps] if isinstance(steps, slice) else self.steps[:, steps : steps + 1]
        return self._by_block(chosen, blocks, heads)

    def shares(self, w: int, blocks: int, *, heads: bool = False) -> npt.NDArray[np.float64]:
        """c_w: the share of (KV head, token of the block, query) triples of the last ``w`` queries in which the token
        was selected; shapes as :meth:`counts`. Blocks without a token have 0."""
        if not 1 <= w <= self.query_count:
            raise InvalidArgument(f"there are {self.query_count} queries, not {w}", queries=self.query_count)
        found = self._by_block(self.queries[:, self.query_count - w :], blocks, heads)
        tokens = np.maximum(np.diff(block_bounds(self.length, blocks)), 1)
        return found / (tokens * float(w * (1 if heads else self.kv_heads)))

    def selection_counts(self, blocks: int) -> SelectionCounts:
        """All steps, as profiles count them."""
        found, counts = SelectionCounts(self.layers, blocks), self.counts(blocks)
        for layer in range(ALWAYS_LAYERS, self.layers):
            found.add(layer, counts[layer], length=self.length, heads=self.kv_heads, steps=self.step_count)
        return found

    def _unpacked(self, bits: Bits) -> Mask:
        return np.unpackbits(bits, axis=-1, count=self.length, bitorder="little").view(np.bool_)

    def _by_block(self, bits: Bits, blocks: int, heads: bool) -> npt.NDArray[np.int64]:
        bounds = block_bounds(self.length, blocks)
        found = np.zeros((self.layers, self.kv_heads, blocks), np.int64)
        for layer in range(self.layers):
            per_token = self._unpacked(bits[layer]).sum(axis=0)
            sums = np.concatenate([np.zeros((self.kv_heads, 1), np.int64), per_token.cumsum(axis=1)], axis=1)
            found[layer] = np.diff(sums[:, bounds], axis=1)
        return found if heads else found.sum(axis=1)


def pack(mask: Mask) -> Bits:
    """bool (…, tokens) to bits."""
    return np.packbits(mask, axis=-1, bitorder="little")


class _Fields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    selector: str
    parameters: dict[str, Any]
    model: str
    share: float
    query_share: float
    length: int
    asked_ahead: int = 0


def write(recorded: Recorded, path: str | os.PathLike[str]) -> None:
    """Write a file in one step; raises :class:`InvalidArgument` where it can't be written."""
    fields = {field: getattr(recorded, field) for field in _Fields.__struct_fields__}
    text = msgspec.json.encode(fields | {"parameters": dict(recorded.parameters)}).decode()
    tensors = {"steps": np.ascontiguousarray(recorded.steps), "queries": np.ascontiguousarray(recorded.queries)}
    replace_file(path, safetensors.numpy.save(tensors, {"format": FORMAT, "version": str(VERSION), "recorded": text}))


def read(path: str | os.PathLike[str]) -> Recorded:
    """Read a file. Raises :class:`InvalidProfile` for one that is no recording, or damaged, and
    :class:`InvalidArgument` where it can't be opened."""
    name = os.fspath(path)
    try:
        if os.path.getsize(name) > MAX_BYTES:
            raise InvalidProfile(f"{name} is larger than any recording of selections", file=name)
        data = read_bounded(name, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{name!r} can't be read: {error}", file=name) from None
    try:
        tensors = safetensors.numpy.load(data)
        header = msgspec.json.decode(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = header.get("__metadata__", {})
        if (metadata.get("format"), metadata.get("version")) != (FORMAT, str(VERSION)):
            raise InvalidProfile(f"{name} is no recording of selections of version {VERSION}", file=name)
        fields = msgspec.json.decode(metadata.get("recorded", ""), type=_Fields)
        return Recorded(steps=tensors["steps"], queries=tensors["queries"], **msgspec.structs.asdict(fields))
    except (safetensors.SafetensorError, msgspec.DecodeError, KeyError, InvalidArgument) as error:
        raise InvalidProfile(
            f"{name} can't be used as a recording of selections: {error}; record it again", file=name
        ) from None
