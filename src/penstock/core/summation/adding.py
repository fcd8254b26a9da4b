"""Numbers that are summed, with the bits that torch makes on a CPU; which a worker has."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.summation.frames import ITEM_BYTES, FrameHead
from penstock.core.summation.split import Part

Numbers = NDArray[Any]

BFLOAT16 = 3
_TYPES = ("<f4", "<f8", "<f2", "<u2")
assert len(_TYPES) == len(ITEM_BYTES)


def room_for(count: int, dtype: int) -> Numbers:
    """Memory for numbers of a type, given by its place in ``ITEM_BYTES``; bfloat16 as 16 bits."""
    return np.empty(count, _TYPES[dtype])


def bytes_of(numbers: Numbers) -> memoryview:
    """The memory of numbers that lie without gaps."""
    return numbers.view(np.uint8).data


def add_to(total: Numbers, more: Numbers, dtype: int) -> None:
    """Add numbers to others of the same type, in place."""
    if dtype != BFLOAT16:
        # What overflows is for whoever clips or scales to see, not for a server to warn of.
        with np.errstate(all="ignore"):
            np.add(total, more, out=total)
        return
    with np.errstate(all="ignore"):
        wide = _wide(total) + _wide(more)
    bits = wide.view(np.uint32)
    # To the nearest, and of two that are as near to the even one.
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    total[:] = np.where(np.isnan(wide), 0x7FC0, rounded)


def _wide(numbers: Numbers) -> NDArray[np.float32]:
    return (numbers.astype(np.uint32) << 16).view(np.float32)


class Filled:
    """Ranges of a buffer that have been filled, the neighbouring ones as one.

    >>> filled = Filled()
    >>> filled.add(0, 3), filled.add(6, 9), filled.add(3, 6)
    ((0, 3), (6, 9), (0, 9))
    >>> filled.has(2, 8), filled.has(8, 10)
    (True, False)
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> tuple[int, int]:
        """Note a range, which overlaps no other one; the whole range that it is a part of now."""
        place = bisect_left(self._starts, start)
        if place < len(self._starts) and self._starts[place] == stop:
            stop = self._stops[place]
            del self._starts[place], self._stops[place]
        if place and self._stops[place - 1] == start:
            place -= 1
            start = self._starts[place]
            del self._starts[place], self._stops[place]
        self._starts.insert(place, start)
        self._stops.insert(place, stop)
        return start, stop

    def has(self, start: int, stop: int) -> bool:
        """Whether all of a range has been filled."""
        place = bisect_right(self._starts, start) - 1
        return place >= 0 and stop <= self._stops[place]


@dataclass
class Round:
    """A round of one worker: what it sums.

    Attributes:
        number: the round's.
        given: its own numbers, by the place of their type in ``ITEM_BYTES``.
        sums: where the sums go.
        left: the parts of which the sum has not come yet, and their owners.
        filled: the numbers that this worker has, by their type; ``None`` if it has all.
        waiting: the parts that it has not, by their type, in their order.
    """

    number: int
    given: Mapping[int, Numbers]
    sums: Mapping[int, Numbers]
    left: dict[FrameHead, int] = field(default_factory=dict)
    filled: dict[int, Filled] | None = None
    waiting: dict[int, list[Part]] = field(default_factory=dict)
