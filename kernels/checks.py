"""Checks of arguments for `kvd_kernels.ops`: each raises with what was wrong and what to do about it."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from . import native
from .reference import Bytes, Index

INT32_MAX = 2**31 - 1
INT32 = (np.dtype(np.int32),)
INT64 = (np.dtype(np.int64),)
INDEX = (*INT32, *INT64)
MASK = (np.dtype(np.int8),)
COUNTS = (*INT64, np.dtype(np.float64))


def array(op: str, name: str, value: Any, dtypes: tuple[np.dtype[Any], ...], ndims: tuple[int, ...]) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype not in dtypes:
        got = f"{value.dtype} array" if isinstance(value, np.ndarray) else type(value).__name__
        wanted = " or ".join(str(d) for d in dtypes)
        raise TypeError(f"{op}: {name} is a {got}; pass a NumPy array of {wanted}")
    if value.ndim not in ndims:
        wanted = " or ".join(str(n) for n in ndims)
        raise ValueError(f"{op}: {name} has shape {value.shape}; pass an array of {wanted} dimension(s)")
    if not (value.flags.c_contiguous and value.flags.aligned):
        raise ValueError(f"{op}: {name} is not contiguous and aligned; pass np.ascontiguousarray({name}) or its owner")
    return value


def output(op: str, name: str, value: Any, dtype: tuple[np.dtype[Any], ...], shape: tuple[int, ...]) -> Any:
    if value is None:
        return np.empty(shape, dtype[0])
    array(op, name, value, dtype, (len(shape),))
    if value.shape != shape:
        raise ValueError(f"{op}: {name} has shape {value.shape}; it must be {shape}")
    writable_array(op, name, value)
    return value


def writable_array(op: str, name: str, value: NDArray[Any]) -> None:
    if not value.flags.writeable:
        raise ValueError(f"{op}: {name} is read-only; pass memory that may be written")


def memory_of(op: str, name: str, value: Any, writable: bool = False) -> Bytes:
    """The bytes behind any contiguous buffer, not copied."""
    if isinstance(value, np.ndarray):  # also dtypes that the buffer protocol does not know, such as bfloat16
        if value.dtype.hasobject:
            raise TypeError(f"{op}: {name} holds Python objects; pass plain memory")
        if not value.flags.c_contiguous:
            raise ValueError(f"{op}: {name} is not contiguous; pass the memory that it is a view of")
        flat: Bytes = value.reshape(-1).view(np.uint8)
    else:
        try:
            view = memoryview(value)
        except TypeError:
            raise TypeError(
                f"{op}: {name} is a {type(value).__name__} without the buffer protocol; pass an array or a memoryview"
            ) from None
        if not view.c_contiguous:
            raise ValueError(f"{op}: {name} is not contiguous; pass the memory that it is a view of")
        # frombuffer refuses empty buffers
        flat = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
    if writable:
        writable_array(op, name, flat)
    return flat


def apart(op: str, name: str, written: NDArray[Any], *others: tuple[str, NDArray[Any]]) -> None:
    """Refuse an output that shares memory with another argument. Exact, since all are contiguous."""
    for other, memory in others:
        if native.active.overlap(written, memory):
            raise ValueError(f"{op}: {name} overlaps {other} in memory; give {name} memory of its own")


def entries_of(op: str, name: str, memory: Bytes, entry_bytes: int) -> int:
    if memory.size % entry_bytes:
        raise ValueError(
            f"{op}: {name} has {memory.size} bytes, no whole number of entries of {entry_bytes} bytes; "
            "pass whole entries"
        )
    return memory.size // entry_bytes


def positive(op: str, name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; pass an integer")
    if not 1 <= value <= INT32_MAX:
        raise ValueError(f"{op}: {name} is {value}; it must be from 1 to {INT32_MAX}")
    return int(value)


def extent(op: str, name: str, value: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{op}: {name} has a {type(value).__name__}; pass integers")
    if not 0 <= value <= most:
        raise ValueError(f"{op}: {name} has {value}; it must be from 0 to {most}")
    return int(value)


def refuse_entry(op: str, name: str, index: Index, at: int, entries: int, memory: str) -> NoReturn:
    raise IndexError(
        f"{op}: {name}[{at}] is {index[at]}, but {memory} has {entries} entries; "
        f"check that {name} and {memory} belong to the same layer"
    )


def per_sequence(op: str, name: str, value: int | NDArray[np.int64], least: int, sequences: int) -> NDArray[np.int64]:
    """One number for each sequence, in memory that nobody else may change after this check."""
    # Lists, since NumPy's own copying and filling give the GIL away for a moment, and it may take long to come back.
    if isinstance(value, int | np.integer):
        own = [int(value)] * sequences
    else:
        own = array(op, name, value, INT64, (1,)).tolist()
        if len(own) != sequences:
            raise ValueError(f"{op}: {name} has {len(own)} values for {sequences} sequences; pass one for each")
    low, high = min(own, default=least), max(own, default=least)
    if not (least <= low and high <= INT32_MAX):
        raise ValueError(f"{op}: {name} must be from {least} to {INT32_MAX}, but they reach from {low} to {high}")
    return np.array(own, np.int64)
