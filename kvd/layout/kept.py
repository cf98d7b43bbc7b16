"""Plans that were made, for whoever needs the same again: another layer, or another transfer of the same form.

A plan says what lies how far from what. Where it has been made once, it serves wherever both ends' tensors lie in the
same way: its source addresses then count from elsewhere (:attr:`~kvd.layout.steps.RegroupPlan.shift`), and its
requests go elsewhere. So layers of one transfer, and transfers of one length from one engine to another, share it.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from kvd.layout.descriptor import Placed
from kvd.layout.plan import check_convertible, check_pages, plan_regroup
from kvd.layout.steps import RegroupPlan

MAX_BYTES = 32 << 20
"""Of addresses that are kept: those of a dozen layers of 100,000 tokens, say."""
ENTRY_BYTES = 1 << 10
"""What a plan costs beside."""
MAX_FORMS = 4096


class Plans:
    """The plans that were used last, ``limit`` bytes of addresses in all. Not thread-safe."""

    def __init__(self, limit: int = MAX_BYTES) -> None:
        self.limit = limit
        self.nbytes = 0
        self.made = 0
        """Plans that were not there when they were asked for."""
        self._kept: collections.OrderedDict[Hashable, tuple[int, int, RegroupPlan]] = collections.OrderedDict()
        """Where the first tensor lay at the source and at the target, and the plan."""
        self._forms: dict[Hashable, int] = {}
        self._next_form = 0
        self._fitting: set[tuple[int, int, bool]] = set()

    def number(self, form: Hashable) -> int:
        """A number for a form: the same for equal ones, and never another's."""
        found = self._forms.get(form)
        if found is None:
            if len(self._forms) >= MAX_FORMS:
                self._forms.clear()
            found = self._forms[form] = self._next_form
            self._next_form += 1
        return found

    def check(self, source: Placed, target: Placed, *, pages_only: bool = False) -> None:
        """As :func:`~kvd.layout.plan.check_convertible`, or :func:`~kvd.layout.plan.check_pages` with ``pages_only``;
        what has passed once is not looked at again."""
        key = End(source, self).form, End(target, self).form, pages_only
        if key in self._fitting:
            return
        (check_pages if pages_only else check_convertible)(source, target)
        if len(self._fitting) >= MAX_FORMS:
            self._fitting.clear()
        self._fitting.add(key)

    def plan(
        self,
        source: End,
        target: End,
        layers: tuple[int, int],
        tokens: npt.NDArray[np.int64],
        heads: tuple[int, int] | None,
    ) -> RegroupPlan:
        """What brings ``tokens``, (n, 2) ranges, of ``layers``, first and last excluded, over; of ``heads``, None: all.
        Raises as :func:`~kvd.layout.plan.plan_regroup`."""
        (here, mine), (there, theirs) = source.spot(*layers), target.spot(*layers)
        key = (source.form, target.form, mine, theirs, heads, tokens.tobytes())
        kept = self._kept.get(key)
        if kept is not None and here >= kept[0]:
            self._kept.move_to_end(key)
            return _moved(kept[2], here - kept[0], there - kept[1])
        within: dict[str, tuple[int, int] | npt.NDArray[np.int64]] = {"l": layers, "t": tokens}
        if heads is not None:
            within["h"] = heads
        made = plan_regroup(source.placed, target.placed, within)
        self.made += 1
        if kept is not None:  # this one lies lower: the other can be moved from it
            del self._kept[key]
            self.nbytes -= _size(kept[2])
        self._kept[key] = here, there, made
        self.nbytes += _size(made)
        while self.nbytes > self.limit:
            _, (_, _, oldest) = self._kept.popitem(last=False)
            self.nbytes -= _size(oldest)
        return made


class End:
    """One end's tensors of one row, as plans are found by: ``form`` is all that they have but their places."""

    def __init__(self, placed: Placed, plans: Plans) -> None:
        self.placed = placed
        self._by_layer = _by_layer(placed)
        self._first = placed.held.get("l", (0, 1))[0]
        table = None if placed.table is None else _digest(placed.table)
        form = (placed.layout, tuple(sorted(placed.held.items())), tuple(sorted(placed.room.items())), table)
        # Where layers are no tensors of their own, a plan stays where it was made.
        self.form = plans.number(form if self._by_layer is not None else (*form, _digest(placed.geometry.bases)))

    def spot(self, first: int, last: int) -> tuple[int, tuple[int, bytes]]:
        """Where the tensors of layers ``first`` to ``last`` begin, and how the others lie from there."""
        if self._by_layer is None:
            return 0, (last - first, first.to_bytes(8, "little"))
        bases = self._by_layer[first - self._first : last - self._first]
        start = int(bases[0, 0])
        return start, (last - first, _digest(bases - start))


def _by_layer(placed: Placed) -> npt.NDArray[np.int64] | None:
    """The bases of each layer's tensors, (layers, tensors of one); None where layers share tensors."""
    layout, geometry = placed.layout, placed.geometry
    digits = layout.digits("l")
    if len(digits) != 1 or digits[0].name not in layout.tensors:
        return None
    name = digits[0].name
    number = np.arange(geometry.tensors) // geometry.weight[name] % geometry.radix[name]
    order = np.argsort(number, kind="stable")
    return geometry.bases[order].reshape(geometry.radix[name], -1)


def _moved(plan: RegroupPlan, here: int, there: int) -> RegroupPlan:
    if not here and not there:
        return plan
    return dataclasses.replace(plan, shift=plan.shift + here, requests=plan.requests + np.array([0, 0, there, 0]))


def _digest(numbers: npt.NDArray[np.int64]) -> bytes:
    """Peers may name as many blocks as they like: keys shall not grow with them."""
    return hashlib.blake2b(numbers.tobytes(), digest_size=16).digest()


def _size(plan: RegroupPlan) -> int:
    pages = 0 if plan.decode is None else sum(offsets.nbytes for _, offsets in plan.decode.places)
    return (
        ENTRY_BYTES + plan.requests.nbytes + plan.zero.nbytes + pages + sum(copy.places.nbytes for copy in plan.copies)
    )
