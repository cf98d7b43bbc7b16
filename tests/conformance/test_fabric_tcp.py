"""The tcp fabric under the conformance suite: over 127.0.0.1, on both event loops, and with other limits."""

import functools

import pytest
import uvloop

from kvd.fabric.tcp import TcpFabric

pytest.register_assert_rewrite("kvd.fabric.conformance")

from kvd.fabric.conformance import FabricConformance  # noqa: E402


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

    @pytest.fixture
    def make_fabric(self):
        return functools.partial(TcpFabric, frame_bytes=50_001, inflight_bytes=200_003, unsent_bytes=16_384)


class TestTcpWithALimit(FabricConformance):
    """The rate is far above what the tests need, but everything goes through the pacer."""

    loop_factory = staticmethod(uvloop.new_event_loop)

    @pytest.fixture
    def make_fabric(self):
        return functools.partial(TcpFabric, rate=4e9)
