"""Who sends which slice of a value to whom, where one group hands it to another.

Groups of equal size hand over part by part. Where sizes differ, every part of the source is cut at
the borders of the target's parts, and each piece goes to whom it belongs: every number once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.engine.tensor.parts import Bounds, bounds


class Slice(NamedTuple):
    """What one member of a group sends to one member of another.

    Attributes:
        source, target: their coordinates.
        within: where it lies in the source's part.
    """

    source: int
    target: int
    within: Bounds


def slices(lengths: Sequence[int], num_targets: int) -> Iterator[Slice]:
    """All that goes from one group to another, also what is empty: a target does not know where
    parts begin, and waits for everyone.

    Args:
        lengths: of the parts of the source's members, along the dimension that is divided.
        num_targets: how many members the other group has.

    >>> [tuple(one) for one in slices([2, 1], 1)]
    [(0, 0, Bounds(start=0, stop=2)), (1, 0, Bounds(start=0, stop=1))]
    """
    start = 0
    for source, length in enumerate(lengths):
        for target in range(num_targets):
            wanted = bounds(sum(lengths), num_targets, target)
            first = min(max(wanted.start - start, 0), length)
            last = min(max(wanted.stop - start, first), length)
            yield Slice(source, target, Bounds(first, last))
        start += length


def senders(num_sources: int, target: int, *, divided: bool) -> list[int]:
    """From whom a member gets a value.

    Args:
        num_sources: how many members the group has that hands it over.
        target: the member's coordinate.
        divided: whether each of those has a part; otherwise one that has all of it is enough.
    """
    return [*range(num_sources)] if divided else [target % num_sources]


def receivers(source: int, num_sources: int, num_targets: int, *, divided: bool) -> list[int]:
    """To whom a member sends a value; the counterpart of ``senders``."""
    return [
        target
        for target in range(num_targets)
        if source in senders(num_sources, target, divided=divided)
    ]
