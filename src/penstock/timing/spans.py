"""What timelines are made of: ops with their times, one by one or a rank at a time."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from penstock.schedule.op import COMPUTE, Kind, Op

BUSY = COMPUTE | {Kind.RECOMPUTE, Kind.UPDATE, Kind.LATE_UPDATE}
"""Kinds that count as work; sends and receives are waiting."""

Source = Literal["predicted", "measured"]


NO_VERSION = -1
"""Among versions: the op reads no weights."""


class Span(NamedTuple):
    """One op on one rank from ``start`` to ``end`` (seconds, or the unit of the costs).

    ``version`` is that of the stage's weights that the op read; of an update, how many came before
    it; ``None`` where it reads none or nobody knows.
    """

    op: Op
    rank: int
    start: float
    end: float
    version: int | None = None


class Row(NamedTuple):
    """One rank: its ops, when each starts and when each ends.

    ``versions`` has one per op: the version of the stage's weights that it read (as many updates
    came before); of an update, how many came before it; −1 where it reads none. ``None`` if they
    are not known, or there is no op.
    """

    ops: Sequence[Op]
    starts: array[float]
    ends: array[float]
    versions: Sequence[int] | None = None


def spans_of(row: Row, rank: int) -> Iterator[Span]:
    """The spans of a rank, in their order."""
    if row.versions is None:
        for op, start, end in zip(*row[:3], strict=True):
            yield Span(op, rank, start, end)
        return
    for op, start, end, version in zip(*row[:3], row.versions, strict=True):
        yield Span(op, rank, start, end, None if version == NO_VERSION else version)


def version_of(span: Span) -> int:
    """The version that a span says, as rows have it: −1 for none."""
    return NO_VERSION if span.version is None else span.version
