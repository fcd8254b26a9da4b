"""How numbers are written in pictures: times with a unit, bytes, ticks of an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.timing.timeline import BUSY, Timeline

UnitName = Literal["seconds", "abstract"]

Titled = tuple[str, Timeline]
"""A timeline and what it is called in a picture of several."""

_LONGEST_OP_SECONDS = 0.5
_SPACE = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Unit:
    """How times are shown: multiplied by ``factor`` and followed by ``suffix``."""

    factor: float = 1.0
    suffix: str = ""

    def show(self, time: float) -> str:
        """A time with its unit, to four digits."""
        value = number(time * self.factor)
        return f"{value}{_SPACE}{self.suffix}" if self.suffix else value


def unit_for(timelines: Sequence[Timeline], name: UnitName | None = None) -> Unit:
    """The unit in which these timelines read best.

    Costs may be seconds or any unit, and a timeline does not say which. What was measured is
    seconds; a prediction is taken for seconds if all its ops are short, because costs in abstract
    units are about 1.
    """
    if name is None:
        name = "seconds" if any(map(_looks_like_seconds, timelines)) else "abstract"
    return Unit() if name == "abstract" else unit_of_seconds(longest(timelines))


def unit_of_seconds(seconds: float) -> Unit:
    """The unit in which a number of seconds has few digits."""
    if seconds >= 1 or seconds <= 0:
        return Unit(1.0, "s")
    return Unit(1e3, "ms") if seconds >= 1e-3 else Unit(1e6, "µs")


def longest(timelines: Sequence[Timeline]) -> float:
    """The longest makespan, which a shared axis must hold."""
    return max((timeline.makespan for timeline in timelines), default=0.0)


def _looks_like_seconds(timeline: Timeline) -> bool:
    if timeline.source == "measured":
        return True
    lengths = [span.end - span.start for span in timeline.spans if span.op.kind in BUSY]
    return 0 < max(lengths, default=0.0) < _LONGEST_OP_SECONDS


def number(value: float) -> str:
    """Four significant digits, without an exponent where a plain number is as short."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"


def seconds(value: float) -> str:
    """A duration in s, ms or µs."""
    return unit_of_seconds(value).show(value)


def bytes_(value: float) -> str:
    """An amount of memory in powers of 1024."""
    suffixes = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log(value, 1024)), len(suffixes) - 1) if value >= 1 else 0
    amount = value / 1024**power
    shown = f"{amount:.0f}" if amount >= 1000 else f"{amount:.3g}"
    return f"{shown}{_SPACE}{suffixes[power]}"


def ticks(low: float, high: float, at_most: int) -> list[float]:
    """Round numbers from ``low`` to ``high``, in steps of 1, 2 or 5 times a power of ten.

    >>> ticks(0, 33, 8)
    [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / max(at_most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [
        round(index * step, 12 - math.floor(math.log10(step))) for index in range(first, last + 1)
    ]


def tick_label(value: float) -> str:
    """A tick's number; ``ticks`` gives round ones, so that this is exact."""
    return f"{value or 0:.6g}"
