"""Quantities as people write them, from text (``16GiB``, ``10Gbit/s``, ``50us``) and to text.

Seconds and bytes are written in two ways. Tables and sentences (``format_…``) have three digits
and a plain space, so that columns are narrow and programs can search them. Pictures
(``picture_…``) have four digits of times, whose differences one reads off them, and a space at
which no line breaks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite, log
from typing import TypeAlias

from penstock.base.errors import InputError
from penstock.base.values import MOST_BYTES, is_number, shown

_Readable: TypeAlias = Mapping[str, tuple[int, int]]

_PREFIXES = {
    "": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip
# (multiply by, then divide by): 50 / 10**6 is the double that 5e-5 is; 50 * 1e-6 is not.
_BYTES = {f"{prefix}B": (factor, 1) for prefix, factor in _PREFIXES.items()}
_RATES = {
    f"{prefix}{unit}": (factor, bits)
    for prefix, factor in _PREFIXES.items()
    for unit, bits in (("B/s", 1), ("bit/s", 8), ("bps", 8))
}
_TIMES = {
    "s": (1, 1), "ms": (1, 10**3), "us": (1, 10**6), "µs": (1, 10**6), "μs": (1, 10**6),
    "ns": (1, 10**9),
}  # fmt: skip
_NO_BREAK = "\N{NO-BREAK SPACE}"
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*([^\s\d.]*)\s*")


def to_bytes(value: object) -> int:
    """A number of bytes, or text such as ``"16GiB"`` or ``"80 GB"``, as bytes.

    Raises:
        InputError: neither, negative, or no whole number of bytes.
    """
    num_bytes = _quantity(value, _BYTES, "size", "16GiB")
    if num_bytes > MOST_BYTES:
        raise InputError(f"{shown(value)} is more memory than there is; write for example 16GiB")
    if num_bytes != int(num_bytes):
        raise InputError(f"{shown(value)} is no whole number of bytes; write for example 16GiB")
    return int(num_bytes)


def to_bytes_per_second(value: object) -> float:
    """Bytes per second, or text such as ``"10Gbit/s"``, ``"10Gbps"`` or ``"25GB/s"``, as bytes per
    second.

    Raises:
        InputError: neither, negative, or not finite.
    """
    return _quantity(value, _RATES, "bandwidth", "10Gbit/s or 25GB/s")


def to_seconds(value: object) -> float:
    """Seconds, or text such as ``"50us"``, as seconds.

    Raises:
        InputError: neither, negative, or not finite.
    """
    return _quantity(value, _TIMES, "time", "50us")


def is_time(text: str) -> bool:
    """Whether text is a time with its unit, so no bandwidth."""
    match = _QUANTITY.fullmatch(text)
    return match is not None and match[2] in _TIMES


def _quantity(value: object, units: _Readable, subject: str, example: str) -> float:
    quantity = _read(value, units)
    if quantity is None or not isfinite(quantity):
        raise InputError(f"{shown(value)} is not a {subject}; write for example {example}")
    if quantity < 0:
        raise InputError(f"a {subject} is {shown(value)}, but must be ≥ 0")
    return quantity


def _read(value: object, units: _Readable) -> float | None:
    if isinstance(value, int) and abs(value) > MOST_BYTES:
        return inf if value > 0 else -inf  # it may be too large for a float
    if is_number(value):
        return float(value)  # type: ignore[arg-type]
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        return None
    factor, divisor = units[match[2]]
    return float(match[1]) * factor / divisor


def count_of(number: int, noun: str, plural: str = "s") -> str:
    """A count with its noun.

    >>> count_of(1, "stage"), count_of(8, "microbatch", "es")
    ('1 stage', '8 microbatches')
    """
    return f"{number} {noun}{'' if number == 1 else plural}"


def format_seconds(seconds: float) -> str:
    """A duration in text, with a unit that suits it.

    >>> format_seconds(0.1834), format_seconds(2.5), format_seconds(42e-6)
    ('183 ms', '2.5 s', '42 µs')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds * 1e6)} µs" if seconds else "0"


def format_bytes(num_bytes: float) -> str:
    """A size in text, in binary units.

    >>> format_bytes(0), format_bytes(1536), format_bytes(3 * 2**30)
    ('0', '1.5 KiB', '3 GiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{_three_digits(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} B" if num_bytes else "0"


def format_rate(rate: float) -> str:
    """Frames per second, as people write it.

    >>> format_rate(30), format_rate(29.97), format_rate(0.2), format_rate(12345)
    ('30 frames/s', '29.97 frames/s', '0.2 frames/s', '12,345 frames/s')
    """
    return f"{rate:,.0f} frames/s" if rate >= 1000 else f"{rate:.4g} frames/s"


def format_bytes_per_second(rate: float) -> str:
    """A bandwidth in text, in decimal units.

    >>> format_bytes_per_second(12.5e6), format_bytes_per_second(25e9)
    ('12.5 MB/s', '25 GB/s')
    """
    size, unit = (1e9, "GB/s") if rate >= 1e9 else (1e6, "MB/s")
    return f"{four_digits(rate / size)} {unit}"


def format_share(share: float, digits: int = 1) -> str:
    """A share in percent; what rounds to nothing has no sign.

    >>> format_share(0.1234), format_share(-1e-9), format_share(0.5, 0)
    ('12.3%', '0.0%', '50%')
    """
    return f"{share:z.{digits}%}"


def format_speed_up(one_device_seconds: float, step_seconds: float) -> str:
    """How many times faster than the same work without a pipeline, as in ``1.78×``."""
    return f"{one_device_seconds / step_seconds:.2f}×" if step_seconds else "1.00×"


@dataclass(frozen=True)
class TimeUnit:
    """How times are shown in a picture: multiplied by ``factor`` and followed by ``suffix``."""

    factor: float = 1.0
    suffix: str = ""

    def show(self, time: float) -> str:
        """A time with its unit, to four digits."""
        value = four_digits(time * self.factor)
        return f"{value}{_NO_BREAK}{self.suffix}" if self.suffix else value


def unit_of_seconds(seconds: float) -> TimeUnit:
    """The unit in which a number of seconds has few digits."""
    if seconds >= 1 or seconds <= 0:
        return TimeUnit(1.0, "s")
    return TimeUnit(1e3, "ms") if seconds >= 1e-3 else TimeUnit(1e6, "µs")


def picture_seconds(seconds: float) -> str:
    """A duration in a picture, in s, ms or µs."""
    return unit_of_seconds(seconds).show(seconds)


def picture_bytes(num_bytes: float) -> str:
    """A size in a picture, in powers of 1024."""
    suffixes = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(log(num_bytes, 1024)), len(suffixes) - 1) if num_bytes >= 1 else 0
    amount = num_bytes / 1024**power
    shown_amount = f"{amount:.0f}" if amount >= 1000 else f"{amount:.3g}"
    return f"{shown_amount}{_NO_BREAK}{suffixes[power]}"


def four_digits(value: float) -> str:
    """Four significant digits, without an exponent where a plain number is as short."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
