"""The form of handles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import InvalidArgument
from kvd.transfer.handle import Handle, make_handle, parse_handle

HEX = st.text("0123456789abcdef", min_size=16, max_size=16)


@given(st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True), HEX, st.integers(0, 10**20 - 1), HEX)
def test_a_handle_survives_as_text(node: str, boot: str, transfer: int, secret: str) -> None:
    handle = Handle(node, boot, transfer, secret)
    assert parse_handle(str(handle)) == handle


def test_a_new_handle_says_where_and_cannot_be_guessed() -> None:
    handles = {make_handle("node-1", "00000000000000aa", 7) for _ in range(100)}
    assert len(handles) == 100
    found = parse_handle(handles.pop())
    assert (found.node, found.boot, found.transfer) == ("node-1", "00000000000000aa", 7)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "node",
        "node/00000000000000aa/1",
        "node/00000000000000aa/1/0123456789abcdef/",
        "node/00000000000000aa/1/0123456789abcdef\n",
        "node/00000000000000AA/1/0123456789abcdef",
        "node/00000000000000aa/-1/0123456789abcdef",
        "node/00000000000000aa/1/0123456789abcde",
        "a b/00000000000000aa/1/0123456789abcdef",
        "n" * 65 + "/00000000000000aa/1/0123456789abcdef",
        "/00000000000000aa/1/0123456789abcdef",
        "node/00000000000000aa/\u0661/0123456789abcdef",
        "x" * 100_000,
    ],
)
def test_other_text_is_refused_with_a_sentence_of_bounded_length(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_handle(text)
    assert "not a handle" in caught.value.message
    assert len(caught.value.message) < 300
