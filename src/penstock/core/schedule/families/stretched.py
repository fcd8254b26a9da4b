"""Long orders whose middle repeats: worked out for a few microbatches, then stretched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import ne
from typing import NamedTuple

import numpy as np

from penstock.core.schedule.columns import CODES, Fields
from penstock.core.schedule.families.layout import laid_out
from penstock.core.schedule.op import Kind, Op
from penstock.core.schedule.schedule import Schedule

LONG = 10_000
"""Ops from which on an order is stretched: working it out whole would take long."""
_FEWEST, _MOST = 64, 512
"""Microbatches for which a long order is worked out first, in search of what repeats."""


class Moment(NamedTuple):
    """How far ranks are.

    Attributes:
        lengths: how many ops each has run.
        next_ops: of each, the next op of every stage and kind.
    """

    lengths: tuple[int, ...]
    next_ops: tuple[tuple[Op, ...], ...]


class Middle(NamedTuple):
    """The middle of an order, which ranks repeat: all that they do between two moments.

    Attributes:
        begin, end: how many ops each rank has run before and at the end of it.
        microbatches: how many further the second moment is.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    microbatches: int


@dataclass(frozen=True, eq=False)
class Stretched:
    """The order of a rank: ``short``, but that its middle repeats for later microbatches.

    Attributes:
        short: the ops for few microbatches.
        begin, end: the middle's.
        microbatches: how many it is for.
        times: how often it stands in the order.
    """

    short: Sequence[Op]
    begin: int
    end: int
    microbatches: int
    times: int

    def fields(self) -> Fields:
        """The ops of the rank, in their order, as columns: whose number each has in the short
        order, and by how much it is later."""
        count, length = len(self.short), self.end - self.begin
        tail = count - self.end
        middle = np.tile(np.arange(self.begin, self.end), self.times)
        numbers = np.concatenate((np.arange(self.begin), middle, np.arange(self.end, count)))
        turns = np.repeat(np.arange(self.times, dtype=np.int32), length)
        turn = np.concatenate(
            (np.zeros(self.begin, np.int32), turns, np.full(tail, self.times - 1))
        )
        stages, kinds, microbatches, _ = zip(*self.short, strict=True)
        kind = np.array([*map(CODES.__getitem__, kinds)], np.int8)[numbers]
        microbatch = np.array(microbatches, np.int32)[numbers]
        microbatch += (turn * self.microbatches).astype(np.int32)
        return np.array(stages, np.int32)[numbers], kind, microbatch, np.zeros(len(kind), np.int32)


def stretched(
    name: str,
    num_microbatches: int,
    middle_of: Callable[[int], Middle | None],
    orders_of: Callable[[int], Sequence[Sequence[Op]]],
) -> Schedule | None:
    """A long schedule from a short one; ``None`` if it is too short for that, or nothing repeats.

    Args:
        name: of the family.
        num_microbatches: how many it is for.
        middle_of: what ranks do again and again in the schedule of so many microbatches, before any
            of them sees the end.
        orders_of: the ops of each rank in the schedule of so many microbatches.
    """
    few = _FEWEST
    while few <= min(_MOST, num_microbatches // 2):
        middle = middle_of(few)
        if middle is not None:
            times, rest = divmod(num_microbatches - few, middle.microbatches)
            ranks = zip(orders_of(few + rest), middle.begin, middle.end, strict=True)
            return laid_out(
                [
                    Stretched(ops, begin, end, middle.microbatches, times + 1)
                    for ops, begin, end in ranks
                ],
                name,
            )
        few *= 2
    return None


class MiddleFinder:
    """Looks for the middle of an order, while ranks choose among the ops of their rows.

    What a rank chooses must depend on nothing but how far all are with each stage and kind, and on
    the ops of its row up to the last of those that come next. When ranks are as far as they were
    before, but for the same number of microbatches, and stand before the same ops but for these,
    they choose the same once more, and so on until they see where their rows end.

    Args:
        rows: the ops of ranks, the microbatches of each stage and kind in order.
        longer: the same for more microbatches; how far the two agree, ends are not seen.

    Attributes:
        middle: what was found; ``None`` until then.
    """

    def __init__(self, rows: Schedule, longer: Schedule) -> None:
        self.middle: Middle | None = None
        self._rows = rows.ranks
        self._places = [{op: place for place, op in enumerate(ops)} for ops in rows.ranks]
        self._calm = list(map(_in_common, rows.ranks, longer.ranks))
        self._lines = [sorted({(op.stage, op.kind) for op in ops}) for ops in rows.ranks]
        self._counts = [Counter[tuple[int, Kind]]() for _ in rows.ranks]
        self._lengths = [0] * rows.num_ranks
        self._seen: dict[tuple[int, ...], Moment] = {}

    def look(self, ranks: Sequence[Sequence[Op]]) -> None:
        """Look at what ranks have run so far; more than at the last look."""
        if self.middle is not None:
            return
        for rank, ops in enumerate(ranks):
            self._counts[rank].update((op.stage, op.kind) for op in ops[self._lengths[rank] :])
            self._lengths[rank] = len(ops)
        now = self._moment()
        ahead = now.next_ops[0][0].microbatch
        apart = tuple(op.microbatch - ahead for ops in now.next_ops for op in ops)
        before = self._seen.get(apart)
        if before is not None and self._goes_on(before, now):
            first, *_ = before.next_ops[0]
            self.middle = Middle(before.lengths, now.lengths, ahead - first.microbatch)
        self._seen[apart] = now

    def _moment(self) -> Moment:
        next_ops = (
            tuple(Op(stage, kind, counts[stage, kind]) for stage, kind in lines)
            for lines, counts in zip(self._lines, self._counts, strict=True)
        )
        return Moment(tuple(self._lengths), tuple(next_ops))

    def _goes_on(self, before: Moment, now: Moment) -> bool:
        """Whether no rank sees the end of its row, and all rows repeat from where ranks were."""
        for rank, row in enumerate(self._rows):
            places, calm = self._places[rank], self._calm[rank]
            begin = min(places.get(op, calm) for op in before.next_ops[rank])
            begin_again = min(places.get(op, calm) for op in now.next_ops[rank])
            if max(places.get(op, calm) for op in now.next_ops[rank]) >= calm:
                return False
            # What repeats is seen once more as a whole before the end.
            if calm - begin_again < begin_again - begin:
                return False
            further = now.next_ops[rank][0].microbatch - before.next_ops[rank][0].microbatch
            again = row[begin_again:calm]
            if any(
                map(
                    ne,
                    again,
                    (op._replace(microbatch=op.microbatch + further) for op in row[begin:calm]),
                )
            ):
                return False
        return True


def _in_common(row: Sequence[Op], longer: Sequence[Op]) -> int:
    """How many ops two rows begin with alike."""
    pairs = enumerate(zip(row, longer, strict=False))
    return next((place for place, (op, other) in pairs if op != other), len(row))
