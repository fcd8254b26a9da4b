"""``Numbers``: where each op of some columns stands, and the numbers of the ops that it needs;
``Walk``: ranks that go through their ops, each as far as what these need is done.

The rule is that of ``schedule.op``: its tables are read here for whole columns at once, and a test
holds the two together.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product

import numpy as np

from penstock.base.errors import ScheduleError
from penstock.core.schedule.columns import CODES, Bools, Columns, Ints, Longs
from penstock.core.schedule.op import BEFORE, COMPUTE, NEEDS, OF_A_ROUND, Kind, Op
from penstock.core.schedule.schedule import exchanges

_MOST_EMPTY = 16
"""Places of the table per op: with more, some number is mistyped."""
_SPARE = 1_000_000
MOST_LISTED = 5
_MANY_RANKS = 4
_BLOCK = 1 << 15


@dataclass(frozen=True, eq=False)
class Needs:
    """Ops that must be done before each op of its own rank's order can run.

    An op that stands earlier on the same rank is done anyway, so that nearly every op waits for
    one other at most; those that wait for several are listed.

    Attributes:
        single: for each op, the number of the one that it needs; ``Numbers.nothing`` where there is
            none, ``Numbers.absent`` where it is not in the schedule, or there are several.
        several: of the ops that need more than one, the numbers of all.
        nothing: the number of what is always done, one behind the last op.
        absent: the number of what is never done, one further.
    """

    single: Ints
    several: dict[int, list[int]]
    nothing: int
    absent: int

    def of(self, op: int) -> list[int]:
        """The numbers of what an op needs, also of what is always done."""
        return self.several.get(op) or [int(self.single[op])]

    @cached_property
    def quick_single(self) -> array[int]:
        """The same as ``single``; numbers one by one come from it at half the time."""
        return array("i", self.single.tobytes())

    def suit_waves(self, num_ranks: int) -> bool:
        """Whether all ranks are let go on at once, op by op, rather than one after the other, each
        as far as it can: with many ranks that is quicker, if no op needs several others."""
        return not self.several and num_ranks >= _MANY_RANKS


class Numbers:
    """Where ops stand.

    Attributes:
        columns: of the schedule.
        nothing: the number that stands for no op, which is always done; one behind the last.
        absent: the number that stands for an op that is not there, which is never done.
    """

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.nothing, self.absent = columns.count, columns.count + 1
        self._rows = {kind: row for row, kind in enumerate(sorted(columns.kinds))}
        self._num_microbatches = 1 + int(columns.microbatch.max(initial=-1))
        self._per_kind = self._num_microbatches * columns.num_slices
        self._per_stage = self._per_kind * len(self._rows)

    @property
    def fits(self) -> bool:
        """Whether the table is of a size with the schedule: a mistyped number makes it endless."""
        size = (self.columns.num_stages + 2) * self._per_stage
        return size <= _MOST_EMPTY * self.columns.count + _SPARE

    @cached_property
    def once(self) -> bool:
        """Whether no op stands twice; asked only where the table ``fits``."""
        # Two of the same have one place.
        return int(np.count_nonzero(self._table != self.absent)) == self.columns.count

    def check(self) -> None:
        """Raise ``ScheduleError`` if an op stands twice, or a number is far beyond all others."""
        if not self.fits:
            check_once(self.columns)
            ops = self.columns.ops(slice(None))
            farthest = max(ops, key=lambda op: max(op.stage, op.microbatch, op.slice))
            raise ScheduleError(f"{farthest} is far beyond all other ops; is a number mistyped?")
        if not self.once:
            check_once(self.columns)

    @cached_property
    def _places(self) -> Longs:
        """Where the table has the first kind of each op's stage, microbatch and slice."""
        columns = self.columns
        # A margin of one stage on either side is what is outside of the model.
        places = (columns.stage.astype(np.int64) + 1) * self._per_stage
        places += columns.microbatch.astype(np.int64) * columns.num_slices
        if columns.num_slices > 1:
            places += columns.slice
        return places

    @cached_property
    def _table(self) -> Ints:
        size = (self.columns.num_stages + 2) * self._per_stage
        table = np.full(size, self.absent, np.int32)
        rows = np.zeros(len(CODES), np.int64)
        for kind, row in self._rows.items():
            rows[CODES[kind]] = row * self._per_kind
        keys = self._places + rows[self.columns.kind]
        table[keys] = np.arange(self.columns.count, dtype=np.int32)
        return table

    def there(self, kind: Kind) -> Bools:
        """Whether the schedule has an op of this kind, for each stage, microbatch and slice."""
        shape = (self.columns.num_stages + 2, len(self._rows), self._num_microbatches, -1)
        if kind not in self._rows:
            return np.zeros((shape[0] - 2, shape[2], self.columns.num_slices), np.bool_)
        numbers: Ints = self._table.reshape(shape)[1:-1, self._rows[kind]]
        return np.not_equal(numbers, self.absent)

    def other(self, ops: Longs, kind: Kind, stages: int = 0, slices: int = 0) -> Ints:
        """The numbers of the ops of a kind for the same microbatches.

        Args:
            ops: the numbers of those that they are named after.
            kind: of the others.
            stages, slices: how much further the others are; their slices must not be outside.
        """
        if kind not in self._rows:
            return np.full(len(ops), self.absent, np.int32)
        shift = stages * self._per_stage + self._rows[kind] * self._per_kind + slices
        return self._table.take(self._places.take(ops) + shift)

    def number(self, stage: int, kind: Kind, microbatch: int) -> int:
        """The number of the op of a kind for a stage and a whole microbatch."""
        if kind not in self._rows:
            return self.absent
        key = (stage + 1) * self._per_stage + microbatch * self.columns.num_slices
        return int(self._table[key + self._rows[kind] * self._per_kind])

    def rule(self) -> Iterator[tuple[Kind, Longs, list[Ints]]]:
        """For ops of one kind, what ``Schedule.dependencies`` says, in numbers and in its order:
        for each of their needs, the op that meets it; block by block, until all ops have had their
        turn. What updates wait for on other ranks is not there."""
        # In blocks, so that what is worked out of one fits into the processor's cache.
        blocks = range(0, self.columns.count, _BLOCK)
        for begin, kind in product(blocks, self._rows):
            own = self.columns.kind[begin : begin + _BLOCK] == CODES[kind]
            ops = np.flatnonzero(own) + begin
            needs = [self._need(ops, kind, choices) for choices in NEEDS[kind]]
            if kind in OF_A_ROUND:
                self._excuse(ops, needs)
            needs += [self._before(ops, other, further) for other, further in BEFORE.get(kind, ())]
            yield kind, ops, needs

    def _need(self, ops: Longs, kind: Kind, choices: tuple[tuple[int, Kind], ...]) -> Ints:
        need = np.full(len(ops), self.absent, np.int32)
        for stages, other in reversed(choices):
            if other in self._rows:
                numbers = self.other(ops, other, stages)
                need = np.where(numbers == self.absent, need, numbers)
        farthest, _ = choices[-1]
        if kind in COMPUTE and farthest:
            ends = self.columns.stage[ops] + farthest
            need[(ends < 0) | (ends >= self.columns.num_stages)] = self.nothing
        return need

    def _before(self, ops: Longs, other: Kind, further: int) -> Ints:
        """The other slice, or the other part of what is freed, that comes first."""
        need = np.full(len(ops), self.nothing, np.int32)
        slices = self.columns.slice[ops] + further
        inside = np.flatnonzero((slices >= 0) & (slices < self.columns.num_slices))
        numbers = self.other(ops[inside], other, slices=further)
        if further >= 0:
            numbers[numbers == self.absent] = self.nothing
        need[inside] = numbers
        return need

    def _excuse(self, ops: Longs, needs: list[Ints]) -> None:
        """A replica takes part in a last round that has no microbatch for it."""
        alone = self.other(ops, Kind.FORWARD) == self.absent
        for need in needs:
            need[alone & (need == self.absent)] = self.nothing

    def needs(self) -> Needs:
        """The needs of each op, without what its rank has done before it anyway; ``needs_of``
        keeps it."""
        single = np.full(self.columns.count, self.nothing, np.int32)
        several: dict[int, list[int]] = {}
        first = self.columns.first.astype(np.int32)[self.columns.rank]
        for _, ops, needs in self.rule():
            for need in needs:
                need[(need >= first[ops]) & (need < ops)] = self.nothing
                held = single[ops]
                further = np.flatnonzero((held != self.nothing) & (need != self.nothing))
                single[ops] = np.where(held == self.nothing, need, held)
                for place in further.tolist():
                    several.setdefault(int(ops[place]), [int(held[place])]).append(int(need[place]))
        for op, others in self._exchanged():
            waits = several.setdefault(op, single[op : op + 1].tolist())
            waits += [other for other in others if not first[op] <= other < op]
        single[list(several)] = self.absent
        return Needs(single, several, self.nothing, self.absent)

    def _exchanged(self) -> Iterator[tuple[int, list[int]]]:
        """(update, the hand-ins and agreements that it waits for), where there are any."""
        columns = self.columns
        if not {Kind.REDUCE, Kind.AGREE} & set(columns.kinds):
            return
        numbers = np.flatnonzero(columns.are_of({Kind.REDUCE, Kind.AGREE, Kind.UPDATE}))
        ends = np.searchsorted(numbers, columns.first)
        ops = columns.ops(numbers)
        number = dict(zip(ops, numbers.tolist(), strict=True))
        ranks = [ops[a:b] for a, b in pairwise(ends.tolist())]
        for update, others in exchanges(ranks, columns.copies).items():
            if others:
                yield number[update], [number[other] for other in others]


