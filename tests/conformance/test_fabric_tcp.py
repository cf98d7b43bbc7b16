"""The tcp fabric under the conformance suite: over 127.0.0.1, on both event loops, and with other limits."""

import functools

import pytest
import uvloop

from kvd.fabric.conformance import MIB, FabricConformance, FabricFaults
from kvd.fabric.tcp import TcpFabric


class TestTcpOnAsyncio(FabricConformance):
    @pytest.fixture
    def make_fabric(self):
        return TcpFabric


class TestTcpOnUvloop(FabricConformance):
    loop_factory = staticmethod(uvloop.new_event_loop)

    @pytest.fixture
    def make_fabric(self):
        return TcpFabric


class TestTcpWithSmallFrames(FabricConformance):
    """Every operation is cut, and the window is always full."""

    loop_factory = staticmethod(uvloop.new_event_loop)
    large = 16 * MIB  # eighty windows

    @pytest.fixture
    def make_fabric(self):
        return functools.partial(TcpFabric, frame_bytes=50_001, inflight_bytes=200_003, unsent_bytes=16_384)


class TestTcpWithALimit(FabricConformance):
    """The rate is far above what the tests need, but everything goes through the pacer. No checksums."""

    loop_factory = staticmethod(uvloop.new_event_loop)

    @pytest.fixture
    def make_fabric(self):
        return functools.partial(TcpFabric, rate=4e9, checksums=False)


class TestTcpAuthentic(FabricConformance, FabricFaults):
    """Every frame has a code that only the two ends can compute."""

    loop_factory = staticmethod(uvloop.new_event_loop)

    @pytest.fixture
    def make_fabric(self):
        return functools.partial(TcpFabric, level="authentic", frame_bytes=300_001)


class TestTcpSecret(FabricConformance, FabricFaults):
    """Everything crosses in encrypted records."""

    loop_factory = staticmethod(uvloop.new_event_loop)

    @pytest.fixture
    def make_fabric(self):
        return functools.partial(TcpFabric, level="secret")


class TestTcpFaults(FabricFaults):
    @pytest.fixture
    def make_fabric(self):
        return TcpFabric


class TestTcpFaultsWithSmallFrames(FabricFaults):
    loop_factory = staticmethod(uvloop.new_event_loop)

    @pytest.fixture
    def make_fabric(self):
        return functools.partial(TcpFabric, frame_bytes=50_001, inflight_bytes=200_003, unsent_bytes=16_384)
