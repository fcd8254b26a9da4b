"""The simulator for large schedules: whole columns of numbers instead of one op after the other.

The times are those of ``events``, to the bit. Few ranks go one after another, each as far as it
can; of many ranks, all whose next op can start take it at once, in a wave, which costs a few numpy
calls for all of them together. What ops need comes from the one rule, by ``columns.needs``.
"""

from __future__ import annotations

from array import array
from contextlib import suppress
from itertools import pairwise
from math import inf

import numpy as np
import numpy.typing as npt

from penstock.core.schedule.columns.columns import CODES, Columns, Ints, Longs
from penstock.core.schedule.columns.needs import Needs, needs_of
from penstock.core.schedule.op import COMMUNICATION, Kind, Op
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator.events import SLICED
from penstock.core.timing.spans import Row
from penstock.core.timing.timeline import Timeline

Floats = npt.NDArray[np.float64]


def by_waves(schedule: Schedule, costs: Costs) -> Timeline | None:
    """What ``simulate`` promises, where links are never busy; ``None`` if the schedule has no
    columns or cannot run to its end, so that ``events`` can say why."""
    columns = schedule.columns
    if columns is None:
        return None
    needs = needs_of(columns)
    if needs is None:
        return None
    durations, delays = _durations(columns, costs), _Delays(columns, costs)
    go = _all_at_once if needs.suit_waves(columns.num_ranks) else _rank_by_rank
    times = go(columns, needs, durations, delays)
    if times is None:
        return None
    start, end = times
    _begin_messages_early(columns, start, end)
    borders = pairwise(columns.first.tolist())
    rows = (
        Row(ops, _column(start[a:b]), _column(end[a:b]))
        for ops, (a, b) in zip(schedule.rank_ops, borders, strict=True)
    )
    return Timeline(tuple(rows), schedule.name, activations=schedule.activations)


def _column(values: Floats) -> array[float]:
    column = array("d")
    column.frombytes(values.data.cast("B"))
    return column


def _durations(columns: Columns, costs: Costs) -> Floats:
    table = np.zeros((columns.num_stages, len(CODES)))
    for kind in columns.kinds:
        shares = columns.num_slices if kind in SLICED else 1
        for stage in range(columns.num_stages):
            table[stage, CODES[kind]] = costs.duration(Op(stage, kind, 0)) / shares
    return table[columns.stage, columns.kind]


class _Delays:
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

    def everywhere(self, needs: Ints) -> float | None:
        """How long every result is under way, where that is the same; as ``of`` for all ops."""
        updates = self._columns.are_of({Kind.UPDATE})
        if np.ptp(self._hops) or (needs[updates] < self._columns.count).any():
            return None
        return float(self._hops[0])

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


def _rank_by_rank(
    columns: Columns, needs: Needs, durations: Floats, delays: _Delays
) -> tuple[Floats, Floats] | None:
    """Let each rank go on until it waits, and go on again when what it waits for is done."""
    first = columns.first.tolist()
    # Single numbers come from an array of the standard library at half the time.
    single, duration = needs.quick_single, array("d", durations.tobytes())
    delay = array("d", delays.of(needs.single, slice(None)).tobytes())
    several = _arrivals(needs.several, delays)
    start, end = array("d", bytes(8 * columns.count)), array("d", [inf]) * (columns.count + 2)
    end[needs.nothing] = -inf
    free, position = [0.0] * columns.num_ranks, first[:-1]
    runnable = list(range(columns.num_ranks))
    waiting: dict[int, list[int]] = {}
    while runnable:
        rank = runnable.pop()
        now = free[rank]
        for op in range(position[rank], first[rank + 1]):
            arrival = end[single[op]] + delay[op]
            if op in several:
                arrival = max(end[need] + late for need, late in several[op])
            if arrival == inf:
                needed = (need for need, _ in several.get(op, [(single[op], 0.0)]))
                missing = next(need for need in needed if end[need] == inf)
                waiting.setdefault(missing, []).append(rank)
                free[rank], position[rank] = now, op
                break
            start[op] = now = max(now, arrival)
            end[op] = now = now + duration[op]
            if op in waiting:
                runnable += waiting.pop(op)
    if waiting:
        return None
    return np.frombuffer(start), np.frombuffer(end)[:-2]


def _arrivals(several: dict[int, list[int]], delays: _Delays) -> dict[int, list[tuple[int, float]]]:
    """For each op that needs several others, these and how long their results are under way."""
    ops = np.repeat(np.array([*several], np.int64), [len(needs) for needs in several.values()])
    needs = [need for own in several.values() for need in own]
    late = iter(delays.of(np.array(needs, np.int32), ops).tolist())
    return {op: [(need, next(late)) for need in own] for op, own in several.items()}


def _all_at_once(
    columns: Columns, needs: Needs, durations: Floats, delays: _Delays
) -> tuple[Floats, Floats] | None:
    """In each wave, every rank whose next op can start runs it."""
    single = needs.single
    # One number, where links are alike, saves a tenth of the time.
    late = delays.everywhere(single)
    delay = delays.of(single, slice(None)) if late is None else np.empty(0)
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
            begins += delay.take(position) if late is None else late
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
    return start, end[:-2]


def _begin_messages_early(columns: Columns, start: Floats, end: Floats) -> None:
    """A message's time is the wait for it: it begins when the rank is free."""
    messages = np.flatnonzero(columns.are_of(COMMUNICATION))
    start[messages] = end[messages - 1]
    begins = np.isin(messages, columns.first)
    start[messages[begins]] = 0.0
