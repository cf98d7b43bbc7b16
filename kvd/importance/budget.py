"""How many blocks can be pushed while prefill runs (SmartGen, equation 2), and what no method can beat.

Times are in seconds, for the prompt at hand: T_p (``prefill_s``) to compute it, T_t (``transfer_s``) to move its
whole KV cache.
"""

from __future__ import annotations

import math

from kvd.errors import InvalidArgument
from kvd.importance.matrix import ALWAYS_LAYERS


def block_budget(layers: int, blocks: int, prefill_s: float, transfer_s: float, *, metadata_s: float = 0.0) -> int:
    """K_r = L·M · ((L-1)/L · T_p) / T_t, clipped to [2M, L·M]; L·M is full transfer.

    The first layer's time is not counted, since nothing exists to be sent before it is done. Selection metadata
    (``metadata_s`` to move it) travels first and takes its time from the blocks'.

    Raises :class:`InvalidArgument` for a time that is negative or not a number, and for no layers or blocks.
    """
    _check_counts(layers, blocks)
    _check_times(prefill_s=prefill_s, transfer_s=transfer_s, metadata_s=metadata_s)
    most, least = layers * blocks, min(layers, ALWAYS_LAYERS) * blocks
    overlap_s = (layers - 1) / layers * prefill_s - metadata_s
    if overlap_s >= transfer_s:
        return most
    # The small addition keeps a quotient that is whole by definition from falling short of it by rounding.
    return max(least, min(most, math.floor(most * max(0.0, overlap_s) / transfer_s + 1e-9)))


def needed_share(layers: int, selected: float, metadata: float = 0.0) -> float:
    """f: the share of the KV cache that must have crossed the link before the second token.

    Layers 0 and 1, the selection metadata (``metadata``, as a share of the cache), and of every other layer the share
    ``selected``. At most what moves everything: 1 + ``metadata``.
    """
    _check_counts(layers, 1)
    _check_times(metadata=metadata)
    if not 0 <= selected <= 1:
        raise InvalidArgument(f"the selected share is {selected}; it must be between 0 and 1", selected=selected)
    always = min(layers, ALWAYS_LAYERS)
    return always / layers + metadata + selected * (layers - always) / layers


def ttst_bound(prefill_s: float, transfer_s: float, share: float, step_s: float) -> float:
    """The earliest possible second token: max(T_p, f·T_t) and one decode step (``step_s``) with everything local.

    ``share`` is f of :func:`needed_share`; 1 gives the time of full transfer.
    """
    _check_times(prefill_s=prefill_s, transfer_s=transfer_s, share=share, step_s=step_s)
    return max(prefill_s, share * transfer_s) + step_s


def rest_s(transfer_s: float, share: float) -> float:
    """The least link time, after the second token, until everything is local: (1 - f)·T_t."""
    _check_times(transfer_s=transfer_s, share=share)
    return max(0.0, 1 - share) * transfer_s


def _check_counts(layers: int, blocks: int) -> None:
    if layers < 1 or blocks < 1:
        raise InvalidArgument(
            f"a cache of {layers} layers and {blocks} blocks has no budget; give at least one of each",
            layers=layers,
            blocks=blocks,
        )


def _check_times(**times: float) -> None:
    for name, value in times.items():
        if not (math.isfinite(value) and value >= 0):
            raise InvalidArgument(f"{name} is {value}; it must be a finite number, 0 or more", field=name, value=value)
