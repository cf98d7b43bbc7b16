"""What a KV cache looks like, and where each byte of it lies in a lease.

Both the inference process and the daemons compute addresses from the same few numbers, so that no address needs to
be sent for a KV entry. Pure arithmetic: no IO, no NumPy.

A *part* is what one process (one tensor-parallel rank) holds of a transfer: all layers, a contiguous range of KV
heads, ``rows`` sequences with room for ``capacity`` tokens each. Its memory is token-major::

    layer 0: [rows, capacity, heads, entry_bytes] | layer 1 ... | mask layer 0: int8 [rows, capacity] | mask layer 1 ...
    | metadata mask: int8 [layers] | metadata layer 0: array, array ... | metadata layer 1 ...
    | landing slot 0: [rows * heads, landing_entries, entry_bytes] | landing slot 1 ...

Token-major keeps a KV block (a token range, all heads) contiguous: one descriptor a row, however many heads.
With a *mask by head* each KV head of a sequence is a row of its own, with one head: then ``rows`` is sequences times KV
heads, ``heads`` is 1, and everything that goes by row (masks, ranges, order of importance) goes by head. Fetches, whose
rows are (row, head) in either case, look the same.
Metadata (what a KV selection algorithm needs of the keys before it can choose) and landing slots (where fetched
entries arrive, at the head of each row of the cache that attention will see) are there for those who ask for them.
Where the layers lie in a device's memory (:mod:`kvd_client.layouts`), the lease begins with the masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvd_client.arguments import whole
from kvd_client.errors import InvalidArgument

ALIGNMENT = 64
"""Start of each layer and each mask in a lease, in bytes: a cache line, and more than non-temporal stores need."""

MASK_PADDING, MASK_LOCAL, MASK_REMOTE = 0, 1, 2
"""Values of a mask byte: never loaded; every byte of the token is in place; still at the source."""

MAX_METADATA, MAX_METADATA_BYTES, MAX_LANDING_SLOTS = 16, 1 << 32, 64
MAX_NAME = 1 << 10
"""Characters of a model's, selector's, node's or array's name."""
MAX_LAYERS, MAX_HEADS, MAX_ROWS, MAX_TOKENS, MAX_ENTRY_BYTES = 1024, 1024, 4096, 1 << 24, 1 << 20

MASKS = ("token", "head")
"""What a mask byte stands for, and so what is sent by itself: a token of a layer with all KV heads, or one of them."""
AUTO = "auto"
"""Let :func:`mask_of` choose one."""


class KVSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model's KV cache, with entries as opaque bytes: MHA, GQA, MLA, fp16 and fp8 are one case.

    ``entry_bytes`` is one token's K and V together, for one KV head in one layer (MLA: one latent, ``kv_heads`` = 1).
    ``dtype`` and ``revision`` are not interpreted, but must be equal on both sides of a transfer. ``windows`` has one
    number a layer: how many of the newest tokens the layer can see, 0 for all of them; empty means all layers see all.
    """

    layers: int
    kv_heads: int
    entry_bytes: int
    dtype: str
    model: str
    revision: str = ""
    windows: tuple[int, ...] = ()

    def check(self) -> KVSpec:
        """Return ``self``, or raise :class:`InvalidArgument` naming the first field that makes no sense."""
        _in_range("spec.layers", self.layers, 1, MAX_LAYERS)
        _in_range("spec.kv_heads", self.kv_heads, 1, MAX_HEADS)
        _in_range("spec.entry_bytes", self.entry_bytes, 1, MAX_ENTRY_BYTES)
        for name in ("dtype", "model", "revision"):
            check_name(f"spec.{name}", getattr(self, name))
        if not isinstance(self.windows, tuple | list):
            raise InvalidArgument(f"spec.windows is {self.windows!r}; it must be a tuple of numbers, empty for none")
        if self.windows and len(self.windows) != self.layers:
            raise InvalidArgument(
                f"spec.windows has {len(self.windows)} numbers for {self.layers} layers; give one a layer, or none",
                windows=len(self.windows),
                layers=self.layers,
            )
        for layer, window in enumerate(self.windows):
            _in_range(f"spec.windows[{layer}]", window, 0, MAX_TOKENS)
        return self

    def differences(self, other: KVSpec) -> dict[str, list[Any]]:
        """Fields in which two specs differ, as ``{field: [self's, other's]}``; empty when they match."""
        mine, theirs = msgspec.to_builtins(self), msgspec.to_builtins(other)
        return {name: [mine[name], theirs[name]] for name in mine if mine[name] != theirs[name]}


