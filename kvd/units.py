"""Sizes and rates as people write them: "4GiB", "512MiB", "200mbit", "1.5GB/s"."""

from __future__ import annotations

import re
from fractions import Fraction

_BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES = {"B": 1} | _DECIMAL | _BINARY
_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_LARGEST = 1 << 62
_NUMBER = re.compile(r"(\d{1,20}(?:\.\d{1,9})?)\s*([A-Za-z]*)((?:/s)?)", re.ASCII)


class Size(int):
    """A number of bytes; its text form is exact and can be parsed again."""

    def __str__(self) -> str:
        return format_size(self)


class Rate(int):
    """A number of bytes per second, 0 for no limit; its text form is exact and can be parsed again."""

    def __str__(self) -> str:
        return format_rate(self)


def parse_size(text: str) -> Size:
    """Bytes of ``"4GiB"``, ``"512 MB"``, ``"4096B"``; a part of a byte is cut off.

    Raises :class:`ValueError` with a sentence, also for "4G" and "4Gb", which are 10⁹ to some, 2³⁰ or bits to
    others.
    """
    match = _NUMBER.fullmatch(text.strip())
    factor = _BYTES.get(match[2]) if match and not match[3] else None
    if match is None or factor is None:
        raise ValueError(f'"{text}" is not a size; write a number and one of {", ".join(_BYTES)}, as in "4GiB"')
    return Size(_scaled(text, match[1], Fraction(factor)))


def parse_rate(text: str) -> Rate:
    """Bytes per second of ``"200mbit"``, ``"10Gbit/s"`` (bits, decimal, as tc writes them) or ``"1.5GB/s"``.

    Raises :class:`ValueError` with a sentence, also for "bps", which is bits to some and bytes to tc.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is not None:
        bits = _BITS.get(match[2].lower())
        if bits is not None:
            return Rate(_scaled(text, match[1], Fraction(bits, 8)))
        if match[3] and match[2] in _BYTES:
            return Rate(_scaled(text, match[1], Fraction(_BYTES[match[2]])))
    raise ValueError(f'"{text}" is not a rate; write it in bits or bytes a second, as in "200mbit" or "1.5GB/s"')


def format_size(nbytes: int) -> str:
    """Exact text of a size, in the largest binary unit that divides it; ``parse_size`` reads it back."""
    for unit, factor in reversed(_BINARY.items()):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return f"{nbytes:d}B"


def format_rate(nbytes: int) -> str:
    """Exact text of a rate, in the largest bit unit that divides it; ``parse_rate`` reads it back."""
    for unit, factor in reversed(_BITS.items()):
        if nbytes and nbytes * 8 % factor == 0:
            return f"{nbytes * 8 // factor}{unit}"
    return f"{nbytes:d}B/s"


def about(nbytes: float) -> str:
    """A size for human eyes, in at most 8 columns: ``"512 B"``, ``"1.5 GiB"``, ``"1023 MiB"``."""
    value, unit = float(nbytes), "B"
    for larger in _BINARY:
        if value < 1023.5:
            break
        value, unit = value / 1024, larger
    whole = unit == "B" or value >= 99.95
    return f"{value:.0f} {unit}" if whole else f"{value:.1f} {unit}"


def _scaled(text: str, number: str, factor: Fraction) -> int:
    value = int(Fraction(number) * factor)
    if value > _LARGEST:
        raise ValueError(f'"{text}" is more than {format_size(_LARGEST)}; that can\'t be meant')
    return value
