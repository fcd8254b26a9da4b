"""The simulator that can be read: one op after the other, each as early as it can start."""

from __future__ import annotations

from array import array

from penstock.cost import Costs
from penstock.schedule.check import executable_order
from penstock.schedule.op import COMMUNICATION, COMPUTE, Kind, Op
from penstock.schedule.schedule import Schedule
from penstock.timeline import Row, Timeline

_SLICED = COMPUTE | {Kind.RECOMPUTE}


def by_events(schedule: Schedule, costs: Costs) -> Timeline:
    """What ``simulate`` promises, for any schedule."""
    end: dict[Op, float] = {}
    free = [0.0] * schedule.num_ranks
    rows = [Row(ops, array("d"), array("d")) for ops in schedule.ranks]
    for rank, op in executable_order(schedule):
        ready = free[rank]
        for needed in schedule.dependencies(op):
            arrival = end[needed]
            if schedule.where[needed] != rank:
                arrival += costs.delay(needed, op)
            ready = max(ready, arrival)
        # A message's time is the wait for it.
        rows[rank].starts.append(free[rank] if op.kind in COMMUNICATION else ready)
        duration = costs.duration(op)
        if op.kind in _SLICED:
            duration /= schedule.num_slices
        end[op] = free[rank] = ready + duration
        rows[rank].ends.append(end[op])
    return Timeline(tuple(rows), schedule.name)
