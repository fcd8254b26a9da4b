"""Ranks that go through their ops, each as far as what these need is there: when each op runs."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.schedule.check import deadlock
from penstock.core.schedule.columns import CODES, Columns, Ints, Longs
from penstock.core.schedule.needs import Needs
from penstock.core.schedule.op import COMPUTE, Kind, Op
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.costs import Costs

if TYPE_CHECKING:
    from penstock.core.timing.simulator.beside import Surroundings

Floats = npt.NDArray[np.float64]
Sources = Mapping[int, Sequence[tuple[int, float]]]
"""For ops that need several others: their numbers, and how long their results are under way."""

_SLICED = COMPUTE | {Kind.RECOMPUTE}


Event = tuple[float, int]
"""When something happens beside the ranks, and the number by which it is known."""


class LinkUse(NamedTuple):
    """What results of ops keep busy on their way, where each link joins two ranks in one direction
    and carries one result at a time: so they leave in the order of their rank's ops.

    Attributes:
        links: of each op, the number of its result's link; −1 where it stays on its rank.
        busy: for how long.
        num_links: how many there are.
    """

    links: Longs
    busy: Floats
    num_links: int


class _LinksInTurn:
    """When results leave, one after the other.

    Args:
        link_use: which links they go over.
        free: from when on each of these is.
    """

    def __init__(self, link_use: LinkUse, free: list[float]) -> None:
        self._links, self._busy = link_use.links.tolist(), link_use.busy.tolist()
        self._free = free

    def leaves(self, op: int, end: float) -> float:
        """When the result of an op leaves that has ended."""
        link = self._links[op]
        if link < 0:
            return end
        left: float = max(end, self._free[link])
        self._free[link] = left + self._busy[op]
        return left


class Times(NamedTuple):
    """When each op starts and ends, and when its result leaves for other ranks."""

    start: Floats
    end: Floats
    sent: Floats


class Progress(NamedTuple):
    """How far ranks have come.

    Attributes:
        position: of each, the number of its next op.
        free: of each, when it was done with the op before that.
        end, sent: of each op that is done, when it ended and when its result left; of all others
            infinite. Behind them, what ``Needs`` has for nothing, and for what is absent.
        links: from when on each link is free; none where results leave when they are there.
    """

    position: list[int]
    free: list[float]
    end: array[float]
    sent: array[float]
    links: list[float]


def go_through(
    schedule: Schedule,
    needs: Needs,
    durations: Floats,
    delays: Floats,
    sources: Sources,
    *,
    begins: Sequence[float] | None = None,
    link_use: LinkUse | None = None,
    progress: Progress | None = None,
) -> Times:
    """When each op starts and ends if each rank goes on until it waits, and goes on again when what
    it waits for is there.

    Args:
        schedule, needs: the ops, and what they wait for.
        durations: of each op.
        delays: of each op, how long the one result that it waits for is under way.
        sources: the same, of those that wait for several.
        begins: when each rank does; 0 by default.
        link_use: what results have to wait for on their way; by default nothing.
        progress: where ranks are; by default at their beginning.

    Raises:
        ScheduleError: the schedule deadlocks, or an op needs one that is not there.
    """
    columns, count = schedule.columns, schedule.num_ops
    # Single numbers come from an array of the standard library at half the time.
    single, duration, delay = needs.quick_single, _quick(durations), _quick(delays)
    progress = _beginning(columns, needs, begins, link_use) if progress is None else progress
    position, free, end, sent, link_free = progress
    links = None if link_use is None else _LinksInTurn(link_use, link_free)
    start, several = array("d", bytes(8 * count)), _Several(sources)
    limit, runnable = columns.first[1:].tolist(), list(reversed(range(columns.num_ranks)))
    waiting: dict[int, list[int]] = {}
    while runnable:
        rank = runnable.pop()
        now = free[rank]
        for op in range(position[rank], limit[rank]):
            needed = single[op]
            arrival = sent[needed] + delay[op]
            if op in sources:
                arrival, needed = several.arrival(op, sent)
            if arrival == inf:
                waiting.setdefault(needed, []).append(rank)
                position[rank] = op
                break
            start[op] = now = max(now, arrival)
            end[op] = now = now + duration[op]
            if links is not None:
                sent[op] = links.leaves(op, now)
            if op in waiting:
                runnable += waiting.pop(op)
        free[rank] = now
    if waiting:
        stuck = sorted(rank for ranks in waiting.values() for rank in ranks)
        raise deadlock(schedule, np.array([position[rank] for rank in stuck]), needs)
    return Times(np.frombuffer(start), np.frombuffer(end)[:count], np.frombuffer(sent)[:count])


def _beginning(
    columns: Columns, needs: Needs, begins: Sequence[float] | None, link_use: LinkUse | None
) -> Progress:
    free = [0.0] * columns.num_ranks if begins is None else list(begins)
    end = array("d", [inf]) * (columns.count + 2)
    end[needs.nothing] = -inf
    # Without links, a result leaves when it is there.
    sent = end if link_use is None else array("d", end)
    links = [0.0] * (0 if link_use is None else link_use.num_links)
    return Progress(columns.first[:-1].tolist(), free, end, sent, links)


class _Several:
    """Ops that wait for several others, as an update for all copies. Each of these is looked at
    once, however often one of them ends.

    Args:
        sources: what they wait for.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._num_there: dict[int, int] = {}

    def arrival(self, op: int, sent: Sequence[float]) -> tuple[float, int]:
        """(when all are there that an op waits for, one that nobody knows of yet): infinite as long
        as there is one."""
        needed = self._sources[op]
        there = self._num_there.get(op, 0)
        while there < len(needed) and sent[needed[there][0]] < inf:
            there += 1
        self._num_there[op] = there
        if there < len(needed):
            return inf, needed[there][0]
        return max(sent[need] + late for need, late in needed), -1


