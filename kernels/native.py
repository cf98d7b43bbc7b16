"""Picks the implementation of the kernels when the package is imported: C with AVX2, C without, or NumPy.

``KVD_KERNELS=avx2|baseline|numpy`` demands one; without it the fastest that this machine has is taken.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from . import reference
from .reference import Bytes, Index

Name = Literal["avx2", "baseline", "numpy"]
NAMES: tuple[Name, ...] = ("avx2", "baseline", "numpy")
VARIABLE = "KVD_KERNELS"


class Implementation(Protocol):
    """What an implementation offers; see `kvd_kernels.reference` for the meaning of each function."""

    def overlap(self, a: NDArray[Any], b: NDArray[Any]) -> bool: ...

    def partition(
        self,
        index: NDArray[np.int32],
        mask: NDArray[np.int8],
        heads: int,
        out: NDArray[np.int32],
        counts: NDArray[np.int32],
    ) -> int: ...

    def token_entries(self, index: NDArray[np.int32], tokens: int, heads: int, out: NDArray[np.int64]) -> int: ...

    def gather(self, source: Bytes, entry_bytes: int, index: Index, out: Bytes, to: Index | None) -> int: ...

    def scatter(self, values: Bytes, entry_bytes: int, index: Index, target: Bytes) -> int: ...

    def copy_runs(self, source: Bytes, target: Bytes, descriptors: NDArray[np.int64]) -> int: ...

    def accumulate(
        self,
        index: NDArray[np.int32],
        counts: NDArray[np.int64] | NDArray[np.float64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        skip_beyond: bool,
    ) -> int: ...

    def sign_codes(self, x: NDArray[np.float32], w: NDArray[np.float32], out: Bytes) -> None: ...

    def hamming(self, q: Bytes, k: Bytes, out: NDArray[np.int32]) -> None: ...

    def top_k(
        self,
        scores: NDArray[np.float32],
        lengths: NDArray[np.int64],
        k: NDArray[np.int64],
        out: NDArray[np.int32],
    ) -> int: ...

    def regroup(
        self,
        source: Bytes,
        target: Bytes,
        places: NDArray[np.int64],
        dims: NDArray[np.int64],
        item_bytes: int,
        stream_from: int = 0,
    ) -> int: ...

    def zero(self, target: Bytes, offsets: NDArray[np.int64], nbytes: int) -> int: ...

    def encode_bfp(
        self, values: Bytes, plain_bytes: int, magnitude: int, elements: int, out: Bytes, stride: int
    ) -> int: ...

    def decode_bfp(
        self, source: Bytes, offsets: NDArray[np.int64], magnitude: int, elements: int, out: Bytes, plain_bytes: int
    ) -> int: ...


class Native:
    """The C extension, with or without its AVX2 functions."""

    def __init__(self, extension: Any, avx2: bool) -> None:
        self._c = extension
        self._avx2 = avx2

    def overlap(self, a: NDArray[Any], b: NDArray[Any]) -> bool:
        return cast(bool, self._c.overlap(a, b))

    def partition(
        self,
        index: NDArray[np.int32],
        mask: NDArray[np.int8],
        heads: int,
        out: NDArray[np.int32],
        counts: NDArray[np.int32],
    ) -> int:
        return cast(int, self._c.partition(self._avx2, index, mask, mask.shape[0], heads, out, counts))

    def token_entries(self, index: NDArray[np.int32], tokens: int, heads: int, out: NDArray[np.int64]) -> int:
        return cast(int, self._c.token_entries(self._avx2, index, index.shape[0], tokens, heads, out))

    def gather(self, source: Bytes, entry_bytes: int, index: Index, out: Bytes, to: Index | None) -> int:
        where, width = (b"", 0) if to is None else (to, to.itemsize)
        return cast(int, self._c.move(self._avx2, source, entry_bytes, index, index.itemsize, out, where, width))

    def scatter(self, values: Bytes, entry_bytes: int, index: Index, target: Bytes) -> int:
        bad = cast(int, self._c.move(self._avx2, values, entry_bytes, b"", 0, target, index, index.itemsize))
        return bad - len(index) if bad >= len(index) else bad

    def copy_runs(self, source: Bytes, target: Bytes, descriptors: NDArray[np.int64]) -> int:
        return cast(int, self._c.copy_runs(self._avx2, source, target, descriptors))

    def accumulate(
        self,
        index: NDArray[np.int32],
        counts: NDArray[np.int64] | NDArray[np.float64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        skip_beyond: bool,
    ) -> int:
        shared, is_float = counts.ndim == 1, counts.dtype.kind == "f"
        return cast(
            int,
            self._c.accumulate(
                self._avx2,
                index,
                index.shape[0],
                starts,
                lengths,
                counts.shape[-1],
                shared,
                is_float,
                skip_beyond,
                counts,
            ),
        )

    def sign_codes(self, x: NDArray[np.float32], w: NDArray[np.float32], out: Bytes) -> None:
        self._c.sign_codes(self._avx2, x, w, x.shape[0], *w.shape, out)

    def hamming(self, q: Bytes, k: Bytes, out: NDArray[np.int32]) -> None:
        rows, group, size = q.shape
        self._c.hamming(self._avx2, q, k, rows, group, k.shape[1], size, out)

    def top_k(
        self,
        scores: NDArray[np.float32],
        lengths: NDArray[np.int64],
        k: NDArray[np.int64],
        out: NDArray[np.int32],
    ) -> int:
        return cast(int, self._c.top_k(self._avx2, scores, lengths, k, *scores.shape, out.shape[1], out))

    def regroup(
        self,
        source: Bytes,
        target: Bytes,
        places: NDArray[np.int64],
        dims: NDArray[np.int64],
        item_bytes: int,
        stream_from: int = 0,
    ) -> int:
        return cast(int, self._c.regroup(self._avx2, source, target, places, dims, item_bytes, stream_from))

    def zero(self, target: Bytes, offsets: NDArray[np.int64], nbytes: int) -> int:
        return cast(int, self._c.zero(self._avx2, target, offsets, nbytes))

    def encode_bfp(
        self, values: Bytes, plain_bytes: int, magnitude: int, elements: int, out: Bytes, stride: int
    ) -> int:
        return cast(int, self._c.encode_bfp(self._avx2, values, plain_bytes, magnitude, elements, out, stride))

    def decode_bfp(
        self, source: Bytes, offsets: NDArray[np.int64], magnitude: int, elements: int, out: Bytes, plain_bytes: int
    ) -> int:
        return cast(int, self._c.decode_bfp(self._avx2, source, offsets, magnitude, elements, out, plain_bytes))


def _extension() -> tuple[ModuleType | None, str | None]:
    """The C extension, or why there is none."""
    try:
        return importlib.import_module("kvd_kernels._native"), None
    except ImportError as error:
        return (
            None,
            f"the extension kvd_kernels._native cannot be loaded ({error}); reinstall kvd with a C compiler to get it",
        )


_c, _missing = _extension()


def available() -> tuple[Name, ...]:
    """The implementations that this machine can run, fastest first; "numpy" is always among them."""
    if _c is None:
        return ("numpy",)
    return NAMES if _c.has_avx2() else ("baseline", "numpy")


def load(name: Name) -> Implementation:
    """The implementation called `name`.

    Raises:
        ValueError: no implementation has this name.
        RuntimeError: this machine cannot run it; the message says why.
    """
    if name not in NAMES:
        raise ValueError(f"no kernels are called {name!r}; choose one of {', '.join(NAMES)}")
    if name == "numpy":
        return cast(Implementation, reference)
    if _c is None:
        raise RuntimeError(f"the kernels {name!r} are not available: {_missing}")
    if name not in available():
        raise RuntimeError(
            "the kernels 'avx2' are not available: this CPU or build has no AVX2; choose baseline or numpy"
        )
    return Native(_c, avx2=name == "avx2")


def _at_import() -> tuple[Name, Implementation, str | None]:
    demanded = os.environ.get(VARIABLE, "")
    if not demanded:
        name = available()[0]
        return (
            name,
            load(name),
            None if name != "numpy" else f"kernels run in NumPy, several times slower: {_missing}",
        )
    try:
        chosen = load(cast(Name, demanded))
    except (ValueError, RuntimeError) as error:
        raise ImportError(f"{VARIABLE}={demanded}: {error}; or unset {VARIABLE} to take the best there is") from None
    return (
        cast(Name, demanded),
        chosen,
        f"kernels run in NumPy because {VARIABLE}=numpy" if demanded == "numpy" else None,
    )


_name, active, _why = _at_import()


def implementation() -> Name:
    """Which implementation is in use: "avx2", "baseline" (C both) or "numpy"."""
    return _name


def why_not_native() -> str | None:
    """One sentence that says why the kernels run in NumPy, for the log; None when they run in C."""
    return _why


def select(name: Name) -> Name:
    """Use the implementation `name` from now on, in the whole process; returns the one used before.

    For tests and benchmarks: a process that serves picks once, at import. Raises as `load` does, and then
    changes nothing.
    """
    global _name, active, _why
    active, before = load(name), _name
    _name, _why = name, "kernels run in NumPy because select('numpy') was called" if name == "numpy" else None
    return before
