"""Ranks that go through their ops, each as far as what these need is there: when each op runs."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.schedule.check import deadlock
from penstock.core.schedule.columns import CODES, Columns, Ints, Longs
from penstock.core.schedule.needs import Needs
from penstock.core.schedule.op import COMPUTE, Kind, Op
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.costs import Costs

Floats = npt.NDArray[np.float64]
Sources = Mapping[int, Sequence[tuple[int, float]]]
"""For ops that need several others: their numbers, and how long their results are under way."""

_SLICED = COMPUTE | {Kind.RECOMPUTE}


class Beside(Protocol):
    """Things that go on beside the ranks, and may make an op wait: links, sums, tiers, a source."""

    def ready(self, rank: int, number: int, ready: float) -> float:
        """When an op of a rank can begin that could begin at ``ready`` for all other reasons."""

    def follow(self, rank: int, number: int, start: float, end: float) -> float:
        """An op has run; gives when its result begins its way to other ranks."""


def go_through(
    schedule: Schedule,
    needs: Needs,
    durations: Floats,
    delays: Floats,
    sources: Sources,
    *,
    begins: Sequence[float] | None = None,
    beside: Beside | None = None,
) -> tuple[Floats, Floats]:
    """When each op starts and ends if each rank goes on until it waits, and goes on again when what
    it waits for is there. An event that ranks share, as a sum, happens in the order of this walk.

    Args:
        schedule, needs: the ops, and what they wait for.
        durations: of each op.
        delays: of each op, how long the one result that it waits for is under way.
        sources: the same, of those that wait for several.
        begins: when each rank does; 0 by default.
        beside: what else goes on.

    Raises:
        ScheduleError: the schedule deadlocks, or an op needs one that is not there.
    """
    columns = schedule.columns
    first = columns.first.tolist()
    # Single numbers come from an array of the standard library at half the time.
    single, duration, delay = needs.quick_single, _quick(durations), _quick(delays)
    start, sent = array("d", bytes(8 * columns.count)), array("d", [inf]) * (columns.count + 2)
    end = sent if beside is None else array("d", start)
    sent[needs.nothing] = -inf
    free = [0.0] * columns.num_ranks if begins is None else list(begins)
    position = first[:-1]
    runnable = list(reversed(range(columns.num_ranks)))
    waiting: dict[int, list[int]] = {}
    while runnable:
        rank = runnable.pop()
        now = free[rank]
        for op in range(position[rank], first[rank + 1]):
            arrival = sent[single[op]] + delay[op]
            if op in sources:
                arrival = max(sent[need] + late for need, late in sources[op])
            if arrival == inf:
                missing = next(need for need in needs.of(op) if sent[need] == inf)
                waiting.setdefault(missing, []).append(rank)
                position[rank] = op
                break
            now = max(now, arrival)
            if beside is not None:
                now = beside.ready(rank, op, now)
            start[op] = now
            end[op] = now = now + duration[op]
            if beside is not None:
                sent[op] = beside.follow(rank, op, start[op], now)
            if op in waiting:
                runnable += waiting.pop(op)
        free[rank] = now
    if waiting:
        stuck = sorted(rank for ranks in waiting.values() for rank in ranks)
        raise deadlock(schedule, np.array([position[rank] for rank in stuck]), needs)
    return np.frombuffer(start), np.frombuffer(end)[: columns.count]


def in_waves(
    columns: Columns, needs: Needs, durations: Floats, delays: Floats
) -> tuple[Floats, Floats] | None:
    """As ``go_through`` with nothing beside, for many ranks: all whose next op can start take it at
    once, in a few numpy calls for all of them together. ``None`` if they do not come to their
    ends."""
    single = needs.single
    start, end = np.empty(columns.count), np.full(columns.count + 2, inf)
    end[needs.nothing] = -inf
    position, limit = columns.first[:-1].copy(), columns.first[1:]
    free = np.zeros(columns.num_ranks)
    while position.size:
        before = int(position.sum())
        # No rank comes to its end before so many waves.
        for _ in range(int((limit - position).min())):
            # Infinite where what is needed is not known yet: those times are written once more.
            begins = end.take(single.take(position))
            begins += delays.take(position)
            np.maximum(begins, free, out=begins)
            ends = begins + durations.take(position)
            start[position], end[position] = begins, ends
            can = ends < inf
            np.copyto(free, ends, where=can)
            position += can
        if int(position.sum()) == before:
            return None
        goes_on = position < limit
        position, limit, free = position[goes_on], limit[goes_on], free[goes_on]
    return start, end[: columns.count]


def _quick(values: Floats) -> array[float]:
    return array("d", values.tobytes())


def durations_of(columns: Columns, costs: Costs) -> Floats:
    """How long each op keeps its rank busy."""
    table = np.zeros((columns.num_stages, len(CODES)))
    for kind in columns.kinds:
        shares = columns.num_slices if kind in _SLICED else 1
        for stage in range(columns.num_stages):
            table[stage, CODES[kind]] = costs.duration(Op(stage, kind, 0)) / shares
    return table[columns.stage, columns.kind]


class Delays:
    """How long results are under way: what an op needs by its numbers is on another rank, or it
    would have been done before."""

    def __init__(self, columns: Columns, costs: Costs) -> None:
        self._columns = columns
        self._hops = self._table(costs, Kind.FORWARD)
        self._sums = self._table(costs, Kind.UPDATE)

    def _table(self, costs: Costs, kind: Kind) -> Floats:
        """The delay to an op of a kind, by stage."""
        table = np.zeros(self._columns.num_stages)
        for stage in range(self._columns.num_stages):
            op = Op(stage, kind, 0)
            # The last stage has no edge behind it: where costs are lists, it may have no number.
            with suppress(IndexError):
                table[stage] = costs.delay(op, op)
        return table

    def of(self, needs: Ints, ops: Longs | slice) -> Floats:
        """For each op, how long the result of the other that it needs takes to it.

        Args:
            needs: one for each op; what stands for nothing takes any time.
            ops: their numbers.
        """
        stage = self._columns.stage
        delay = self._hops.take(np.minimum(stage[ops], stage.take(needs, mode="clip")))
        if Kind.UPDATE in self._columns.kinds:
            updates = self._columns.kind[ops] == CODES[Kind.UPDATE]
            delay[updates] = self._sums.take(stage[ops][updates])
        return delay

    def of_several(
        self, several: Mapping[int, Sequence[int]]
    ) -> dict[int, list[tuple[int, float]]]:
        """For each op that needs several others, these and how long their results are under way."""
        ops = np.repeat(np.array([*several], np.int64), [len(needs) for needs in several.values()])
        needs = [need for own in several.values() for need in own]
        late = iter(self.of(np.array(needs, np.int32), ops).tolist())
        return {op: [(need, next(late)) for need in own] for op, own in several.items()}
