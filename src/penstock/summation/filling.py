"""Which numbers of a buffer are there already."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


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
