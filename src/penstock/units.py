"""Quantities as people write them: ``16GiB``, ``10Gbit/s``, ``50us``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf, isfinite
from typing import TypeAlias

from penstock.errors import InputError
from penstock.values import MOST_BYTES, is_number, shown

Units: TypeAlias = Mapping[str, tuple[int, int]]

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
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*([^\s\d.]*)\s*")


def to_bytes(value: object) -> int:
    """A number of bytes, or text such as ``"16GiB"`` or ``"80 GB"``, as bytes.

    Raises:
        InputError: neither, negative, or no whole number of bytes.
    """
    found = _quantity(value, _BYTES, "size", "16GiB")
    if found > MOST_BYTES:
        raise InputError(f"{shown(value)} is more memory than there is; write for example 16GiB")
    if found != int(found):
        raise InputError(f"{shown(value)} is no whole number of bytes; write for example 16GiB")
    return int(found)


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


def _quantity(value: object, units: Units, what: str, example: str) -> float:
    found = _read(value, units)
    if found is None or not isfinite(found):
        raise InputError(f"{shown(value)} is not a {what}; write for example {example}")
    if found < 0:
        raise InputError(f"a {what} is {shown(value)}, but must be ≥ 0")
    return found


def _read(value: object, units: Units) -> float | None:
    if isinstance(value, int) and abs(value) > MOST_BYTES:
        return inf if value > 0 else -inf  # it may be too large for a float
    if is_number(value):
        return float(value)  # type: ignore[arg-type]
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        return None
    factor, divisor = units[match[2]]
    return float(match[1]) * factor / divisor
