"""What a process asks for is refused with a sentence about what is wrong with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.api.checks import check_fetch
from kvd.errors import InvalidArgument
from kvd_client import protocol as api
from kvd_client.spec import PartLayout

LAYOUT = PartLayout(layers=2, heads=2, entry_bytes=8, rows=1, capacity=8, landing_entries=3, landing_slots=1)


def fetch(**other: Any) -> api.Fetch:
    counts, index = np.array([1, 3], "<i4").tobytes(), np.arange(4, dtype="<i4").tobytes()
    return api.Fetch(**{"transfer": 1, "layer": 0, "slot": 0, "counts": counts, "index": index, **other})


def test_a_fetch_that_fits_is_taken() -> None:
    check_fetch(LAYOUT, fetch())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"layer": 2}, "layer 2, but the transfer has layers 0 to 1"),
        ({"slot": 1}, "slot 1, but the transfer was opened with 1"),
        ({"counts": bytes(4)}, "4 bytes of counts"),
        ({"index": bytes(15)}, "15 bytes of positions"),
        ({"counts": np.array([-1, 3], "<i4").tobytes()}, "asks for -1 entries"),
        ({"counts": np.array([0, 4], "<i4").tobytes()}, "asks for 4 entries.*room for 0 to 3"),
    ],
)
def test_what_is_wrong_with_a_fetch_is_said(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        check_fetch(LAYOUT, fetch(**wrong))
