"""Layouts as text, TOML and messages."""

from __future__ import annotations

import contextlib

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import InvalidArgument
from kvd.layout import named
from kvd.layout.descriptor import Digit, Layout, Placed, Placement
from kvd.layout.notation import (
    fingerprint,
    from_toml,
    from_wire,
    layout,
    order_text,
    placed_from_wire,
    placed_to_wire,
    to_toml,
    to_wire,
)
from tests.unit.layout_oracle import TOML, layouts, placements

SIZES = {"l": 2, "h": 3, "t": 13, "d": 4}


def test_toml_is_what_the_name_is():
    mine, theirs = from_toml(TOML), named.get("tenstorrent", block=32)
    assert fingerprint(mine) == fingerprint(theirs)
    assert named.get(TOML) == mine
    assert mine.digits("t") == (Digit("B", 0), Digit("T", 1), Digit("F", 2), Digit("r", 16))


def test_a_fingerprint_stays():
    # sides compare them across releases: what it covers and how is part of the protocol
    assert fingerprint(named.get("nhd", block=16)) == "0cad92316618bb33a8180ba5861c65ce"
    assert fingerprint(named.get("nhd")) != fingerprint(named.get("hnd"))
    assert fingerprint(named.get("ascend")) == fingerprint(named.get("nhd"))


@pytest.mark.parametrize("name", named.NAMED)
def test_every_named_layout_goes_over_the_wire_and_into_a_file(name):
    made = named.get(name, block=32, shard=4)
    assert from_wire(msgpack.unpackb(msgpack.packb(to_wire(made)))) == made
    assert from_toml(to_toml(made)) == made


@settings(max_examples=50, deadline=None)
@given(layouts(SIZES, 2), st.data())
def test_so_does_every_other(made, data):
    assert from_wire(msgpack.unpackb(msgpack.packb(to_wire(made)))) == made
    placed = data.draw(placements(made, {axis: (1, size + 1) for axis, size in SIZES.items()}))
    again = placed_from_wire(msgpack.unpackb(msgpack.packb(placed_to_wire(placed))))
    assert (again.layout, dict(again.held), dict(again.room)) == (placed.layout, placed.held, placed.room)
    for mine, theirs in ((again.table, placed.table), (again.bases, placed.bases)):
        assert (mine is None) == (theirs is None)
        assert mine is None or mine.tolist() == theirs.tolist()


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
WIRE = placed_to_wire(
    Placed(
        named.get("tenstorrent", block=32),
        {"l": (0, 2), "kv": (0, 2), "h": (0, 2), "t": (0, 60), "d": (0, 64)},
        {"B": 4},
        np.array([3, 1], np.int64),
    )
)
PATHS = [
    *[(name,) for name in WIRE],
    *[("layout", name) for name in WIRE["layout"]],
    *[("layout", "placement", name) for name in WIRE["layout"]["placement"]],
    ("layout", "axes", "t"),
    ("held", "t"),
    ("room", "B"),
]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PATHS), JUNK | st.text(alphabet="ltBhd|:*0123 ", max_size=24))
def test_hostile_messages_are_refused_or_read(path, junk):
    fields = msgpack.unpackb(msgpack.packb(WIRE))
    inside = fields
    for step in path[:-1]:
        inside = inside[step]
    inside[path[-1]] = junk
    with contextlib.suppress(InvalidArgument):
        assert placed_from_wire(fields).geometry.channel_bytes > 0


@pytest.mark.parametrize(
    ("order", "axes", "message"),
    [
        ("t d", {"t": "B:* *:3"}, "a digit is a name"),
        ("t d", {"t": "B:* N:x"}, "a digit is a name"),
        ("B N d", {"t": "B:* N:*"}, "which only its first can be"),
        ("t d", {"t": "B:* N:4"}, "is factored"),
        ("B d", {"t": "B:* N:4"}, "each digit must be once in both"),
        ("B B N d", {"t": "B:* N:4"}, "each digit must be once in both"),
        ("B | N | d", {"t": "B:* N:4"}, "one"),
        ("", {}, "the number of axes"),
        ("t d!", {}, "digits' names"),
        ("t d", {"t": ""}, "has no digits"),
        ("t d", {"t": "B:0"}, "a digit is a name"),
    ],
)
def test_text_that_makes_no_sense(order, axes, message):
    with pytest.raises(InvalidArgument, match=message):
        layout("x", order, axes, codec="bf16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TOML.replace('"bf16"', '"bf17"'), "no codec 'bf17'"),
        (TOML.replace('kind = "round-robin"', 'kind = "random"'), "no placement 'random'"),
        (TOML.replace("channels = 8", "channels = 0"), "channels is 0"),
        (TOML.replace("channels = 8", "channels = true"), "can't be a bool"),
        (TOML.replace('table = "B"', 'table = "T"'), "an axis's first digit"),
        (TOML.replace('table = "B"', 'table = "r"'), "before the page cut"),
        (TOML.replace("padding = true", "padding = false").replace("bf16", "bfp8_b"), "whole pages only"),
        (TOML.replace("order", "ordre"), "needs order"),
        (TOML.replace("codec", "codex = 1\ncodec"), "no field 'codex'"),
        ("name = ", "not TOML"),
        (TOML.replace("my-npu", "my npu"), "no name for a layout"),
    ],
)
def test_toml_that_makes_no_sense(text, message):
    with pytest.raises(InvalidArgument, match=message):
        from_toml(text)


HELD = {"l": (0, 2), "kv": (0, 2), "h": (0, 2), "t": (0, 60), "d": (0, 64)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"held": HELD | {"t": (5, 5)}}, "held range of axis t"),
        ({"held": {"t": (0, 60)}}, "has the axis"),
        ({"held": HELD | {"x": (0, 2)}}, "has no axis x"),
        ({"room": {}}, "say in room"),
        ({"room": {"B": 4, "r": 3}}, r"no \* digit"),
        ({"table": None}, "needs a block table"),
        ({"table": np.array([1], np.int64)}, "the 2 blocks"),
        ({"table": np.array([1, 1], np.int64)}, "twice"),
        ({"table": np.array([1, 4], np.int64)}, "names block 4"),
        ({"table": np.array([1, -1], np.int64)}, "names block -1"),
        ({"table": np.array([1, 2], np.int32)}, "int64"),
        ({"bases": np.zeros(4, np.int64)}, "overlap"),
        ({"bases": np.arange(4, dtype=np.int64) << 60}, "overlap"),
        ({"bases": np.zeros(3, np.int64)}, "give 4 int64"),
    ],
)
def test_numbers_that_do_not_fit(changes, message):
    fields = {"held": HELD, "room": {"B": 4}, "table": np.array([3, 1], np.int64), "bases": None} | changes
    with pytest.raises(InvalidArgument, match=message):
        Placed(named.get("tenstorrent", block=32), **fields)


def test_shards_that_are_too_few():
    made = named.get("tenstorrent-height", channels=4, shard=1)
    with pytest.raises(InvalidArgument, match="give shards of 2 pages"):
        Placed(made, HELD)
    with pytest.raises(InvalidArgument, match="flat placement has one channel"):
        Placement("flat", 2)


def test_orders_read_as_they_are_written():
    for text in ("l || t h d", "l || B | N h d", "B | N d", "| t d", "t d"):
        axes = {"t": "B:* N:4"} if "B" in text else {}
        made = layout("x", text, axes, codec="u8")
        assert layout("x", order_text(made), axes, codec="u8") == made
    assert isinstance(made, Layout)