def needs_of(columns: Columns) -> Needs:
    """The needs of the ops of some columns, worked out once.

    Raises:
        ScheduleError: an op stands twice, a number is far beyond all others, or a rank hands in
            gradients less often than others.
    """
    # Kept as ``cached_property`` does. The numbers are not: they take more room than the ops.
    kept = vars(columns)
    if "needs" not in kept:
        numbers = Numbers(columns)
        numbers.check()
        kept["needs"] = numbers.needs()
    needs: Needs = kept["needs"]
    return needs


def check_once(columns: Columns) -> None:
    """Raise ``ScheduleError`` if an op stands more than once."""
    counts = Counter(columns.ops(slice(None)))
    repeated = [op for op, count in counts.items() if count > 1]
    if repeated:
        raise ScheduleError(
            f"{listed(repeated)} stand(s) more than once; every op must stand exactly once"
        )


def listed(ops: Sequence[Op]) -> str:
    """The first of some ops, for an error."""
    names = ", ".join(map(str, sorted(ops)[:MOST_LISTED]))
    return names + (" and more" if len(ops) > MOST_LISTED else "")


_MOST_WAVES = 1024
"""Before somebody looks whether any rank still goes on, which takes as long as a few waves."""


class Walk:
    """Where each rank has come to, and what is done.

    Ranks go only through the ops that wait for others or that others wait for: a third of most
    schedules with messages, and all that follows a microbatch's last gradient, is neither.

    Args:
        first: the number of each rank's first op, and behind them the count of all ops.
        needs: of these ops.
    """

    def __init__(self, first: Longs, needs: Needs) -> None:
        awaited = np.zeros(needs.absent + 1, np.bool_)
        awaited[needs.single] = True
        awaited[[need for own in needs.several.values() for need in own]] = True
        awaited[: needs.nothing] |= needs.single != needs.nothing
        awaited[needs.nothing :] = True
        # 1. Numbers without the other ops, whose own stand for the next that is there.
        self._number = np.flatnonzero(awaited)
        self._place = (awaited.cumsum(dtype=np.int32) - awaited).astype(np.int32, copy=False)
        count = len(self._number) - 2
        borders = self._place[first]
        self._position, self._limit = borders[:-1].astype(np.int64), borders[1:].astype(np.int64)
        self._needs = Needs(
            self._place[needs.single[self._number[:count]]],
            {int(self._place[op]): self._place[own].tolist() for op, own in needs.several.items()},
            count,
            count + 1,
        )
        # 2. One memory under two names: single bytes of a bytearray come at half the time.
        self._bytes = bytearray(count + 2)
        self._bytes[count] = 1
        self._done = np.frombuffer(self._bytes, np.bool_)
        self._by_rank: _RankByRank | None = None

    def waiting(self) -> Longs:
        """The ops that wait at the ranks that are not at their end, in the order of the ranks."""
        position = self._positions()
        return self._number[position[position < self._limit]]

    def waits_at(self, ranks: Longs) -> Longs:
        """The ops that wait at some ranks, none of them at its end."""
        return self._number[self._positions()[ranks]]

    def are_done(self, ops: Ints | Longs) -> Bools:
        """Which of some ops that wait, or that others wait for, are done."""
        return self._done[self._place[ops]]

    def run(self, ops: Ints | Longs) -> None:
        """Let ops be done before their ranks come to them, where the walk has come to a halt."""
        if self._by_rank is None:
            # A wave costs as much for a few ranks as for all, and few go on now.
            self._by_rank = _RankByRank(self._needs, self._bytes, self._position, self._limit)
            self._by_rank.go_on()
        self._by_rank.run(self._place[ops].tolist())

    def to_the_end(self) -> bool:
        """Let all ranks go on until none can; whether all have come to their end."""
        if self._by_rank is None and self._needs.suit_waves(len(self._limit)):
            self._all_at_once()
        else:
            self._by_rank = self._by_rank or _RankByRank(
                self._needs, self._bytes, self._position, self._limit
            )
            self._by_rank.go_on()
        return bool((self._positions() == self._limit).all())

    def _positions(self) -> Longs:
        return self._position if self._by_rank is None else np.array(self._by_rank.position)

    def _all_at_once(self) -> None:
        """In each wave, let every rank whose next op can run run it."""
        single, done = self._needs.single, self._done
        ranks = np.flatnonzero(self._position < self._limit)
        position, limit = self._position[ranks], self._limit[ranks]
        while position.size:
            before = int(position.sum())
            # No rank comes to its end before so many waves.
            for _ in range(min(_MOST_WAVES, int((limit - position).min()))):
                can = done.take(single.take(position))
                done[position] = can
                position += can
            self._position[ranks] = position
            if int(position.sum()) == before:
                return
            goes_on = position < limit
            ranks, position, limit = ranks[goes_on], position[goes_on], limit[goes_on]


