"""The picture of a profile."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from kvd.errors import InvalidArgument
from kvd.importance.matrix import ImportanceMatrix
from kvd.profiling.plot import picture, plot
from kvd.profiling.profile import Profile, ProfileGroup
from tests.profiles import matrix, profile


def pixels(of: Profile) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    import io

    from matplotlib.image import imread

    found: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = imread(io.BytesIO(picture(of)))
    return found


def test_it_is_a_png_that_shows_the_values(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = profile(groups=(ProfileGroup(512, 1024, matrix(1), 5, 5),))
    other = profile(groups=(ProfileGroup(512, 1024, matrix(2), 5, 5),))
    path = tmp_path / "out.png"
    plot(one, path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert pixels(one).shape == pixels(other).shape
    assert (pixels(one) != pixels(other)).any()
    assert "matplotlib.pyplot" not in sys.modules


def test_more_groups_give_a_larger_picture() -> None:
    pytest.importorskip("matplotlib")
    many = tuple(ProfileGroup(1 << at, 2 << at, matrix(at), 5, 5) for at in range(5))
    one, four, five = (pixels(profile(groups=many[:count])).shape for count in (1, 4, 5))
    assert four[1] > one[1]
    assert five[0] > four[0]


def test_names_are_not_formulas_and_nothing_selected_is_drawn() -> None:
    pytest.importorskip("matplotlib")
    empty = (ProfileGroup(512, 1024, ImportanceMatrix.sequential(4, 10), 5, 5),)
    assert picture(profile(model="a$^{b$\\frac\n\x1b", groups=empty))


def test_two_layers_leave_nothing_to_show() -> None:
    pytest.importorskip("matplotlib")
    two = profile(layers=2, groups=(ProfileGroup(512, 1024, matrix(layers=2), 5, 5),))
    with pytest.raises(InvalidArgument, match="2 layers"):
        picture(two)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidArgument, match=r"kvd-transport\[plot\]"):
        plot(profile(), tmp_path / "out.png")
    assert list(tmp_path.iterdir()) == []
