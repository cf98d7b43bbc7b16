"""The loopback fabric under the conformance suite."""

import pytest

from kvd.fabric import registry

pytest.register_assert_rewrite("kvd.fabric.conformance", "kvd.fabric.conformance_faults")

from kvd.fabric.conformance import FabricConformance  # noqa: E402
from kvd.fabric.conformance_faults import FabricFaults  # noqa: E402


class TestLoopback(FabricConformance, FabricFaults):
    @pytest.fixture
    def make_fabric(self):
        return registry.factory("loopback")