class _RankByRank:
    """Lets each rank go on until it waits, and go on again when what it waits for is done.

    Args:
        needs: of the ops.
        done: whether each op is done, and what stands for none.
        position: the next op of each rank.
        limit: where each rank ends.

    Attributes:
        position: as given, kept up to date.
    """

    def __init__(self, needs: Needs, done: bytearray, position: Longs, limit: Longs) -> None:
        self._needs = needs
        self._done = done
        self.position: list[int] = position.tolist()
        self._limit: list[int] = limit.tolist()
        self._runnable = [rank for rank, end in enumerate(self._limit) if self.position[rank] < end]
        self._waiting: dict[int, list[int]] = {}

    def run(self, ops: list[int]) -> None:
        """Let ops be done now."""
        for op in ops:
            self._done[op] = 1
            self._runnable += self._waiting.pop(op, ())

    def go_on(self) -> None:
        """Until all ranks wait or are at their end."""
        single, several = self._needs.quick_single, self._needs.several
        done, position, limit = self._done, self.position, self._limit
        runnable, waiting = self._runnable, self._waiting
        while runnable:
            rank = runnable.pop()
            for op in range(position[rank], limit[rank]):
                need = single[op]
                if not done[need]:
                    need = next(
                        (other for other in several.get(op, (need,)) if not done[other]), -1
                    )
                    if need >= 0:
                        waiting.setdefault(need, []).append(rank)
                        position[rank] = op
                        break
                done[op] = 1
                if op in waiting:
                    runnable += waiting.pop(op)
            else:
                position[rank] = limit[rank]
