"""What timelines are made of: ops with their times, one by one or a rank at a time."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from penstock.core.schedule.op import COMPUTE, Kind, Op

BUSY = COMPUTE | {Kind.RECOMPUTE, Kind.UPDATE, Kind.LATE_UPDATE}
"""Kinds that count as work; sends and receives are waiting."""

Source = Literal["predicted", "measured"]
TransferKind = Literal["sum", "value", "gradient", "read", "write", "served"]

ALL_OF_STAGE = -1
"""As the number of a transfer: what comes or goes is the stage's, and no microbatch's."""


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


class Transfer(NamedTuple):
    """Something that keeps links or tiers busy from ``start`` to ``end`` (seconds, or the unit of
    costs).

    Attributes:
        ranks: of a message, its source and its target; of a sum, all that take part, ascending; of
            what a server has, or comes from a tier or goes there, the one whose it is.
        kind: ``"sum"``: a part of gradients on its way to the sum and back; ``"value"``: a stage's
            output; ``"gradient"``: that of a stage's input; ``"read"`` and ``"write"``: what comes
            from a tier, and what goes there; ``"served"``: gradients at a server, from when they
            leave until its sums, or weights, are here.
        stage: whose gradients or output it is; of ``"gradient"``, the stage that has made it.
        number: of a sum, the part's; of what a server has, the server's, from 0; otherwise the
            microbatch, or −1 where it is the stage's.
    """

    ranks: tuple[int, ...]
    kind: TransferKind
    stage: int
    number: int
    start: float
    end: float


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