class TokenRange(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tokens ``start`` (included) to ``stop`` (excluded) of sequence ``row``."""

    row: int
    start: int
    stop: int


class MetadataSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named array of bytes that each layer has besides its KV entries; it travels ahead of them."""

    name: str
    layer_bytes: int
    """Bytes in each layer, all rows together."""


class PartLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Addresses inside one part's lease. All results are byte offsets from the lease's start."""

    layers: int
    heads: int
    entry_bytes: int
    rows: int
    capacity: int
    metadata: tuple[MetadataSpec, ...] = ()
    landing_entries: int = 0
    """Sink: most entries of a (row, head) that one fetch brings."""
    landing_slots: int = 0
    """Sink: fetches that can be under way at a time."""
    placed: bool = False
    """The layers lie elsewhere, as a :class:`~kvd_client.layouts.Placement` says: the lease has only what follows."""
    sequence_rows: int = 1
    """Rows of each sequence: 1, or with a mask by head one for each KV head, in their order."""

    def check(self) -> PartLayout:
        """Return ``self``, or raise :class:`InvalidArgument` naming the first field that makes no sense."""
        _in_range("layers", self.layers, 1, MAX_LAYERS)
        _in_range("heads", self.heads, 1, MAX_HEADS)
        _in_range("entry_bytes", self.entry_bytes, 1, MAX_ENTRY_BYTES)
        _in_range("rows", self.rows, 1, MAX_ROWS)
        _in_range("sequence_rows", self.sequence_rows, 1, MAX_HEADS)
        if self.rows % self.sequence_rows or (self.sequence_rows > 1 and (self.heads > 1 or self.placed)):
            raise InvalidArgument(
                f"{self.rows} rows of {self.heads} heads can't be sequences of {self.sequence_rows} rows: with a mask "
                "by head each row has one head, in memory of the transfer's own",
                rows=self.rows,
                sequence_rows=self.sequence_rows,
            )
        _in_range("capacity", self.capacity, 1, MAX_TOKENS)
        _in_range("landing_entries", self.landing_entries, 0, self.capacity)
        _in_range("landing_slots", self.landing_slots, 0, MAX_LANDING_SLOTS)
        _in_range("the number of metadata arrays", len(self.metadata), 0, MAX_METADATA)
        for array in self.metadata:
            check_name("a metadata array's name", array.name)
            _in_range(f"metadata {array.name!r}", array.layer_bytes, 1, MAX_METADATA_BYTES)
        if len({array.name for array in self.metadata}) != len(self.metadata):
            raise InvalidArgument("two metadata arrays have the same name; give each its own")
        return self

    @property
    def sequences(self) -> int:
        return self.rows // self.sequence_rows

    @property
    def kv_heads(self) -> int:
        """Of each sequence, in one row or in several."""
        return self.heads * self.sequence_rows

    @property
    def keeps_fetched(self) -> bool:
        """Whether what is fetched is put in place and marked by the sink's daemon: a mask byte then stands for one
        entry."""
        return self.heads == 1 and not self.placed

    @property
    def mask_by(self) -> str:
        """One of :data:`MASKS`."""
        return "head" if self.sequence_rows > 1 else "token"

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer, all of the part's heads."""
        return self.heads * self.entry_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer without padding."""
        return self.rows * self.capacity * self.token_bytes

    @property
    def layer_stride(self) -> int:
        """From one layer to the next in the lease; 0 where the layers are not in it."""
        return 0 if self.placed else _align(self.layer_bytes)

    @property
    def mask_bytes(self) -> int:
        return self.rows * self.capacity

    @property
    def mask_stride(self) -> int:
        return _align(self.mask_bytes)

    @property
    def masks_offset(self) -> int:
        """Where the masks begin: behind all layers."""
        return self.layers * self.layer_stride

    @property
    def nbytes(self) -> int:
        """Size of the whole lease."""
        return self.landing_offset(self.landing_slots)

    @property
    def metadata_mask_offset(self) -> int:
        """One byte a layer: local or remote, as in the masks; none if there is no metadata."""
        return self.masks_offset + self.layers * self.mask_stride

    @property
    def metadata_offset(self) -> int:
        """Where the metadata of layer 0 begins."""
        return self.metadata_mask_offset + (_align(self.layers) if self.metadata else 0)

    @property
    def metadata_stride(self) -> int:
        """Bytes of one layer's metadata, each array padded to :data:`ALIGNMENT`."""
        return sum(_align(array.layer_bytes) for array in self.metadata)

    def metadata_array(self, layer: int, name: str) -> tuple[int, int]:
        """``(offset, bytes)`` of an array in a layer; raises :class:`InvalidArgument` for an unknown name."""
        offset = self.metadata_offset + layer * self.metadata_stride
        for array in self.metadata:
            if array.name == name:
                return offset, array.layer_bytes
            offset += _align(array.layer_bytes)
        raise InvalidArgument(
            f"there is no metadata {name!r}; the transfer has {[array.name for array in self.metadata]}", name=name
        )

    @property
    def landing_row_bytes(self) -> int:
        """From one row of a landing slot to the next."""
        return self.landing_entries * self.entry_bytes

    @property
    def landing_stride(self) -> int:
        return _align(self.rows * self.heads * self.landing_row_bytes)

    def landing_offset(self, slot: int) -> int:
        """Where landing slot ``slot`` begins."""
        return self.metadata_offset + self.layers * self.metadata_stride + slot * self.landing_stride

    def layer_offset(self, layer: int) -> int:
        return layer * self.layer_stride

    def mask_offset(self, layer: int) -> int:
        return self.masks_offset + layer * self.mask_stride

    def token_offset(self, layer: int, row: int, token: int) -> int:
        """First byte of a token's entries (all heads)."""
        return self.layer_offset(layer) + (row * self.capacity + token) * self.token_bytes

    def token_mask_offset(self, layer: int, row: int, token: int) -> int:
        """The token's mask byte."""
        return self.mask_offset(layer) + row * self.capacity + token


def part_layout(
    spec: KVSpec,
    *,
    heads: int,
    rows: int,
    capacity: int,
    metadata: tuple[MetadataSpec, ...] = (),
    landing_entries: int = 0,
    landing_slots: int = 0,
    placed: bool = False,
    mask: str = "token",
) -> PartLayout:
    """The layout of a part of ``spec`` that has ``heads`` KV heads of ``rows`` sequences; raises
    :class:`InvalidArgument`."""
    if mask not in MASKS:
        raise InvalidArgument(f"there is no mask by {mask!r}; choose one of {', '.join(MASKS)}", mask=str(mask)[:100])
    by_head = mask == "head"
    # Plain numbers: products of NumPy's small ones overflow.
    heads, landing_entries = whole("heads", heads), whole("landing_entries", landing_entries)
    if by_head and placed:
        raise InvalidArgument("tensors in a device's layout have a mask by token; leave mask or the placement out")
    if by_head and not 1 <= rows * heads <= MAX_ROWS:
        raise InvalidArgument(
            f"{rows} sequences of {heads} KV heads have {rows * heads} masks by head, and a transfer has at most "
            f"{MAX_ROWS}; open several transfers, or leave mask out",
            rows=rows,
            heads=heads,
            limit=MAX_ROWS,
        )
    return PartLayout(
        layers=whole("spec.layers", spec.layers),
        heads=1 if by_head else heads,
        entry_bytes=whole("spec.entry_bytes", spec.entry_bytes),
        rows=rows * heads if by_head else rows,
        capacity=capacity,
        metadata=tuple(MetadataSpec(name=a.name, layer_bytes=whole(a.name, a.layer_bytes)) for a in metadata),
        landing_entries=landing_entries,
        landing_slots=whole("landing_slots", landing_slots),
        placed=placed,
        sequence_rows=heads if by_head else 1,
    ).check()


def mask_of(mask: str, *, heads: int, rows: int, metadata: Sequence[MetadataSpec] = (), placed: bool = False) -> str:
    """One of :data:`MASKS`: ``mask`` itself, or for :data:`AUTO` by head wherever selection can gain by it.

    That is where there are several heads, each of which selects by itself, and metadata to select by, within the
    limits of :func:`part_layout`. The source's memory is arranged by it before anybody knows the sink, so both ends
    choose by what must be equal at both: heads, rows and metadata; an end whose tensors are in a device's layout goes
    by token, and the other end must be told. The mode is not asked, since often only the sink has it, and costs full
    transfer nothing. Raises :class:`InvalidArgument` for another name.
    """
    if mask != AUTO:
        if mask not in MASKS:
            raise InvalidArgument(
                f"there is no mask by {mask!r}; choose one of {', '.join((AUTO, *MASKS))}", mask=str(mask)[:100]
            )
        return mask
    by_head = bool(metadata) and heads > 1 and rows * heads <= MAX_ROWS and not placed
    return "head" if by_head else "token"


def check_name(what: str, name: str) -> None:
    """Raise :class:`InvalidArgument` for what is no name: it would be in every log line and message."""
    if not isinstance(name, str) or len(name) > MAX_NAME:
        shown = f"has {len(name)} characters" if isinstance(name, str) else f"is {name!r}"
        raise InvalidArgument(f"{what} {shown}; it must be a text of at most {MAX_NAME}", field=what)


def _align(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= whole(name, value) <= high:
        raise InvalidArgument(f"{name} is {value}; it must be between {low} and {high}", field=name, value=value)
