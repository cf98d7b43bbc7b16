"""What the probes of a path come to at both ends; needs no device."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import FabricError
from kvd.fabric.verbs.path import Finding, Trouble, packet_bytes, path_error, unpack_finding
from tests.unit.test_verbs_wire import HELLO

PEER = msgspec.structs.replace(HELLO, gid="0000:0000:0000:0000:0000:ffff:0a4d:0002", mtu=5)
GOOD = Finding()


@dataclasses.dataclass(frozen=True)
class Case:
    trouble: Trouble
    says: str
    fix: str


CASES = [
    Case(Trouble.SILENT, "carries nothing", "UDP port 4791"),
    Case(Trouble.SHORT, "carries small packets, but none of 1024 bytes", "the same MTU"),
    Case(Trouble.DAMAGED, "changes what it carries", "faulty adapter"),
    Case(Trouble.REFUSED, "does not execute requests", "kernel logs"),
]
assert {case.trouble for case in CASES} == set(Trouble) - {Trouble.NONE}


def test_the_smaller_mtu_counts() -> None:
    assert packet_bytes(HELLO, PEER) == packet_bytes(PEER, HELLO) == 1024


def test_a_good_path_is_no_error() -> None:
    assert path_error(HELLO, PEER, GOOD, GOOD) is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.trouble.value)
def test_each_trouble_has_a_name_a_reason_and_a_fix(case: Case) -> None:
    bad = Finding(case.trouble, "the device's words")
    for own, theirs, reason in (
        (bad, GOOD, ": the device's words; "),
        (GOOD, bad, ": the peer found that the device's words; "),
    ):
        error = path_error(HELLO, PEER, own, theirs)
        assert error is not None
        assert error.fields == {"path": case.trouble.value, "gid": HELLO.gid, "peer_gid": PEER.gid}
        for part in (f"from {HELLO.gid} to {PEER.gid} ", case.says, reason, case.fix, 'fabric.name = "tcp"'):
            assert part in error.message


def test_ones_own_finding_counts_first() -> None:
    error = path_error(HELLO, PEER, Finding(Trouble.SHORT, "own"), Finding(Trouble.SILENT, "theirs"))
    assert error is not None
    assert error.fields["path"] == "short"


def test_infiniband_has_no_udp_port() -> None:
    mine, peer = (msgspec.structs.replace(hello, infiniband=True) for hello in (HELLO, PEER))
    error = path_error(mine, peer, Finding(Trouble.SILENT, "no answer"), GOOD)
    assert error is not None
    assert "subnet manager" in error.message
    assert "4791" not in error.message


@pytest.mark.parametrize("trouble", Trouble)
def test_findings_cross_and_are_fit_for_a_log(trouble: Trouble) -> None:
    found = unpack_finding(Finding(trouble, "two\nlines\x1b[31m").pack())
    assert found == Finding(trouble, "two?lines?[31m")


@given(blob=st.binary(max_size=40))
def test_foreign_bytes_are_refused_or_are_a_finding(blob: bytes) -> None:
    try:
        found = unpack_finding(blob)
    except FabricError as error:
        assert "same release" in error.message  # noqa: PT017
    else:
        assert isinstance(found, Finding)
