"""The loopback fabric under the conformance suite."""

import pytest

from kvd.fabric import registry
from kvd.fabric.conformance import FabricConformance, FabricFaults


class TestLoopback(FabricConformance, FabricFaults):
    @pytest.fixture
    def make_fabric(self):
        return registry.factory("loopback")
