from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.units import Rate, Size, about, format_rate, format_size, parse_rate, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4GiB", 4 << 30),
        ("512 MiB", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("1kB", 1000),
        ("0B", 0),
        (" 7B ", 7),
        ("0.0001KiB", 0),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "4", "4G", "4Gb", "4gib", "-1GiB", "1e3B", "GiB", "1 2GiB", "1GiB/s", "٣GiB"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r'is not a size.*"4GiB"'):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("200mbit", 25_000_000),
        ("10Gbit/s", 1_250_000_000),
        ("1.5GB/s", 1_500_000_000),
        ("8bit", 1),
        ("1MiB/s", 1 << 20),
    ],
)
def test_rates(text: str, bytes_per_s: int) -> None:
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize("text", ["", "10", "10bps", "10Mbps", "1GB", "fast", "-1mbit", "10gbit/h"])
def test_what_is_no_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r'is not a rate.*"200mbit"'):
        parse_rate(text)


@pytest.mark.parametrize(("parse", "text"), [(parse_size, "9999999999TiB"), (parse_rate, "99999999999999999999gbit")])
def test_absurd_amounts_are_refused(parse, text: str) -> None:
    with pytest.raises(ValueError, match="can't be meant"):
        parse(text)


@given(st.integers(0, 1 << 62))
def test_a_size_is_read_back_exactly(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes == parse_size(str(Size(nbytes)))


@given(st.integers(0, 1 << 58))
def test_a_rate_is_read_back_exactly(bytes_per_s: int) -> None:
    assert parse_rate(format_rate(bytes_per_s)) == bytes_per_s == parse_rate(str(Rate(bytes_per_s)))


@given(st.text(max_size=12))
def test_any_text_is_a_number_or_a_value_error(text: str) -> None:
    for parse in (parse_size, parse_rate):
        try:
            amount = parse(text)
        except ValueError:
            continue
        assert amount >= 0


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 << 20, "1.5 GiB"),
        (1023 << 20, "1023 MiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        (100 << 30, "100 GiB"),
    ],
)
def test_sizes_for_human_eyes(nbytes: int, text: str) -> None:
    assert about(nbytes) == text


@given(st.integers(0, 1 << 50))
def test_sizes_for_human_eyes_keep_their_column(nbytes: int) -> None:
    assert len(about(nbytes)) <= 8
