"""Whether a source and a sink fit."""

from __future__ import annotations

import pytest

from kvd.errors import AlreadyExists, FingerprintMismatch, InvalidArgument, NotFound, PeerRestarted, UnsupportedLayout
from kvd.transfer.matching import check_held, no_rendezvous, unknown_handle, why_not
from kvd.transfer.part import SourcePart
from kvd.types import Role
from kvd_client.spec import KVSpec, TokenRange
from tests.unit.transfer_helpers import BOOT, handle, layout, open_message, source_ended, source_running, source_waiting


def source() -> SourcePart:
    part = source_waiting().part()
    assert isinstance(part, SourcePart)
    return part


def test_what_fits() -> None:
    for message in (
        open_message(),
        open_message(layout=layout(capacity=4)),
        open_message(layout=layout(capacity=100)),
        open_message(request="another id", held=[TokenRange(0, 0, 4), TokenRange(0, 2, 2)]),
    ):
        assert why_not(source(), message) is None


def test_specs_that_differ_are_listed_field_by_field() -> None:
    spec = KVSpec(layers=2, kv_heads=2, entry_bytes=8, dtype="fp8", model="m", revision="x")
    error = why_not(source(), open_message(spec=spec))
    assert isinstance(error, FingerprintMismatch)
    assert error.fields == {"differ": {"dtype": ["fp16", "fp8"], "revision": ["", "x"]}}
    assert "dtype is 'fp16' at the source, 'fp8' at the sink" in error.message


def test_divisions_that_differ_are_listed_field_by_field() -> None:
    message = open_message(ranks=2, head_start=1, layout=layout(heads=1, capacity=2))
    error = why_not(source(), message)
    assert isinstance(error, UnsupportedLayout)
    assert error.fields["differ"] == {"ranks": [1, 2], "head_start": [0, 1], "heads": [2, 1], "capacity": [8, 2]}


def test_a_source_that_does_not_wait_says_so_whatever_the_sink_is_like() -> None:
    for node, words in ((source_running(), "another sink"), (source_ended(), r"has ended \(OK\)")):
        part = node.part()
        assert isinstance(part, SourcePart)
        error = why_not(part, open_message(ranks=2))
        assert isinstance(error, AlreadyExists)
        with pytest.raises(AlreadyExists, match=words):
            raise error


def test_held_tokens_must_exist() -> None:
    check_held((TokenRange(0, 0, 4), TokenRange(1, 2, 2)), (4, 2))
    for number, wrong in enumerate((TokenRange(2, 0, 1), TokenRange(1, 0, 3), TokenRange(0, 2, 1))):
        with pytest.raises(InvalidArgument) as caught:
            check_held((TokenRange(0, 0, 1),) * number + (wrong,), (4, 2))
        assert caught.value.fields == {"held": number}


def test_a_division_that_differs_is_told_before_held_tokens_that_follow_from_it() -> None:
    message = open_message(lengths=[6], held=[TokenRange(0, 4, 6)])
    assert isinstance(why_not(source(), message), UnsupportedLayout)


def test_unknown_handles() -> None:
    assert isinstance(unknown_handle(handle(3), "p", BOOT), NotFound)
    assert isinstance(unknown_handle(handle(3), "p", "00000000000000bb"), PeerRestarted)
    assert isinstance(unknown_handle(handle(3), "q", "00000000000000bb"), NotFound)
    assert isinstance(unknown_handle("nonsense", "p", BOOT), InvalidArgument)


def test_who_did_not_come() -> None:
    error = no_rendezvous("r", Role.SOURCE, 30.0, "p")
    assert error.fields == {"request": "r", "missing": "source"}
    assert "no source opened request 'r' on node 'p' within 30 s" in error.message
