"""The verbs fabric under the conformance suite: over two devices, on both event loops."""

import itertools

import pytest

from tests.verbs.devices import DEVICES, needs_devices

pytestmark = needs_devices
pytest.register_assert_rewrite("kvd.fabric.conformance")

from kvd.fabric.conformance import FabricConformance  # noqa: E402


class OverTwoDevices(FabricConformance):
    @pytest.fixture
    def make_fabric(self):
        from kvd.fabric.verbs.fabric import VerbsFabric

        devices = itertools.cycle(DEVICES)
        return lambda: VerbsFabric(device=next(devices))


class TestVerbsOnAsyncio(OverTwoDevices):
    pass


class TestVerbsOnUvloop(OverTwoDevices):
    @staticmethod
    def loop_factory():
        import uvloop

        return uvloop.new_event_loop()


class TestVerbsWithALimit(OverTwoDevices):
    """The rate is far above what the tests need, but everything goes through the pacer."""

    @pytest.fixture
    def make_fabric(self):
        from kvd.fabric.verbs.fabric import VerbsFabric

        devices = itertools.cycle(DEVICES)
        return lambda: VerbsFabric(device=next(devices), rate=4e9)


# The guest is slow: what the pacer can't break is not run a third time.
PACED = {
    "test_write_and_read",
    "test_mixed_sizes_both_ways",
    "test_cancel_before_the_start",
    "test_close_fails_everything",
}
for name in dir(FabricConformance):
    if name.startswith("test_") and name not in PACED:
        setattr(TestVerbsWithALimit, name, None)
