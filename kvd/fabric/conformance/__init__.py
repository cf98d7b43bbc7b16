"""The conformance suite of :mod:`kvd.fabric.base`, for every fabric, third parties' included. Needs pytest and NumPy.

Subclass it in a test module and say how the fabric is made::

    pytest.register_assert_rewrite("kvd.fabric.conformance")  # before the import, for pytest's explanations

    class TestMyFabric(FabricConformance, FabricFaults):
        @pytest.fixture
        def make_fabric(self):
            return MyFabric

``make_fabric`` is called twice a test, once for each end. Where the fabric needs streams it gets TCP connections over
127.0.0.1. Set ``loop_factory`` to run the tests on another event loop, and see :class:`Suite` for the sizes.

The promises are tested by subject: :class:`Moves`, :class:`Parts`, :class:`Accesses`, :class:`Stops` and
:class:`Ends`, which :class:`FabricConformance` has all of, and :class:`FabricFaults`, the bytes that change on the way.
"""

from kvd.fabric.conformance.accesses import Accesses
from kvd.fabric.conformance.ends import Ends
from kvd.fabric.conformance.faults import FabricFaults
from kvd.fabric.conformance.moves import Moves
from kvd.fabric.conformance.pairs import (
    MIB,
    Bytes,
    Mailbox,
    MemoryBringup,
    Pair,
    Side,
    connected,
    failure,
    memory_bringups,
    one,
    tcp_pair,
)
from kvd.fabric.conformance.parts import Parts
from kvd.fabric.conformance.stops import Stops
from kvd.fabric.conformance.suite import LIMIT_S, Suite, on_pair, open_descriptors

__all__ = [
    "LIMIT_S",
    "MIB",
    "Accesses",
    "Bytes",
    "Ends",
    "FabricConformance",
    "FabricFaults",
    "Mailbox",
    "MemoryBringup",
    "Moves",
    "Pair",
    "Parts",
    "Side",
    "Stops",
    "Suite",
    "connected",
    "failure",
    "memory_bringups",
    "on_pair",
    "one",
    "open_descriptors",
    "tcp_pair",
]


class FabricConformance(Moves, Parts, Accesses, Stops, Ends):
    """What the contract promises, test by test. A subclass has the fixture ``make_fabric``; see the package."""
