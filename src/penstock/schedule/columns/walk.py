"""``Walk``: ranks that go through their ops, each as far as what these need is done."""

from __future__ import annotations

import numpy as np

from penstock.schedule.columns.columns import Bools, Longs
from penstock.schedule.columns.needs import Needs


class Walk:
    """Where each rank has come to, and what is done.

    Args:
        first: the number of each rank's first op, and behind them the count of all ops.
        needs: of these ops.

    Attributes:
        position: of each rank, the number of its next op; behind its last, that of the next rank's
            first.
        done: whether each op is done, and what stands for none.
    """

    def __init__(self, first: Longs, needs: Needs) -> None:
        self._needs = needs
        self._limit = first[1:]
        self.position = first[:-1].copy()
        # One memory under two names: single bytes of a bytearray come at half the time.
        self._bytes = bytearray(int(first[-1]) + 2)
        self._bytes[needs.nothing] = 1
        self.done: Bools = np.frombuffer(self._bytes, np.bool_)

    @property
    def waiting(self) -> Longs:
        """The next ops of the ranks that are not at their end, in the order of the ranks."""
        return self.position[self.position < self._limit]

    def to_the_end(self) -> bool:
        """Let all ranks go on until none can; whether all have come to their end."""
        waves = self._needs.suit_waves(len(self.position))
        (self._all_at_once if waves else self._rank_by_rank)()
        return not self.waiting.size

    def _rank_by_rank(self) -> None:
        """Let each rank go on until it waits, and go on again when what it waits for is done."""
        single, several = self._needs.quick_single, self._needs.several
        done, position, limit = self._bytes, self.position.tolist(), self._limit.tolist()
        runnable = [rank for rank, end in enumerate(limit) if position[rank] < end]
        waiting: dict[int, list[int]] = {}
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
        self.position[:] = position

    def _all_at_once(self) -> None:
        """In each wave, let every rank whose next op can run run it."""
        single, done = self._needs.single, self.done
        ranks = np.flatnonzero(self.position < self._limit)
        position, limit = self.position[ranks], self._limit[ranks]
        waves = 1
        while position.size:
            before = int(position.sum())
            # No rank comes to its end before so many waves. Twice as many each time: to ask whether
            # any rank still goes on takes as long as a wave.
            for _ in range(min(waves, int((limit - position).min()))):
                can = done.take(single.take(position))
                done[position] = can
                position += can
            self.position[ranks] = position
            if int(position.sum()) == before:
                return
            goes_on = position < limit
            ranks, position, limit = ranks[goes_on], position[goes_on], limit[goes_on]
            waves *= 2
