"""Files that users name, some of which have no end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvd.cli.plan import _layout
from kvd.demo import texts
from kvd.errors import InvalidArgument
from kvd.profiling import link
from kvd.profiling.evaluate.texts import own
from kvd.reading import read_bounded, read_text


def test_a_file_of_the_limit_is_read_and_one_of_more_is_not(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_bytes(b"x" * (1 << 20))
    assert read_bounded(file, 1 << 20) == b"x" * (1 << 20)
    with pytest.raises(InvalidArgument, match=r"file: has more than 0 MiB"):
        read_bounded(file, (1 << 20) - 1)


def test_line_ends_of_any_system_are_newlines(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_bytes("ä\r\nb\rc\n".encode())
    assert read_text(file) == "ä\nb\nc\n" == file.read_text("utf-8")


def test_a_pipe_is_read_to_its_end_and_nobody_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    assert read_text(pipe) == ""
    source, sink = os.pipe()
    os.write(sink, b"a prompt")
    os.close(sink)
    assert read_text(f"/dev/fd/{source}") == "a prompt"
    os.close(source)
    with pytest.raises(IsADirectoryError):
        read_text(tmp_path)


@pytest.mark.parametrize(
    "read",
    [
        texts.read_text,
        lambda path: own("mine", path),
        link.read,
        lambda path: _layout(str(path), codec="bf16", block=1, channels=1, alignment=64, shard=1),
    ],
)
def test_what_has_no_end_is_refused(
    read: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_bounded, "__defaults__", (1 << 20,))
    monkeypatch.setattr(read_text, "__defaults__", (1 << 20,))
    (endless := tmp_path / "endless.toml").symlink_to("/dev/zero")
    with pytest.raises(InvalidArgument, match="has more than 1 MiB"):
        read(endless)
