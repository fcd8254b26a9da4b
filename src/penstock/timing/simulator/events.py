"""The simulator that can be read: one op after the other, each as early as it can start."""

from __future__ import annotations

from array import array

from penstock.schedule.check import executable_order
from penstock.schedule.op import COMMUNICATION, COMPUTE, Kind, Op
from penstock.schedule.schedule import Schedule
from penstock.timing.costs import Costs
from penstock.timing.timeline import Row, Timeline

_SLICED = COMPUTE | {Kind.RECOMPUTE}


def by_events(schedule: Schedule, costs: Costs) -> Timeline:
    """What ``simulate`` promises, for any schedule."""
    end: dict[Op, float] = {}
    free = [0.0] * schedule.num_ranks
    rows = [Row(ops, array("d"), array("d")) for ops in schedule.ranks]
    links = _Links(schedule, costs) if costs.has_busy_links else None
    for rank, op in executable_order(schedule):
        ready = free[rank]
        for needed in schedule.dependencies(op):
            arrival = end[needed]
            if schedule.where[needed] != rank:
                left = arrival if links is None else links.left.get(needed, arrival)
                arrival = left + costs.delay(needed, op)
            ready = max(ready, arrival)
        # A message's time is the wait for it.
        rows[rank].starts.append(free[rank] if op.kind in COMMUNICATION else ready)
        duration = costs.duration(op)
        if op.kind in _SLICED:
            duration /= schedule.num_slices
        end[op] = free[rank] = ready + duration
        rows[rank].ends.append(end[op])
        if links is not None:
            links.send(rank, op, end[op])
    return Timeline(tuple(rows), schedule.name)


class _Links:
    """When each message begins its way, where links carry one at a time.

    Attributes:
        left: of the op that made it.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule = schedule
        self._costs = costs
        self._free: dict[tuple[int, int], float] = {}
        self._lowered = any(op.kind in COMMUNICATION for op in schedule.where)
        self.left: dict[Op, float] = {}

    def send(self, rank: int, op: Op, end: float) -> None:
        """Put the result of an op of ``rank`` on its way, if another rank gets it."""
        if (op.kind in COMMUNICATION) is not self._lowered:
            return
        target = next(
            (self._schedule.where[one] for one in _takers(op) if self._is_there(one)), rank
        )
        if target != rank:
            left = max(end, self._free.get((rank, target), 0.0))
            self.left[op] = left
            first = op.stage if op.kind in _ONWARD else op.stage - 1
            self._free[rank, target] = left + self._costs.occupies(first)

    def _is_there(self, op: Op) -> bool:
        return op in self._schedule.where


_ONWARD = {Kind.FORWARD, Kind.SEND_FORWARD}


def _takers(op: Op) -> tuple[Op, ...]:
    """The ops that may be waiting for this one's message."""
    match op.kind:
        case Kind.FORWARD:
            return (op._replace(stage=op.stage + 1),)
        case Kind.BACKWARD | Kind.BACKWARD_INPUT:
            kinds = (Kind.BACKWARD_INPUT, Kind.BACKWARD)
            return tuple(op._replace(stage=op.stage - 1, kind=kind) for kind in kinds)
        case Kind.SEND_FORWARD:
            return (op._replace(stage=op.stage + 1, kind=Kind.RECV_FORWARD),)
        case Kind.SEND_BACKWARD:
            return (op._replace(stage=op.stage - 1, kind=Kind.RECV_BACKWARD),)
    return ()
