"""The loopback fabric under the conformance suite."""

import pytest

from kvd.fabric import registry

pytest.register_assert_rewrite("kvd.fabric.conformance")

from kvd.fabric.conformance import FabricConformance, FabricFaults  # noqa: E402


class TestLoopback(FabricConformance, FabricFaults):
    @pytest.fixture
    def make_fabric(self):
        return registry.factory("loopback")
