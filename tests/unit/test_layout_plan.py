"""Plans against the oracle: every element gets to its place, in the fewest runs, and nothing else is touched."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from kvd_kernels.regrouping import MAX_DIMS

from kvd.errors import InvalidArgument
from kvd.layout.descriptor import Placed, Placement
from kvd.layout.execute import regroup
from kvd.layout.notation import layout
from kvd.layout.plan import plan_direct, plan_regroup
from tests.unit.layout_oracle import (
    Oracle,
    fill,
    layouts,
    perform,
    placements,
    positions,
    run_count,
    value_of,
)

AXES = {"l": 2, "h": 3, "t": 13, "d": 4}

few = settings(
    max_examples=60,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@st.composite
def sides(draw, padding: bool | None = None) -> tuple[Placed, Placed, int]:
    """Two layouts of one tensor, which need not hold the same parts of it."""
    item = draw(st.sampled_from((1, 2, 3, 16)))
    sizes = {axis: draw(st.integers(1, size)) for axis, size in AXES.items()}
    found = []
    for side in range(2):
        held = {}
        for axis, size in sizes.items():
            start = draw(st.integers(0, size - 1)) if draw(st.integers(0, 3)) == 0 else 0
            stop = draw(st.integers(start + 1, size)) if draw(st.integers(0, 3)) == 0 else size
            held[axis] = (start, stop)
        widths = {axis: stop - start for axis, (start, stop) in held.items()}
        made = draw(layouts(widths, item, padding=padding if side else None))
        found.append(draw(placements(made, held)))
    return found[0], found[1], item


def shared(source: Placed, target: Placed) -> dict[str, list[int]]:
    return {
        axis: list(
            range(max(source.held[axis][0], target.held[axis][0]), min(source.held[axis][1], target.held[axis][1]))
        )
        for axis in AXES
    }


def expected(
    oracle: Oracle, chosen: list[dict[str, int]], ranges: dict[str, list[int]], whole: bool
) -> tuple[list, list]:
    """The target's memory afterwards, and a mark on every byte that is written."""
    memory = oracle.memory()
    marks = [np.zeros(len(one), np.bool_) for one in memory]
    if whole:
        reach = {
            axis: [
                *one,
                *(range(one[-1] + 1, oracle.padded_stop(axis)) if one[-1] + 1 == oracle.placed.held[axis][1] else ()),
            ]
            for axis, one in ranges.items()
        }
        for position in positions(reach):
            channel, offset = oracle.page(position)
            marks[channel][offset : offset + oracle.stride] = True
            memory[channel][offset : offset + oracle.stride] = 0
    for position in chosen:
        channel, offset = oracle.element(position)
        marks[channel][offset : offset + oracle.item] = True
        memory[channel][offset : offset + oracle.item] = np.frombuffer(value_of(position, oracle.item), np.uint8)
    return memory, marks


