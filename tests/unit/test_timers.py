"""The heap of limits says what looking at all parts would say."""

from __future__ import annotations

import dataclasses
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from kvd.transfer.part import Part
from kvd.transfer.timers import SLACK, Timers


@dataclasses.dataclass
class Limited:
    """What timers see of a part."""

    transfer: int
    expiry: float
    ended: bool = False


class World:
    """Parts, their timers, and what must hold after every step."""

    def __init__(self) -> None:
        self.parts: dict[int, Limited] = {}
        self.timers = Timers(cast(dict[int, Part], self.parts))
        self.opened = 0

    def running(self) -> list[Limited]:
        return [part for part in self.parts.values() if not part.ended]

    def set(self, part: Limited) -> None:
        self.timers.set(cast(Part, part))

    def open(self, expiry: float) -> None:
        self.opened += 1
        part = self.parts[self.opened] = Limited(self.opened, expiry)
        self.set(part)

    def check(self) -> None:
        assert self.timers.next() == min((part.expiry for part in self.running()), default=None)


STEPS = st.lists(
    st.tuples(st.sampled_from(("open", "sooner", "later", "end", "forget", "tick")), st.integers(0, 50)), max_size=60
)


@given(steps=STEPS)
def test_whatever_becomes_of_parts(steps: list[tuple[str, int]]) -> None:
    world, now = World(), 0
    for what, number in steps:
        some = world.running()
        part = some[number % len(some)] if some else None
        match what:
            case "open":
                world.open(now + number)
            case "tick":
                now += number // 10
                due = [part.transfer for part in some if part.expiry <= now]
                expired = world.timers.expired(now)
                assert [part.transfer for part in expired] == due
                for one in expired:
                    cast(Limited, one).ended = True
            case "sooner" if part:
                part.expiry = max(now, part.expiry - number)
                world.set(part)
            case "later" if part:
                part.expiry += number
            case "end" if part:
                part.ended = True
            case "forget" if part:
                del world.parts[part.transfer]
        world.check()


def test_what_is_out_of_date_does_not_pile_up() -> None:
    """Transfers that end long before their deadline, as nearly all do."""
    world = World()
    for _ in range(10_000):
        world.open(600.0)
        del world.parts[world.opened]
        assert len(world.timers._heap) <= 2 * 1 + SLACK
    world.check()