_END, _BESIDE, _BEGIN = range(3)
"""What happens at the same moment happens in this order: results are there for whoever begins."""


class InOrderOfTime:
    """As ``go_through`` with things beside that ranks share, as the links of a host: what comes
    first in time takes them first, whichever rank it is of.

    Args:
        schedule, needs, durations, delays, sources: see there.
        beside: what else goes on.
    """

    def __init__(
        self,
        schedule: Schedule,
        needs: Needs,
        durations: Floats,
        delays: Floats,
        sources: Sources,
        beside: Surroundings,
    ) -> None:
        columns = schedule.columns
        self._schedule, self._needs, self._sources, self._beside = schedule, needs, sources, beside
        self._several = _Several(sources)
        self._single, self._duration = needs.quick_single, _quick(durations)
        self._delay, self._first = _quick(delays), columns.first.tolist()
        self._start = array("d", bytes(8 * columns.count))
        self._end = array("d", self._start)
        self._sent = array("d", [inf]) * (columns.count + 2)
        self._sent[needs.nothing] = -inf
        self._free = [0.0] * columns.num_ranks
        self._position = self._first[:-1]
        self._waiting: dict[int, list[int]] = {}
        self._events: list[tuple[float, int, int]] = []

    def times(self) -> Times:
        """When each op starts and ends.

        Raises:
            ScheduleError: the schedule deadlocks, or an op needs one that is not there.
        """
        for rank in range(len(self._free)):
            self._wait(rank)
        while self._events:
            time, kind, number = heappop(self._events)
            if kind == _BEGIN:
                self._begin(number, time)
            elif kind == _END:
                self._finish(number, time)
            else:
                self._beside.happen(number, time)
        if self._waiting:
            stuck = sorted(rank for ranks in self._waiting.values() for rank in ranks)
            places = np.array([self._position[rank] for rank in stuck])
            raise deadlock(self._schedule, places, self._needs)
        sent = np.frombuffer(self._sent)[: len(self._end)]
        return Times(np.frombuffer(self._start), np.frombuffer(self._end), sent)

    def _wait(self, rank: int) -> None:
        """Let a rank's next op begin when it can, if that is known."""
        op = self._position[rank]
        if op == self._first[rank + 1]:
            return
        arrival = self._sent[self._single[op]] + self._delay[op]
        missing = self._single[op]
        if op in self._sources:
            arrival, missing = self._several.arrival(op, self._sent)
        if arrival == inf:
            self._waiting.setdefault(missing, []).append(rank)
            return
        ready = self._beside.ready(rank, op, max(self._free[rank], arrival))
        heappush(self._events, (ready, _BEGIN, rank))

    def _begin(self, rank: int, now: float) -> None:
        op = self._position[rank]
        later = self._beside.held_until(op)
        if later > now:
            heappush(self._events, (later, _BEGIN, rank))
            return
        self._start[op], end = now, now + self._duration[op]
        self._end[op] = self._free[rank] = end
        self._position[rank] = op + 1
        self._note(self._beside.begun(op, now, end))
        heappush(self._events, (end, _END, op))
        self._wait(rank)

    def _finish(self, op: int, now: float) -> None:
        self._sent[op], consequences = self._beside.follow(op, now)
        self._note(consequences)
        for rank in self._waiting.pop(op, ()):
            self._wait(rank)

    def _note(self, events: Iterable[Event]) -> None:
        for time, number in events:
            heappush(self._events, (time, _BESIDE, number))


def in_waves(
    columns: Columns,
    needs: Needs,
    durations: Floats,
    delays: Floats,
    link_use: LinkUse | None = None,
) -> Times | None:
    """As ``go_through``, for many ranks: all whose next op can start take it at once, in a few
    numpy calls for all of them together. ``None`` if they do not come to their ends."""
    single = needs.single
    start, end = np.empty(columns.count), np.full(columns.count + 2, inf)
    end[needs.nothing] = -inf
    sent, link_free = end, np.zeros(1)
    if link_use is not None:  # the last link, of what stays, is always free
        sent, link_free = end.copy(), np.zeros(link_use.num_links + 1)
    position, limit = columns.first[:-1].copy(), columns.first[1:]
    free = np.zeros(columns.num_ranks)
    while position.size:
        before = int(position.sum())
        # No rank comes to its end before so many waves.
        for _ in range(int((limit - position).min())):
            # Infinite where what is needed is not known yet: those times are written once more.
            begins = sent.take(single.take(position))
            begins += delays.take(position)
            np.maximum(begins, free, out=begins)
            ends = begins + durations.take(position)
            start[position], end[position] = begins, ends
            can = ends < inf
            if link_use is not None:
                ways = link_use.links.take(position)
                left = np.maximum(ends, link_free.take(ways))
                sent[position] = left
                left += link_use.busy.take(position)
                link_free[ways[can]] = left[can]
                link_free[-1] = 0.0
            np.copyto(free, ends, where=can)
            position += can
        if int(position.sum()) == before:
            return None
        goes_on = position < limit
        position, limit, free = position[goes_on], limit[goes_on], free[goes_on]
    return Times(start, end[: columns.count], sent[: columns.count])


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