@few
@given(sides(), st.booleans(), st.sampled_from((1, 40, 1 << 20)))
def test_every_element_gets_to_its_place_in_the_fewest_runs(pair, partial, turn_bytes):
    source, target, item = pair
    reader, writer = Oracle(source, item), Oracle(target, item)
    ranges = shared(source, target)
    chosen = positions(ranges)
    held = positions({axis: list(range(*source.held[axis])) for axis in AXES})
    sources = fill(reader, held)
    try:
        plan = plan_regroup(source, target, partial=partial)
    except InvalidArgument:
        # a page of the target has elements that the source doesn't hold
        assert target.layout.padding
        assert not partial
        pages = {writer.page(position) for position in chosen}
        everywhere = positions({axis: list(range(*target.held[axis])) for axis in AXES})
        assert sum(writer.page(position) in pages for position in everywhere) > len(chosen)
        return
    memory = writer.memory()
    perform(plan, sources, memory, turn_bytes)
    if not chosen:
        assert len(plan.requests) == 0
        return
    wanted, marks = expected(writer, chosen, ranges, target.layout.padding and not partial)
    for got, want in zip(memory, wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    assert len(plan.requests) == run_count(marks)
    assert plan.requests[:, 3].sum() == sum(int(mark.sum()) for mark in marks) == plan.staging_bytes
    assert plan.payload_bytes == len(chosen) * item
    # staging has each channel's share in one piece
    np.testing.assert_array_equal(plan.requests[:, 0], np.cumsum(plan.requests[:, 3]) - plan.requests[:, 3])
    assert (np.diff(plan.requests[:, 1]) >= 0).all()


@few
@given(sides())
def test_there_and_back_is_the_identity(pair):
    source, target, item = pair
    ranges = shared(source, target)
    chosen = positions(ranges)
    assume(chosen)
    reader, writer = Oracle(source, item), Oracle(target, item)
    there, back = writer.memory(), reader.memory()
    perform(plan_regroup(source, target, partial=True), fill(reader, chosen), there)
    perform(plan_regroup(target, source, partial=True), there, back)
    for got, want in zip(back, fill(reader, chosen), strict=True):
        np.testing.assert_array_equal(got, want)


@few
@given(sides())
def test_direct_requests_are_contiguous_on_both_sides(pair):
    source, target, item = pair
    ranges = shared(source, target)
    chosen = positions(ranges)
    reader, writer = Oracle(source, item), Oracle(target, item)
    sources, memory = fill(reader, chosen), writer.memory()
    found = plan_direct(source, target)
    for one, requests in found.items():
        for start, channel, to, length in requests.tolist():
            memory[channel][to : to + length] = sources[one][start : start + length]
    wanted, _ = expected(writer, chosen, ranges, False)
    for got, want in zip(memory, wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    # one request where both addresses go on by an element, from the one before in the target
    after = {}
    for position in chosen:
        after[writer.element(position)] = reader.element(position)
    breaks = sum(
        after.get((channel, offset - item)) != (here[0], here[1] - item) for (channel, offset), here in after.items()
    )
    assert sum(len(requests) for requests in found.values()) == breaks


@few
@given(sides(padding=False), st.data())
def test_parts_together_are_the_whole(pair, data):
    source, target, item = pair
    ranges = shared(source, target)
    chosen = positions(ranges)
    assume(chosen)
    axis = data.draw(st.sampled_from(sorted(AXES)))
    picked = data.draw(st.sets(st.sampled_from(ranges[axis])))
    reader, writer = Oracle(source, item), Oracle(target, item)
    sources, memory = fill(reader, chosen), writer.memory()
    low, high = ranges[axis][0], ranges[axis][-1] + 1
    for part in (picked, set(ranges[axis]) - picked):
        table = np.array([(one, one + 1) for one in part], np.int64).reshape(-1, 2)
        perform(plan_regroup(source, target, {axis: table}), sources, memory)
    whole = writer.memory()
    perform(plan_regroup(source, target, {axis: (low, high)}), sources, whole)
    for got, want in zip(memory, whole, strict=True):
        np.testing.assert_array_equal(got, want)


@few
@given(sides(), st.data())
def test_locate_is_where_elements_are(pair, data):
    placed, _, item = pair
    oracle = Oracle(placed, item)
    everywhere = positions({axis: list(range(*placed.held[axis])) for axis in AXES})
    some = data.draw(st.lists(st.sampled_from(everywhere), min_size=1, max_size=8))
    channel, offset = placed.locate(**{axis: [position[axis] for position in some] for axis in AXES})
    assert list(zip(channel.tolist(), offset.tolist(), strict=True)) == [oracle.element(position) for position in some]


class TestExecution:
    HELD: ClassVar = {"t": (0, 64), "d": (0, 64)}

    def plan(self):
        source = Placed(layout("plain", "t d", codec="bf16"), self.HELD)
        tiles = {"t": "T:* F:2 r:16", "d": "D:* G:2 c:16"}
        target = Placed(layout("tiles", "T D | F G r c", tiles, codec="bf16", padding=True), self.HELD)
        return plan_regroup(source, target), plan_regroup(target, source)

    def test_memory_that_is_too_short(self):
        there, _ = self.plan()
        with pytest.raises(InvalidArgument, match="needs 8192"):
            regroup(there, [bytes(8192)], bytearray(8191))
        with pytest.raises(InvalidArgument, match="too short"):
            regroup(there, [bytes(8191)], bytearray(8192))

    def test_channels_that_are_missing(self):
        channels = Placement("round-robin", 3, 64)
        source = Placed(layout("pages", "t | d", codec="bf16", placement=channels), self.HELD)
        plan = plan_regroup(source, Placed(layout("plain", "t d", codec="bf16"), self.HELD))
        memory = [bytearray(source.channel_bytes) for _ in range(3)]
        regroup(plan, memory, bytearray(plan.staging_bytes))
        with pytest.raises(InvalidArgument, match="reads source channel 2, but there are 2"):
            regroup(plan, memory[:2], bytearray(plan.staging_bytes))

    def test_block_pages_that_are_missing(self):
        tiles = {"t": "T:* F:2 r:16", "d": "D:* G:2 c:16"}
        source = Placed(layout("tiles", "T D | F G r c", tiles, codec="bfp8_b", padding=True), self.HELD)
        plan = plan_regroup(source, Placed(layout("plain", "t d", codec="bf16"), self.HELD))
        with pytest.raises(InvalidArgument, match="source channel 0"):
            regroup(plan, [bytearray(4 * 1088 - 1)], bytearray(plan.staging_bytes))

    def test_dims_beyond_the_kernels_become_boxes(self):
        digits = [f"b{n}" for n in range(11)]
        axes = {"t": " ".join(f"{name}:2" for name in digits)}
        source = Placed(layout("bits", " ".join(digits), axes, codec="u16"), {"t": (0, 2048)})
        target = Placed(layout("reversed", " ".join(digits[::-1]), axes, codec="u16"), {"t": (0, 2048)})
        plan = plan_regroup(source, target)
        assert all(len(copy.shape) <= MAX_DIMS for copy in plan.copies)
        out = np.empty(2048, np.uint16)
        regroup(plan, [np.arange(2048, dtype=np.uint16)], out)
        assert out.tolist() == [int(f"{n:011b}"[::-1], 2) for n in range(2048)]


def test_plans_are_bounded():
    held = {"t": (0, 1 << 24), "d": (0, 64)}
    source = Placed(layout("plain", "t d", codec="u8"), held)
    columns = Placed(layout("columns", "d | t", codec="u8", placement=Placement("round-robin", 2)), held)
    with pytest.raises(InvalidArgument, match="too many for one plan"):
        plan_direct(source, columns)
    with pytest.raises(InvalidArgument, match="16777216 at most"):
        Placed(layout("plain", "t d", codec="u8"), held | {"t": (0, 1 << 25)})
    with pytest.raises(InvalidArgument, match="tensors"):
        Placed(layout("many", "t || d", codec="u8"), held)


@pytest.mark.parametrize("kind", ["sharded", "round-robin"])
@pytest.mark.parametrize("padding", [False, True])
def test_shards_of_one_channel_may_have_room_behind_a_tensor(kind, padding):
    held = {"l": (0, 3), "t": (0, 3), "d": (0, 4)}
    shards = layout("shards", "l || t | d", codec="u8", placement=Placement(kind, 1, 8, shard_pages=5), padding=padding)
    source, target = Placed(layout("plain", "l t d", codec="u8"), held), Placed(shards, held)
    values = np.arange(36, dtype=np.uint8)
    for plan in (plan_regroup(source, target), plan_regroup(source, target, {"l": (1, 3)})):
        staging, out = np.empty(plan.staging_bytes, np.uint8), np.full(target.channel_bytes, 0xEE, np.uint8)
        regroup(plan, [values], staging)
        for start, _, to, length in plan.requests.tolist():
            out[to : to + length] = staging[start : start + length]
        assert len(out) == 3 * 5 * 8
        first = 0 if plan.requests[0, 2] == 0 else 1
        found = out.reshape(3, 5, 8)
        np.testing.assert_array_equal(found[first:, :3, :4], values.reshape(3, 3, 4)[first:])
        assert (found[:first] == 0xEE).all()
        assert (found[first:, 3:] == 0xEE).all()


@pytest.mark.parametrize("range_", [(0, 1), (3, 4)])
def test_an_axis_of_one_may_be_unknown_to_the_other_side(range_):
    held = {"t": (0, 3), "d": (0, 4)}
    mine = Placed(layout("rows", "b t | d", codec="u8", padding=True), held | {"b": range_})
    theirs = Placed(layout("columns", "d | t", codec="u8", padding=True), held)
    values = np.arange(12, dtype=np.uint8)
    for source, target, wanted in ((mine, theirs, values.reshape(3, 4).T), (theirs, mine, values.reshape(4, 3).T)):
        plan = plan_regroup(source, target)
        staging = np.empty(plan.staging_bytes, np.uint8)
        regroup(plan, [values], staging)
        np.testing.assert_array_equal(staging, wanted.reshape(-1))


def test_sides_that_share_nothing_get_an_empty_plan():
    made = layout("plain", "t d", codec="u8")
    plan = plan_regroup(Placed(made, {"t": (0, 4), "d": (0, 2)}), Placed(made, {"t": (4, 8), "d": (0, 2)}))
    assert (plan.copies, len(plan.requests), plan.staging_bytes, plan.by_channel()) == ((), 0, 0, {})


@pytest.mark.parametrize(
    ("within", "message"),
    [
        ({"x": (0, 1)}, "there is no axis 'x'"),
        ({"t": (3, 2)}, "go backwards"),
        ({"t": (-1, 2)}, "begin before 0"),
        ({"t": np.array([(0, 3), (2, 4)])}, "overlap"),
    ],
)
def test_ranges_that_make_no_sense(within, message):
    placed = Placed(layout("plain", "t d", codec="u8"), {"t": (0, 4), "d": (0, 2)})
    with pytest.raises(InvalidArgument, match=message):
        plan_regroup(placed, placed, within)
