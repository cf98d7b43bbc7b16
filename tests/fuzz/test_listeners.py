"""A small count of what ``python -m tests.fuzz`` does."""

from pathlib import Path

import pytest

from tests.fuzz.attackers import ATTACKS
from tests.fuzz.listeners import run


@pytest.mark.timeout(300)
def test_nothing_that_listeners_are_sent_harms_anybody(tmp_path: Path) -> None:
    report = run(tmp_path, 4000, seed=20)
    assert report.trouble == []
    assert report.bugs == []
    assert report.transfers > 0
    assert report.left_in_use == 0
    assert sum(report.messages.values()) >= 4000
    assert len(report.messages) == len(ATTACKS)
    assert report.descriptors_after <= report.descriptors_before + 2
    assert report.anonymous_most - report.anonymous_before < 128 << 20
