"""The simulator for millions of ops: in each wave, every rank whose next op can start runs it.

The times are those of ``events``, computed on whole columns: a wave costs a few numpy calls for all
ranks together. The dependencies come from the same table.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain, pairwise
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from penstock.schedule.op import COMPUTE, NEEDS, Kind, Op
from penstock.schedule.schedule import Schedule
from penstock.timing.costs import Costs
from penstock.timing.spans import Row
from penstock.timing.timeline import Timeline

Indices = npt.NDArray[np.int32]
Codes = npt.NDArray[np.int8]
Floats = npt.NDArray[np.float64]

_KINDS = sorted(COMPUTE)
_CODE = {kind: code for code, kind in enumerate(_KINDS)}


def by_waves(schedule: Schedule, costs: Costs) -> Timeline | None:
    """What ``simulate`` promises, for compute ops of microbatches that are not sliced; ``None`` if
    the schedule cannot run to its end, so that ``events`` can say why."""
    columns = _Columns(schedule, costs)
    start, end = np.empty(columns.count), np.full(columns.count + 2, np.inf)
    end[columns.nothing] = 0.0
    free = np.zeros(schedule.num_ranks)
    position, limit = columns.first[:-1].copy(), columns.first[1:]
    active = np.flatnonzero(position < limit)
    while active.size:
        # 1. When all that the next op of each rank needs is there; infinite if it is not known yet.
        next_ops = position[active]
        arrival = end[columns.needed[:, next_ops]] + columns.delay[:, next_ops]
        ready = arrival.max(axis=0)
        # 2. Those that can run do, all in one wave.
        can = ready < np.inf
        ranks, ops = active[can], next_ops[can]
        if not ranks.size:
            return None
        start[ops] = np.maximum(free[ranks], ready[can])
        end[ops] = free[ranks] = start[ops] + columns.duration[ops]
        # 3. Their ranks go on to the op behind.
        position[ranks] += 1
        active = active[position[active] < limit[active]]
    borders = zip(schedule.ranks, columns.first, columns.first[1:], strict=False)
    rows = (Row(ops, _column(start[a:b]), _column(end[a:b])) for ops, a, b in borders)
    return Timeline(tuple(rows), schedule.name)


def _column(values: Floats) -> array[float]:
    return array("d", values.tobytes())


class _Columns:
    """A schedule as arrays; op number n is the n-th when ranks are laid end to end.

    Attributes:
        first: the number of each rank's first op, and the count of all ops.
        duration: how long each op takes.
        nothing: the number that stands for no need, one behind the last op; one further stands for
            an op that is missing, and never ends.
        needed: for each need and op, the number of the op that meets it.
        delay: for each need and op, how long that result is under way.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        ranks = schedule.ranks
        lengths = [len(ops) for ops in ranks]
        self.first = np.concatenate(([0], np.cumsum(lengths)))
        self.count = self.nothing = int(self.first[-1])
        stage = self._field(ranks, 0)
        code = np.fromiter(
            map(_CODE.__getitem__, map(itemgetter(1), chain.from_iterable(ranks))), np.int8
        )
        microbatch = self._field(ranks, 2)
        num_stages = schedule.num_stages
        # A margin of one stage on either side stands for what is outside of the model.
        shape = (num_stages + 2, len(_KINDS), schedule.num_microbatches)
        number = np.full(shape, self.count + 1, np.int32)
        number[[0, -1]] = self.nothing
        number[stage + 1, code, microbatch] = np.arange(self.count, dtype=np.int32)
        self.duration = self._durations(costs, num_stages)[stage, code]
        self.needed = self._needs(number, stage, code, microbatch)
        self.delay = self._delays(costs, num_stages, stage, lengths)

    @staticmethod
    def _field(ranks: Sequence[Sequence[Op]], index: int) -> Indices:
        return np.fromiter(map(itemgetter(index), chain.from_iterable(ranks)), np.int32)

    @staticmethod
    def _durations(costs: Costs, num_stages: int) -> Floats:
        ops = ((Op(stage, kind, 0) for kind in _KINDS) for stage in range(num_stages))
        return np.array([[costs.duration(op) for op in row] for row in ops])

    def _needs(self, number: Indices, stage: Indices, code: Codes, microbatch: Indices) -> Indices:
        most = max(len(NEEDS[kind]) for kind in _KINDS)
        needed = np.full((most, self.count), self.nothing, np.int32)
        for kind in map(_KINDS.__getitem__, np.unique(code)):
            mine = np.flatnonzero(code == _CODE[kind])
            for row, choices in zip(needed, NEEDS[kind], strict=False):
                row[mine] = self.count + 1
                for offset, other in reversed(choices):
                    if other in _CODE:
                        meets = number[stage[mine] + 1 + offset, _CODE[other], microbatch[mine]]
                        row[mine] = np.where(meets <= self.nothing, meets, row[mine])
        return needed

    def _delays(self, costs: Costs, num_stages: int, stage: Indices, lengths: list[int]) -> Floats:
        forward = [Op(index, Kind.FORWARD, 0) for index in range(num_stages)]
        hops = [costs.delay(a, b) for a, b in pairwise(forward)]
        hop = np.array([*hops, 0.0])
        rank = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        delay = np.zeros(self.needed.shape)
        for row, needed in zip(delay, self.needed, strict=True):
            there = np.flatnonzero(needed < self.count)
            crossing = there[rank[there] != rank[needed[there]]]
            row[crossing] = hop[np.minimum(stage[crossing], stage[needed[crossing]])]
        return delay
