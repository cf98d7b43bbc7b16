"""Step 1 of a plan in host memory: decode, zero, copy, encode. The kernels do the work; this is their order."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import kvd_kernels
import numpy as np

from kvd.errors import InvalidArgument
from kvd.layout import codec
from kvd.layout.codec import Bytes
from kvd.layout.steps import Decode, RegroupPlan

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in collections.abc from Python 3.12 on


STREAM_FROM = 1 << 20
"""Bytes of a copy into staging memory that pass the caches by, which have lost it since it was used last. At 4 MiB that
takes a quarter less time, and a tenth less with the checksum and the copy of a send behind it; at 1 MiB a fifth less,
and as much with them, but the link waits for the first."""


def regroup(plan: RegroupPlan, sources: Sequence[Buffer], staging: Buffer) -> None:
    """From the source's channels, one memory each, into ``staging`` of at least ``plan.staging_bytes``.

    The plan's offsets count from each memory's start, or from ``plan.shift`` there. Block formats take memory for their
    pages in plain form, as much as ``plan.decode`` and ``plan.encode`` say. Raises :class:`InvalidArgument` where
    memory is missing or too short.
    """
    for _ in in_turns(plan, sources, staging):
        pass


def in_turns(
    plan: RegroupPlan, sources: Sequence[Buffer], staging: Buffer, turn_bytes: int = sys.maxsize
) -> Iterator[None]:
    """As :func:`regroup`, yielding whenever the copies have moved about ``turn_bytes``: for a caller whose thread has
    something else to do in between. A single box is not cut, and neither is decoding or encoding."""
    out = _bytes(staging)
    if len(out) < plan.staging_bytes:
        raise InvalidArgument(
            f"staging memory has {len(out)} bytes, but the plan needs {plan.staging_bytes}; lease as much",
            need=plan.staging_bytes,
            have=len(out),
        )
    memories = [_bytes(memory)[plan.shift :] for memory in sources]
    if plan.decode:
        memories = [_decoded(plan.decode, memories)]
    target = np.empty(plan.encode.nbytes, np.uint8) if plan.encode else out
    if plan.copies and (last := max(copy.channel for copy in plan.copies)) >= len(memories):
        raise InvalidArgument(
            f"the plan reads source channel {last}, but there are {len(memories)} memories; give one a channel",
            channel=last,
        )
    try:
        kvd_kernels.zero(target, plan.zero, plan.zero_bytes)
        for copy in plan.copies:
            boxes = max(1, turn_bytes // (math.prod(copy.shape) * copy.item_bytes))
            for first in range(0, len(copy.places), boxes):
                if first:
                    yield
                kvd_kernels.regroup(
                    memories[copy.channel],
                    target,
                    copy.places[first : first + boxes],
                    copy.shape,
                    copy.source_strides,
                    copy.target_strides,
                    copy.item_bytes,
                    stream_from=STREAM_FROM,
                )
    except IndexError as error:
        raise InvalidArgument(f"a source's memory is too short for the plan: {error}") from None
    if plan.encode:
        step = plan.encode
        codec.encode(target, step.plain, step.block, step.elements, out[: plan.staging_bytes], step.stride)


def _decoded(step: Decode, memories: Sequence[Bytes]) -> Bytes:
    out = np.empty(step.nbytes, np.uint8)
    page, plain, done = step.block.page_bytes(step.elements), step.elements * step.plain.item_bytes, 0
    for channel, offsets in step.places:
        if channel >= len(memories) or int(offsets[-1]) + page > len(memories[channel]):
            raise InvalidArgument(
                f"the plan reads {int(offsets[-1]) + page} bytes of source channel {channel}; give that memory",
                channel=channel,
            )
        end = done + len(offsets) * plain
        codec.decode(memories[channel], offsets, step.block, step.plain, step.elements, out[done:end])
        done = end
    return out


def _bytes(memory: Buffer) -> Bytes:
    return np.frombuffer(memoryview(memory).cast("B"), np.uint8)
