"""A world of a few nodes on a virtual clock, drawn from a seed: links, faults and requests, until all is quiet.

``World(seed).run()`` raises :class:`~tests.simulation.links.Violation` as soon as a rule is broken. The same seed
gives the same run, so that a failure is told again, this time with the story written down (:mod:`.story`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

from kvd.errors import ShuttingDown
from kvd.sim.clock import Clock
from kvd.transfer import events as ev
from kvd.transfer.core import Settings
from kvd.transfer.policy import Profiled, Selective
from kvd.types import Role
from kvd.wire import messages as wire
from kvd_client.protocol import MODES
from kvd_client.spec import TokenRange

from . import checks
from .links import BULK, CONTROL, URGENT, End, Session, Violation, in_order
from .memory import Slab
from .node import Node
from .plans import Plan, draw_fault, make_plan
from .requests import Attempt

MAX_STEPS = 40_000


class World:
    """``story``: a list to write everything down in, or None."""

    CALM = 0.35
    """How many of the worlds are."""
    CHUNKS: tuple[int, ...] = (1, 16, 40, 1000)
    SLABS: tuple[int, ...] = (6, 40)
    """Of a node."""

    def __init__(self, seed: int, story: list[tuple[float, Node | None, str, Any]] | None = None) -> None:
        self.seed = seed
        self.story = story
        self.rng = rng = random.Random(seed)
        self.clock = Clock()
        self.at = self.clock.at
        """Call something at a time."""
        self.most_steps = MAX_STEPS
        self.dirty: list[Slab] = []
        self.plans: list[Plan] = []
        self.attempts: list[Attempt] = []
        self.nodes: dict[str, Node] = {}
        self._clients = itertools.count(1)
        self.calm = rng.random() < self.CALM
        """Nothing goes wrong but what harmless strangers do."""
        self.before_closing: Callable[[], object] = lambda: None
        """Called once all is quiet, before the sessions are closed."""
        self.slow = rng.choice((0.0, 0.0, 0.05))
        self.queue_pairs = rng.choice((1, 1, 2, 4))
        """For bulk, of each session. Where there are several, each stalls now and then, as for a packet sent again."""
        self.connect_failure = 0.0 if self.calm else rng.choice((0.0, 0.1))
        chunk = rng.choice(self.CHUNKS)
        self.profiled: dict[str, Profiled] = {}
        """By request, which is also the selector's name."""
        selective = Selective(
            mode=rng.choice(("full", "full", *MODES)),
            budget=rng.choice(("fixed", "deadline")),
            speculative=rng.choice(("windows", "windows", "adaptive")),
            share=rng.choice((0.1, 0.3, 1.0)),
            blocks=rng.choice((1, 4, 1000)),
        )
        settings = Settings(
            rendezvous_s=20.0,
            chunk=chunk,
            window=chunk * rng.choice((1, 2, 4)),
            selective=selective,
            profiled=lambda spec, selector, lengths: self.profiled.get(selector, Profiled()),
        )
        for name in ("a", "b", "c", "d")[: rng.choice((2, 2, 3, 4))]:
            self.nodes[name] = Node(self, name, settings, self.SLABS[-1] if self.calm else rng.choice(self.SLABS))
        self.draw_load()

    def draw_load(self) -> None:
        """Decide who wants what, and what goes wrong."""
        rng = self.rng
        for number in range(rng.randint(1, 6)):
            self.add_request(make_plan(self, number, list(self.nodes)))
        for _ in range(rng.randint(0, 3)):
            self.at(rng.uniform(0.0, 6.0), self.stray)
        if not self.calm:
            self._add_faults()

    # --- the clock ----------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def steps(self) -> int:
        return self.clock.calls

    def delay(self) -> float:
        if self.slow and self.rng.random() < self.slow:
            return 0.5 + self.rng.random()
        return self.rng.random() * 0.02

    def stall(self) -> float:
        """How long a queue pair stands still before a write."""
        return self.rng.random() if self.queue_pairs > 1 and self.rng.random() < 0.04 else 0.0

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def run(self) -> None:
        self.until_quiet()
        self.before_closing()
        self.close()

    def until_quiet(self) -> None:
        """Go on until nothing is left to happen: everything has ended then, as it must, and was given back."""
        self.clock.run(self._check, every=1)
        for node in self.nodes.values():
            if node.up:
                checks.empty(node, sessions=False)
        for plan in self.plans:
            self._check_outcome(plan)

    def close(self) -> None:
        """End the sessions, and see that nothing remembers them."""
        for node in self.nodes.values():
            for end in list(node.ends.values()):
                self.break_session(end.session)
        self.clock.run(self._check, every=1)
        for node in self.nodes.values():
            if node.up:
                checks.empty(node, sessions=True)

    def _check(self) -> None:
        if self.steps > self.most_steps:
            raise Violation(f"no rest after {self.most_steps} steps")
        if self.dirty:
            self._check_memory()

    def _check_memory(self) -> None:
        for slab in self.dirty:
            for lease in slab.users:
                wrong = lease.wrong_bytes()
                if wrong:
                    record = lease.owner
                    raise Violation(f"{record.attempt.node.name}: part {record.transfer}: {wrong}", record.request)
        self.dirty.clear()

    def _check_outcome(self, plan: Plan) -> None:
        if plan.disturbed:
            return
        well = ["OK"] * plan.ranks
        source, sink = plan.codes.get("source"), plan.codes.get("sink")
        if plan.rival and source == well:
            winners = [codes for codes in (sink, plan.codes.get("rival")) if codes == ["OK"]]
            if len(winners) != 1:
                raise Violation(f"two sinks wanted {plan.request}: {plan.codes}", plan.request)
        elif source != well or sink != well:
            raise Violation(
                f"nothing disturbed request {plan.request} ({plan.way}, {plan.ranks} ranks), and it ended so: "
                f"{plan.codes}",
                plan.request,
            )

    # --- links --------------------------------------------------------------------------------------------------------

    def join(self, one: Node, other: Node) -> End:
        """A new session; returns the end of ``one``."""
        session = Session()
        ends = []
        for node in (one, other):
            end = End(session, node, node.life, node.next_session)
            node.next_session += 1
            node.ends[end.number] = end
            ends.append(end)
        session.ends = (ends[0], ends[1])
        return ends[0]

    def break_session(self, session: Session) -> None:
        if session.broken:
            return
        session.broken = True
        self.note(None, "session breaks between", " and ".join(end.node.name for end in session.ends))
        names = {end.node.name for end in session.ends}
        for plan in self.plans:
            if len(names & plan.nodes) > 1:
                self.disturb(plan, "session broke")
        for end in session.ends:
            if end.node.life == end.life:
                end.node.later(self.delay() * self.rng.choice((0, 1, 20)), end.node.lose, end)

    # --- requests -----------------------------------------------------------------------------------------------------

    def add_request(self, plan: Plan) -> None:
        rng = self.rng
        self.plans.append(plan)
        if not self.calm:
            plan.retries = rng.choice((0, 0, 2, 4))
            if rng.random() < 0.15:
                plan.deadline_s = rng.choice((0.05, 0.5, 3.0))
                self.disturb(plan, "short of time")
        source_at, sink_at = rng.choice((0.0, rng.uniform(0, 3))), rng.choice((0.0, rng.uniform(0, 3)))
        shared = rng.random() < 0.5
        clients = [self.new_client(), self.new_client()]
        for rank in range(plan.ranks):
            for role, when in ((Role.SOURCE, source_at), (Role.SINK, sink_at)):
                client = clients[role is Role.SINK] if shared else self.new_client()
                as_ = role.value if role is Role.SOURCE or not plan.misfit else "misfit"
                self.start_attempt(plan, role, rank, client, as_, when + rng.choice((0.0, 0.05, 0.5)))
        if plan.rival:
            self.start_attempt(plan, Role.SINK, 0, self.new_client(), "rival", rng.uniform(0, 3))

    def new_client(self) -> int:
        return next(self._clients)

    def start_attempt(self, plan: Plan, role: Role, rank: int, client: int, as_: str, after: float) -> None:
        attempt = Attempt(self, plan, role, rank, client, as_)
        self.attempts.append(attempt)
        attempt.node.later(after, attempt.open)
        if self.calm:
            return
        fault, when = draw_fault(self.rng), after + self.rng.choice((0.0, 0.1, 1.0, 4.0)) * self.rng.random()
        if fault == "duplicate":
            self.start_duplicate(attempt, when)
        elif fault:
            attempt.node.later(when, self._misbehave, attempt, fault)

    def start_duplicate(self, attempt: Attempt, when: float) -> None:
        """Another process opens the same once more; it is refused, or (first come) the other one is."""
        twin = Attempt(self, attempt.plan, attempt.role, attempt.rank, self.new_client(), attempt.as_)
        self.attempts.append(twin)
        self.disturb(attempt.plan, "opened by two")
        attempt.node.later(when, twin.open)

    def _misbehave(self, attempt: Attempt, fault: str) -> None:
        self.disturb(attempt.plan, fault)
        if fault == "abort":
            attempt.abort()
        elif fault == "release":
            attempt.release()
        elif fault == "kill":
            attempt.kill()
        elif fault == "nonsense":
            attempt.ring_nonsense()
        else:
            self._reject(attempt.plan)

    def _reject(self, plan: Plan) -> None:
        """The sink's node tells the source that nobody will come."""
        sink = self.nodes[plan.sink]
        end = next((e for e in sink.ends.values() if e.peer.node.name == plan.source and not e.session.broken), None)
        if end is not None:
            handle = self.rng.choice(("", plan.handles.get(0, "")))
            sink.transmit(end, wire.RejectHandle(handle=handle, request=plan.request, reason="no room"))

    def disturb(self, plan: Plan, why: str) -> None:
        if not plan.disturbed:
            plan.disturbed = why
            self.note(None, f"from now on {plan.request} may fail:", why)

    # --- strangers and faults -----------------------------------------------------------------------------------------

    def stray(self) -> None:
        """A peer names parts that are not its own, or not there: nothing may come of it."""
        rng = self.rng
        ends = [end for node in self.nodes.values() for end in node.ends.values() if not end.session.broken]
        if not ends:
            return
        end = rng.choice(ends)
        target = end.peer
        foreign = [t for t, record in target.node.records.items() if end.node.name not in record.attempt.plan.nodes]
        number = rng.choice([*foreign, 10_000])
        why: dict[str, Any] = {"code": "ABORTED", "message": "a stranger says so", "fields": {}}
        message = rng.choice(
            (
                wire.Accepted(transfer=number, source=1),
                wire.Refused(transfer=number, **why),
                wire.Delivered(transfer=number),
                wire.Abort(transfer=number, **why),
                wire.Idle(transfer=number, windows=100),
                wire.FetchFailed(transfer=number, fetch=rng.randint(1, 9), **why),
                wire.Fetch(transfer=number, sink=10_000, fetch=1, layer=0, counts=b"", index=b"", offset=0, stride=0),
                wire.Withdraw(sink=10_000, **why),
                wire.RejectHandle(handle="a/0123456789abcdef/1/0123456789abcdef", request="", reason="no"),
                wire.Announce(source=1, request="nobody's", rank=0),
            )
        )
        end.node.transmit(end, message)

    def stranger_answers(self, node: Node, transfer: int, fetch: int) -> None:
        """Sessions that a part does not belong to bring news of it."""
        for end in list(node.ends.values()):
            if end.number != node.core.parts[transfer].session and not end.session.broken:
                node.feed(ev.FetchArrived(end.number, wire.FetchArrived(transfer, fetch)))
                node.feed(ev.MetadataArrived(end.number, wire.MetadataArrived(transfer, 99)))
                if end.session.broken:
                    raise Violation(f"{node.name}: a stranger's news of part {transfer} ended its session")

    def _add_faults(self) -> None:
        rng = self.rng
        for _ in range(rng.choice((0, 0, 1, 2))):
            self.at(rng.uniform(0.0, 4.0), self.break_something)
        if rng.random() < 0.25:
            self.at(rng.uniform(0.0, 4.0), self.crash, rng.choice(list(self.nodes.values())))
        if rng.random() < 0.2:
            self.at(rng.uniform(0.0, 4.0), self.drain, rng.choice(list(self.nodes.values())))
        if rng.random() < 0.1:
            self.at(rng.uniform(0.0, 4.0), self.lie)
        if rng.random() < 0.3:
            self.at(rng.uniform(0.0, 4.0), self.hold_up, rng.choice((0.1, 1.0, 5.0)))

    def break_something(self) -> None:
        ends = [end for node in self.nodes.values() for end in node.ends.values() if not end.session.broken]
        if ends:
            self.break_session(self.rng.choice(ends).session)

    def hold_up(self, seconds: float) -> None:
        """What one end of a session sends is held up, and the other way all goes on: a link that is cut one way, or a
        node that stands still, for less than the time-outs. No reason to fail."""
        ends = [end for node in self.nodes.values() for end in node.ends.values() if not end.session.broken]
        if ends:
            end = self.rng.choice(ends)
            self.note(None, f"for {seconds:g} s nothing arrives of what is sent by", end.node.name)
            for connection in (CONTROL, URGENT, *range(BULK, BULK + self.queue_pairs)):
                in_order(end.last, connection, self.now + seconds)

    def _disturb_node(self, node: Node, why: str) -> None:
        for plan in self.plans:
            if node.name in plan.nodes:
                self.disturb(plan, why)

    def crash(self, node: Node) -> None:
        self._disturb_node(node, "node crashed")
        if node.up:
            self.note(node, "crashes", "")
            node.crash()
            self.at(self.now + self.rng.choice((0.1, 1.0, 5.0)), self._restart, node)

    def _restart(self, node: Node) -> None:
        """A new life: another boot id, empty memory, and processes that try again."""
        node.start()
        self.note(node, "starts", node.boot)
        for attempt in list(self.attempts):
            if attempt.node is node and attempt.record is not None and not attempt.dead:
                attempt.dead = True
                if attempt.plan.retries:
                    attempt.plan.retries -= 1
                    self.start_attempt(
                        attempt.plan, attempt.role, attempt.rank, self.new_client(), attempt.as_, self.rng.random()
                    )

    def drain(self, node: Node) -> None:
        self._disturb_node(node, "node drains")
        if node.up:
            node.feed(ev.DrainRequested())
            node.later(self.rng.choice((0.0, 0.5, 3.0)), self._stop, node)

    def _stop(self, node: Node) -> None:
        node.feed(ev.StopRequested(ShuttingDown("the daemon stops")))
        for record in node.records.values():
            if not record.code:
                raise Violation(f"{node.name}: stopped, and part {record.transfer} has not ended", record.request)
        self.crash(node)

    def lie(self) -> None:
        """A peer claims tokens or metadata that do not exist: the session must end."""
        for node in self.nodes.values():
            for transfer, part in node.core.parts.items():
                end = node.ends.get(part.session) if part.session is not None else None
                if part.role is Role.SINK and not part.ended and end is not None:
                    ranges = [TokenRange(0, 0, 1), TokenRange(0, 0, 1000)]
                    if self.rng.random() < 0.5:
                        node.feed(ev.TokensArrived(end.number, wire.Arrived(transfer, 0, ranges)))
                    else:
                        node.feed(ev.MetadataArrived(end.number, wire.MetadataArrived(transfer, 99)))
                    if not end.session.broken:
                        raise Violation(f"{node.name}: a lie about part {transfer} did not end the session")
                    return

    # --- the story ----------------------------------------------------------------------------------------------------

    def note(self, node: Node | None, what: str, thing: Any) -> None:
        if self.story is not None:
            self.story.append((self.now, node, what, thing))
