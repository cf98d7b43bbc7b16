"""Masks that are left to kvd: what both ends choose by, and rankings that fit whatever was chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd_client import Client, protocol
from kvd_client.decode import DecodeTransfer
from kvd_client.errors import InvalidArgument
from kvd_client.layouts import Placement
from kvd_client.parts import Part
from kvd_client.prefill import PrefillTransfer
from kvd_client.protocol import Opened, OpenSink, OpenSource
from kvd_client.spec import AUTO, MASKS, MAX_ROWS, KVSpec, MetadataSpec, mask_of, part_layout
from tests.unit.selection_fakes import FakeConnection, Memory

SPEC = KVSpec(layers=3, kv_heads=4, entry_bytes=16, dtype="float32", model="m")
METADATA = (MetadataSpec(name="quest.bounds", layer_bytes=64),)


@pytest.mark.parametrize(
    ("chosen", "how"),
    [
        ("head", {}),
        ("token", {"metadata": ()}),
        ("token", {"heads": 1}),
        ("token", {"placed": True}),
        ("head", {"rows": MAX_ROWS // 4}),
        ("token", {"rows": MAX_ROWS // 4 + 1}),
    ],
)
def test_by_head_where_selection_gains_by_it(chosen: str, how: dict[str, Any]) -> None:
    known: dict[str, Any] = {"heads": 4, "rows": 2, "metadata": METADATA, **how}
    assert mask_of(AUTO, **known) == chosen
    for mask in MASKS:
        assert mask_of(mask, **known) == mask, "what is named is not chosen"
    part_layout(SPEC, **{**known, "capacity": 8, "mask": chosen})  # which is within its limits
    with pytest.raises(InvalidArgument, match="no mask by 'layer'; choose one of auto, token, head"):
        mask_of("layer", **known)


class Listening(Client):
    """A client whose daemon takes every open."""

    def _open(self, message: Any, nbytes: int, cache: Any, made: Any) -> Any:
        self.message = message
        memory = Memory(nbytes)
        memory.bytes[:] = 0
        part = Part(Opened(transfer=1, handle="", slot=0, offset=0, nbytes=nbytes, generation=1), memory)
        return made(FakeConnection(), part)


@pytest.mark.parametrize("metadata", [METADATA, ()])
def test_both_ends_choose_the_same_and_say_it_to_their_daemons(metadata: tuple[MetadataSpec, ...]) -> None:
    client = Listening("nowhere")
    how: dict[str, Any] = {"metadata": metadata, "mask": "auto"}
    source = client.prefill("r", SPEC, [7, 5], **how)
    assert isinstance(client.message, OpenSource)
    said = client.message.mask
    sink = client.decode("r", SPEC, [7, 5], mode="speculative", landing_entries=3, **how)
    assert isinstance(client.message, OpenSink)
    assert said == client.message.mask == ("head" if metadata else "token")
    assert said == source.mask_by == sink.mask_by
    assert source.by_head is bool(metadata)


def test_what_is_left_out_stays_by_token() -> None:
    client = Listening("nowhere")
    assert client.prefill("r", SPEC, [7], metadata=METADATA).mask_by == "token"
    assert client.decode("r", SPEC, [7], metadata=METADATA, landing_entries=2).mask(0).shape == (1, 7)


def test_an_end_on_a_device_goes_by_token() -> None:
    client = Listening("nowhere")
    client.decode(
        "r", SPEC, [7], metadata=METADATA, mask="auto", placement=Placement(layout="tenstorrent", dtype="f32")
    )
    assert client.message.mask == "token"


def source_of(mask: str) -> tuple[PrefillTransfer, FakeConnection]:
    layout = part_layout(SPEC, heads=4, rows=2, capacity=8, mask=mask)
    connection, memory = FakeConnection(), Memory(layout.nbytes)
    part = Part(Opened(transfer=1, handle="", slot=0, offset=0, nbytes=layout.nbytes, generation=1), memory)  # type: ignore[arg-type]
    return PrefillTransfer(connection, part, layout, [7, 5]), connection  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("by_head", [False, True])
def test_rankings_fit_either_mask(mask: str, by_head: bool) -> None:
    transfer, connection = source_of(mask)
    shares = np.random.default_rng(3).random((8 if by_head else 2, 5), np.float32)
    transfer.rank(2, shares)
    sent = connection.sent[-1]
    assert isinstance(sent, protocol.RankBlocks)
    found = np.frombuffer(sent.shares, np.float32).reshape(transfer.layout.rows, 5)
    of_heads = found.reshape(2, -1, 5)
    if by_head and mask == "token":
        assert np.allclose(found, shares.reshape(2, 4, 5).mean(axis=1))
    else:
        assert np.array_equal(of_heads, shares.reshape(2, -1, 5) + np.zeros_like(of_heads))


def test_masks_of_a_sink_say_what_they_are_of() -> None:
    sink = Listening("nowhere").decode("r", SPEC, [7, 5], metadata=METADATA, mask="auto")
    assert isinstance(sink, DecodeTransfer)
    assert sink.mask(1).shape == (2, 4, 7)
