"""Small vocabulary shared by all floors of the daemon."""

from __future__ import annotations

import enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

NodeId: TypeAlias = str
TransferId: TypeAlias = int
"""Names one part (one rank) of a transfer inside one daemon; never reused while the daemon lives."""

Descriptors: TypeAlias = npt.NDArray[np.int64]
"""Shape (n, 3): local offset, remote offset, length, in bytes. Arrays, not objects: a transfer has thousands."""


class Role(enum.Enum):
    """Which end of a transfer a node (or process) is."""

    SOURCE = "source"
    SINK = "sink"


class Lane(enum.IntEnum):
    """Traffic classes of an endpoint; each has its own connection, so that urgent work never waits behind bulk."""

    URGENT = 0
    BULK = 1


class Path(enum.Enum):
    """How a KV block reaches the sink."""

    PROACTIVE = "proactive"
    ON_DEMAND = "on_demand"
    SPECULATIVE = "speculative"
