"""What one worker sums in a round, and which of its numbers are there already."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.core.summation.adding import Numbers
from penstock.core.summation.frames import Head
from penstock.core.summation.split import Part


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
    """What one worker sums.

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
    left: dict[Head, int] = field(default_factory=dict)
    filled: dict[int, Filled] | None = None
    waiting: dict[int, list[Part]] = field(default_factory=dict)
