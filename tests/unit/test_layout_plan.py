"""Plans against the oracle: every element gets to its place, in the fewest runs, and nothing else is touched."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from kvd.errors import InvalidArgument
from kvd.layout.descriptor import Placed
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
    max_examples=100,
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
        layout = draw(layouts(widths, item, padding=padding if side else None))
        found.append(draw(placements(layout, held)))
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
@given(sides(), st.booleans())
def test_every_element_gets_to_its_place_in_the_fewest_runs(pair, partial):
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
    perform(plan, sources, memory)
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
