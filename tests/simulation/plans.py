"""What is drawn before the clock starts: requests, and what goes wrong with them."""

from __future__ import annotations

import collections
import dataclasses
import math
import random
from typing import TYPE_CHECKING

import msgspec

from kvd.importance.matrix import ImportanceMatrix
from kvd.transfer.policy import Profiled
from kvd_client.layouts import Placement
from kvd_client.protocol import MODES
from kvd_client.spec import KVSpec, MetadataSpec, TokenRange

from .tensors import draw_placement, draw_unit

if TYPE_CHECKING:
    from .world import World

WAYS = ("request", "handle", "announce", "both")
MISFITS: dict[str, str] = {
    "model": "FINGERPRINT_MISMATCH",
    "revision": "FINGERPRINT_MISMATCH",
    "dtype": "FINGERPRINT_MISMATCH",
    "lengths": "UNSUPPORTED_LAYOUT",
    "ranks": "UNSUPPORTED_LAYOUT",
    "head_start": "UNSUPPORTED_LAYOUT",
    "metadata": "UNSUPPORTED_LAYOUT",
    "mode": "INVALID_ARGUMENT",
}
"""In what a wrong sink can differ, and the code with which it is refused."""


@dataclasses.dataclass(eq=False)
class Plan:
    """One request: everything that is decided before the clock starts."""

    request: str
    sink_request: str
    source: str
    sink: str
    way: str
    """How the two sides meet: one of :data:`WAYS`."""
    ranks: int
    spec: KVSpec
    heads: int
    lengths: tuple[int, ...]
    source_room: int
    sink_room: int
    held: tuple[TokenRange, ...]
    deadline_s: float
    metadata: tuple[MetadataSpec, ...] = ()
    landing: tuple[int, int] = (0, 0)
    """Entries and slots."""
    source_mode: str = ""
    sink_mode: str = ""
    prefill_s: float = 0.0
    source_placement: Placement | None = None
    sink_placement: Placement | None = None
    """Tensors in a layout of their own, at either end."""
    unit: str = ""
    pull: bool = False
    misfit: str = ""
    """The first sink differs in this."""
    rival: str = ""
    """A second node that wants the same request."""
    retries: int = 0
    disturbed: str = ""
    """Why this request need not end well; empty: it must."""
    handles: dict[int, str] = dataclasses.field(default_factory=dict)
    """The source's newest handle, by rank."""
    codes: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """How its parts ended, by ``source``, ``sink``, ``misfit`` and ``rival``."""
    answers: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """How its fetches ended."""
    paths: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Bytes that its sinks received, by path."""

    @property
    def grain(self) -> int:
        """Tokens that go together, whatever else."""
        placements = (self.source_placement, self.sink_placement)
        return math.lcm(*(placement.block_tokens for placement in placements if placement is not None))

    @property
    def nodes(self) -> set[str]:
        return {self.source, self.sink, self.rival}


def make_plan(world: World, number: int, nodes: list[str]) -> Plan:
    rng = world.rng
    source, sink = rng.sample(nodes, 2)
    rows = rng.choice((1, 1, 2))
    longest = rng.choice((3, 12, 12))
    lengths = tuple(rng.randint(1, longest) for _ in range(rows))
    heads, ranks = rng.choice((1, 2)), rng.choice((1, 1, 1, 2, 3))
    layers, entry_bytes = rng.choice((1, 2, 3, 4)), rng.choice((1, 3, 4))
    spec = KVSpec(layers=layers, kv_heads=heads * ranks, entry_bytes=entry_bytes, dtype="fp16", model="m")
    if rng.random() < 0.15:
        spec = msgspec.structs.replace(spec, windows=tuple(rng.choice((0, 2, 5)) for _ in range(spec.layers)))
    way = rng.choice(WAYS)
    held: list[TokenRange] = []
    if rng.random() < 0.3:
        for row, length in enumerate(lengths):
            start = rng.choice((0, 0, rng.randint(0, length)))
            held.append(TokenRange(row, start, rng.randint(start, length)))
    plan = Plan(
        request=f"r{number}",
        sink_request=f"r{number}" if way != "handle" or rng.random() < 0.5 else f"other-{number}",
        source=source, sink=sink, way=way, ranks=ranks, spec=spec, heads=heads, lengths=lengths,
        source_room=max(lengths) + rng.choice((0, 0, 2)), sink_room=max(lengths) + rng.choice((0, 0, 3)),
        held=tuple(held), deadline_s=60.0,
    )  # fmt: skip
    if rng.random() < 0.7:  # full transfer is the other 30 %, and a part of these
        plan.source_mode, plan.sink_mode = rng.choice(("", *MODES)), rng.choice(("", "", *MODES))
        plan.prefill_s = rng.choice((0.0, 0.5, 2.0))
        plan.landing = rng.choice(((0, 0), (1, 1), (3, 2), (3, 2)))
        plan.landing = (min(plan.landing[0], plan.sink_room), plan.landing[1])
        if rng.random() < 0.4:
            names = ("keys", "hashes")[: rng.choice((1, 2))]
            plan.metadata = tuple(MetadataSpec(name=name, layer_bytes=rng.choice((1, 20, 64))) for name in names)
        if rng.random() < 0.6:
            world.profiled[plan.request] = _profiled(rng, spec)
    _draw_tensors(rng, plan)
    if ranks == 1 and rng.random() < 0.2:
        plan.misfit = rng.choice(tuple(MISFITS))
    elif ranks == 1 and len(nodes) > 2 and way == "request" and rng.random() < 0.3:
        plan.rival = next(node for node in nodes if node not in (source, sink))
    return plan


def _draw_tensors(rng: random.Random, plan: Plan) -> None:
    """Some sinks, and some sources, have their tensors in blocks of a layout; what is held then are whole blocks."""
    entry = plan.spec.entry_bytes
    if rng.random() < 0.4:
        plan.sink_placement = draw_placement(rng, entry)
        plan.pull = rng.random() < 0.5
        if rng.random() < 0.3:
            plan.sink_mode = "full"  # the only one that has units of a layer or all
        if plan.pull:
            # Each piece takes two more messages and the time of a regroup: in a world of slow links and pieces of a
            # token, a minute is too short for an undisturbed transfer.
            plan.deadline_s *= 4
        plan.unit = draw_unit(rng, plan.sink_mode)
    if rng.random() < 0.15 and plan.landing == (0, 0):
        plan.source_placement = draw_placement(rng, entry)
    grain = plan.grain
    plan.held = tuple(
        TokenRange(r.row, r.start // grain * grain, max(r.start, r.stop) // grain * grain) for r in plan.held
    )


def _profiled(rng: random.Random, spec: KVSpec) -> Profiled:
    """What is known of such requests: an importance of each block, and two times."""
    blocks = rng.choice((1, 3, 8))
    values = [[rng.random() for _ in range(blocks)] for _ in range(spec.layers)]
    matrix = rng.choice((None, ImportanceMatrix(values)))
    return Profiled(matrix, prefill_s=rng.choice((0.0, 0.3, 1.0)), transfer_s=rng.choice((0.0, 1.0)))


def draw_fault(rng: random.Random) -> str:
    """What one attempt's process does wrong, if anything."""
    return rng.choice(("", "", "", "", "abort", "release", "kill", "reject", "duplicate", "nonsense"))
