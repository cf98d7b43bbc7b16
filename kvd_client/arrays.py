"""Users' arrays and tensors as bytes, whatever made them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd_client.errors import InvalidArgument

Bytes = npt.NDArray[np.uint8]


def items_of(value: Any, name: str, row: int | None, nbytes: int) -> npt.NDArray[Any]:
    """``value``'s innermost axis as one opaque item of ``nbytes``: (rows, a, b) of dtype ``V<nbytes>``. With a ``row``
    the first axis may be missing. Raises :class:`InvalidArgument` for other shapes."""
    array = bytes_of(value)
    if row is not None and array.ndim == 3:
        array = array[None]
    if array.ndim != 4 or array.shape[-1] != nbytes:
        raise InvalidArgument(
            f"{name} has {array.ndim} axes, the last of {array.shape[-1] if array.ndim else 0} bytes; "
            f"it needs 4 ({'3 with a row' if row is None else 'or 3'}), the last of {nbytes} bytes",
            name=name,
            shape=list(array.shape),
        )
    return array.view(f"V{nbytes}")[..., 0]


def bytes_of(value: Any) -> Bytes:
    """An array or tensor with its innermost axis as bytes; copied only where that needs it. Raises
    :class:`InvalidArgument` for what is neither, or has no bytes: scalars, Python's objects, sparse tensors."""
    # A tensor can only come from a torch that is imported already.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        tensor = value.detach()
        if tensor.ndim == 0:
            raise InvalidArgument("expected an array or a tensor, got a scalar")
        if tensor.layout != torch.strided or tensor.is_meta:
            raise InvalidArgument(f"expected a dense tensor with values, got one of {tensor.layout}, {tensor.device}")
        try:
            if tensor.stride()[-1] != 1:
                # Not contiguous(), for which any stride of an axis of one element will do.
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            flat = tensor.resolve_conj().resolve_neg().view(torch.uint8)
        except RuntimeError as error:
            raise InvalidArgument(f"expected a dense tensor with values: {str(error).splitlines()[0]}") from None
        viewed: Bytes = flat.cpu().numpy()
        return viewed
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"expected an array or a tensor, got a {type(value).__name__}: {error}") from None
    if array.dtype.hasobject:
        raise InvalidArgument(f"expected an array of numbers, got one of Python objects ({array.dtype})")
    if array.ndim == 0:
        raise InvalidArgument(f"expected an array or a tensor, got a {type(value).__name__}")
    if array.strides[-1] != array.itemsize:
        array = np.ascontiguousarray(array)
    return array.view(np.uint8)


def floats_of(value: Any) -> npt.NDArray[np.float32]:
    """Real numbers in an array, a tensor or nested lists as contiguous float32; copied only where that needs it.

    Raises :class:`InvalidArgument` for what is none."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(value, torch.Tensor):
            if value.is_complex():
                raise TypeError("complex numbers")
            value = value.detach().to("cpu", torch.float32).numpy()  # NumPy has no bfloat16, and knows no other device
        elif np.iscomplexobj(value):
            raise TypeError("complex numbers")
        return np.ascontiguousarray(value, np.float32)
    except (TypeError, ValueError, RuntimeError) as error:  # the last: a tensor that has no array
        raise InvalidArgument(f"expected an array or a tensor of real numbers: {str(error).splitlines()[0]}") from None


def check_fits(half: int, itemsize: int, dtype: Any) -> None:
    """Raise :class:`InvalidArgument` unless half an entry is a whole number of ``dtype``."""
    if not itemsize:
        raise InvalidArgument(f"dtype {dtype} has no size; give one whose values have bytes", dtype=str(dtype))
    if half % itemsize:
        raise InvalidArgument(f"half an entry is {half} bytes, no multiple of {dtype}", half=half, dtype=str(dtype))
