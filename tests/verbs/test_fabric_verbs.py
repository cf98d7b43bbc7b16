"""The verbs fabric under the conformance suite: over two devices, on both event loops."""

import itertools

import pytest

from kvd.fabric.conformance import FabricConformance
from tests.verbs.devices import DEVICES, needs_devices

pytestmark = needs_devices


class OverTwoDevices(FabricConformance):
    rate = 0.0
    urgent_bound = 8 << 20
    large = 16 << 20  # an emulated CPU moves some 20 MB/s
    piece = 5000

    @pytest.fixture
    def make_fabric(self):
        from kvd.fabric.verbs.fabric import VerbsFabric

        devices = itertools.cycle(DEVICES)
        return lambda: VerbsFabric(device=next(devices), rate=self.rate)


@pytest.mark.race
class TestVerbsOnUvloop(OverTwoDevices):
    """The daemon's loop: everything."""

    @staticmethod
    def loop_factory():
        import uvloop

        return uvloop.new_event_loop()

    # On 10,000 writes in test_verbs_volume.
    test_no_mask_before_its_data = None
    test_many_small_operations = None


def only(suite, *names):
    """Leave the other tests out: the guest is slow."""
    for name in dir(FabricConformance):
        if name.startswith("test_") and name not in names:
            setattr(suite, name, None)
    return suite


class TestVerbsOnAsyncio(OverTwoDevices):
    """What leans on the loop: readers, timers, the order of callbacks."""


only(
    TestVerbsOnAsyncio,
    "test_messages_arrive_in_order",
    "test_on_message_that_fails",
    "test_loss_fails_everything",
    "test_close_of_the_fabric",
    "test_several_connections",
)


class TestVerbsWithALimit(OverTwoDevices):
    """The rate is far above what the tests need, but everything goes through the pacer."""

    rate = 4e9


only(TestVerbsWithALimit, "test_write_and_read", "test_cancel_before_the_start", "test_close_fails_everything")
