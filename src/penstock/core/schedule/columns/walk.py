"""``Walk``: ranks that go through their ops, each as far as what these need is done."""

from __future__ import annotations

import numpy as np

from penstock.core.schedule.columns.columns import Bools, Ints, Longs
from penstock.core.schedule.columns.needs import Needs

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
                    need = next((one for one in several.get(op, (need,)) if not done[one]), -1)
                    if need >= 0:
                        waiting.setdefault(need, []).append(rank)
                        position[rank] = op
                        break
                done[op] = 1
                if op in waiting:
                    runnable += waiting.pop(op)
            else:
                position[rank] = limit[rank]
