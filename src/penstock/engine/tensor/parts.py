"""Where the parts of a value begin and end: the same rule for rows, features and parameters."""

from __future__ import annotations

from typing import NamedTuple


class Bounds(NamedTuple):
    """A part of a dimension: from ``start`` up to, and without, ``stop``."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """How many entries the part has."""
        return self.stop - self.start


def bounds(size: int, count: int, index: int) -> Bounds:
    """The part of a dimension that one of ``count`` members has; the first ones have one entry more
    where it does not divide.

    >>> [bounds(7, 3, index) for index in range(3)]
    [Bounds(start=0, stop=3), Bounds(start=3, stop=5), Bounds(start=5, stop=7)]
    """
    whole, more = divmod(size, count)
    start = index * whole + min(index, more)
    return Bounds(start, start + whole + (index < more))


def sizes(size: int, count: int) -> list[int]:
    """How many entries each member has.

    >>> sizes(7, 3)
    [3, 2, 2]
    """
    return [bounds(size, count, index).length for index in range(count)]
