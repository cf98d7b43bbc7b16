"""The demo's figures, texts and output, without any process."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvd.demo import report, texts
from kvd.demo.display import Display, printable
from kvd.demo.errors import DemoFailed
from kvd.demo.processes import child_environment
from kvd.errors import InvalidArgument


def make(**changes: Any) -> report.Report:
    figures: dict[str, Any] = {
        "model": "tiny",
        "prompt_tokens": 100,
        "tokens": [5, 6, 7],
        "reference_tokens": [5, 6, 7],
        "text": "one two three",
        "kv_bytes": 4_608_000,
        "bytes_moved": 4_611_000,
        "link_configured": 200e6,
        "link_achieved": 193.4e6,
        "ttft_s": 2.0,
        "ttst_s": 2.5,
        "waited_s": 0.2,
        "tbt_s": 0.31,
        "layers_before_first": 29,
        "layers": 30,
        "peak_memory": {"prefill": 900_000_000, "decode": 800_000_000},
    }
    return report.Report(**figures | changes)


def test_table_and_json_tell_the_same() -> None:
    made = make()
    rows = dict(made.rows())
    assert rows["TTFT"] == "2.00 s"
    assert rows["TTST"] == "2.50 s"
    assert rows["stall (TTST - TTFT)"] == "500 ms, of which 200 ms waiting for KV"
    assert rows["TBT (mean)"] == "310 ms"
    assert rows["link"] == "200 Mbit/s, achieved 193 Mbit/s"
    assert rows["bytes moved"] == "4,611,000 (4.6 MB)"
    assert rows["same tokens as one process"] == "yes"
    tree = json.loads(made.to_json())
    assert tree["stall_s"] == pytest.approx(0.5)
    assert tree["tokens_equal"] is True
    assert tree["bytes_moved"] == 4_611_000


def test_a_layout_has_a_row_of_its_own() -> None:
    made = make(layout="tenstorrent", channels=8, requests=240, regroup_s=0.0123)
    assert dict(made.rows())["layout"] == "tenstorrent over 8 channels: 240 requests, regrouped in 12 ms"
    assert "layout" not in dict(make().rows())
    assert json.loads(make().to_json())["layout"] is None


@pytest.mark.parametrize(
    ("tokens", "reference", "at"),
    [([5, 6, 8], [5, 6, 7], 2), ([5, 6], [5, 6, 7], 2), ([4], [5], 0), ([5, 6, 7], [5], 1)],
)
def test_a_difference_is_told_with_its_place(tokens: list[int], reference: list[int], at: int) -> None:
    made = make(tokens=tokens, reference_tokens=reference)
    assert not made.tokens_equal
    assert dict(made.rows())["same tokens as one process"] == f"NO, from token {at}"
    assert json.loads(made.to_json())["tokens_equal"] is False


def test_one_token_has_no_second() -> None:
    made = make(tokens=[5], reference_tokens=[5], ttst_s=None, tbt_s=None, waited_s=0.0)
    assert made.stall_s is None
    assert dict(made.rows())["TTST"] == "-"
    assert json.loads(made.to_json())["ttst_s"] is None


def test_busy_rate_leaves_out_the_time_without_work() -> None:
    # Two layers of 500 bytes, each 1 s on the link, with a second of nothing between them.
    assert report.busy_rate(1000, [0.0, 2.0], [1.0, 3.0]) == 4000
    # The second one queues behind the first.
    assert report.busy_rate(1000, [0.0, 0.5], [1.0, 2.0]) == 4000
    # One observed late does not count twice.
    assert report.busy_rate(1000, [0.0, 0.5], [2.0, 2.0]) == 4000
    assert report.busy_rate(1000, [1.0], [1.0]) is None


@pytest.mark.parametrize(
    ("bits", "text"),
    [(None, "?"), (5.0, "5 bit/s"), (56e3, "56 kbit/s"), (200e6, "200 Mbit/s"), (1.25e9, "1.25 Gbit/s")],
)
def test_rates_for_people(bits: float | None, text: str) -> None:
    assert report.rate(bits, "?") == text


class Letters:
    """A tokenizer with one token a byte, and a chat form or none."""

    bos_token_id = 0

    def __init__(self, chat: bool) -> None:
        self.chat_template = "letters" if chat else None

    def apply_chat_template(self, turns: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert add_generation_prompt
        return f"<user>{turns[0]['content']}<end>"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(text.encode())

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(ids).decode(errors="replace")


def test_a_prompt_is_cut_in_its_text_only() -> None:
    ids = texts.prompt_ids(Letters(chat=True), "abcdefgh" * 20, "why?", 40)
    assert len(ids) == 40
    assert bytes(ids).startswith(b"<user>abcdefgh")
    assert bytes(ids).endswith(b"\n\nwhy?<end>")
    whole = texts.prompt_ids(Letters(chat=True), "abc", "", 40)
    assert bytes(whole) == b"<user>abc<end>"


def test_without_a_chat_form_the_prompt_begins_with_bos() -> None:
    assert bytes(texts.prompt_ids(Letters(chat=False), "abc", "why?", 40)) == b"\x00abc\n\nwhy?"


def test_a_limit_without_room_is_refused() -> None:
    with pytest.raises(DemoFailed, match="no room"):
        texts.prompt_ids(Letters(chat=True), "abc", "why?", 16)


def test_default_text_is_long_and_ends_nowhere_near_the_limit() -> None:
    assert len(texts.default_text().split()) > 2000


def test_prompt_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"gone\.txt: can't be read: no such file"):
        texts.read_text(tmp_path / "gone.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InvalidArgument, match="byte 3 is not UTF-8"):
        texts.read_text(tmp_path / "latin.txt")
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(InvalidArgument, match="is empty"):
        texts.read_text(tmp_path / "empty.txt")


def test_text_comes_in_whole_characters() -> None:
    stream = texts.TextStream(Letters(chat=False))
    pieces = [stream.push(token) for token in "aé€b".encode()]
    assert pieces == ["a", "", "é", "", "", "€", "b"]


def test_plain_output_has_no_control_characters_and_json_stands_alone() -> None:
    for as_json in (False, True):
        out, err = io.StringIO(), io.StringIO()
        shown = Display(as_json=as_json, out=out, err=err)
        shown.say("starting")
        for layer in range(31):
            shown.progress("prefill, layers", layer, 30)
        shown.progress("fetching", 0, 0)
        shown.text("one \x1b[31mtwo\n")
        shown.text("three")
        shown.report(make())
        both = out.getvalue() + err.getvalue()
        assert all(c.isprintable() or c == "\n" for c in both)
        assert err.getvalue().count("prefill, layers") == 11
        assert "?[31mtwo\nthree\n" in (err if as_json else out).getvalue()
        if as_json:
            assert json.loads(out.getvalue())["model"] == "tiny"
        else:
            assert "TTFT                        2.00 s\n" in out.getvalue()


def test_printable() -> None:
    assert printable("a\tb\nc\x1b\x07é\x85") == "a\tb\nc??é?"


def test_children_do_not_inherit_what_leads_elsewhere() -> None:
    given = {"PATH": "/bin", "KVD_SOCKET": "/x", "KVD_CONFIG": "/y", "NOTIFY_SOCKET": "@z", "LISTEN_FDS": "1"}
    made = child_environment(given)
    assert made["PATH"] == "/bin"
    assert made["OMP_NUM_THREADS"] == "1"
    assert not {"KVD_SOCKET", "KVD_CONFIG", "NOTIFY_SOCKET", "LISTEN_FDS"} & made.keys()
