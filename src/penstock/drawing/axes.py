"""Axes of pictures: their unit of time, how far they reach, their ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from penstock.base.units import TimeUnit, unit_of_seconds
from penstock.core.timing.spans import BUSY
from penstock.core.timing.timeline import Timeline

UnitName = Literal["seconds", "abstract"]

Titled = tuple[str, Timeline]
"""A timeline and what it is called in a picture of several."""

_LONGEST_OP_SECONDS = 0.5


def unit_for(timelines: Sequence[Timeline], name: UnitName | None = None) -> TimeUnit:
    """The unit in which these timelines read best.

    Costs may be seconds or any unit, and a timeline does not say which. What was measured is
    seconds; a prediction is taken for seconds if all its ops are short, because costs in abstract
    units are about 1.
    """
    if name is None:
        name = "seconds" if any(map(_looks_like_seconds, timelines)) else "abstract"
    return TimeUnit() if name == "abstract" else unit_of_seconds(longest(timelines))


def longest(timelines: Sequence[Timeline]) -> float:
    """The longest makespan, which a shared axis must hold."""
    return max((timeline.makespan for timeline in timelines), default=0.0)


def _looks_like_seconds(timeline: Timeline) -> bool:
    if timeline.source == "measured":
        return True
    lengths = [span.end - span.start for span in timeline.spans if span.op.kind in BUSY]
    return 0 < max(lengths, default=0.0) < _LONGEST_OP_SECONDS


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
