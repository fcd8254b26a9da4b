"""The simulator that can be read: one op after the other, each as early as it can start."""

from __future__ import annotations

from array import array

from penstock.core.schedule.check import executable_order
from penstock.core.schedule.op import COMMUNICATION, COMPUTE, RESIDENCE, STASHES, Kind, Op
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator.arrivals import Arrivals
from penstock.core.timing.simulator.tiers import Tiers
from penstock.core.timing.simulator.traffic import Traffic
from penstock.core.timing.spans import Row
from penstock.core.timing.timeline import Timeline

SLICED = COMPUTE | {Kind.RECOMPUTE}


def by_events(schedule: Schedule, costs: Costs, arrivals: Arrivals | None = None) -> Timeline:
    """What ``simulate`` promises, for any schedule."""
    waits_for = {} if arrivals is None else arrivals.waits_for
    end: dict[Op, float] = {}
    free = [0.0] * schedule.num_ranks
    rows = [Row(ops, array("d"), array("d")) for ops in schedule.ranks]
    traffic = Traffic(schedule, costs)
    moving = RESIDENCE | STASHES
    tiers = [
        Tiers(ops, costs, rank, schedule.num_slices) if moving & {op.kind for op in ops} else None
        for rank, ops in enumerate(schedule.ranks)
    ]
    for rank, op in executable_order(schedule, waits_for):
        ready = free[rank]
        if arrivals is not None:
            ready = max(ready, arrivals.time_of(op))
        if op in waits_for:
            ready = max(ready, end[waits_for[op]])
        for needed in schedule.dependencies(op):
            arrival = end[needed]
            if schedule.where[needed] != rank or traffic.sums is not None:
                arrival = traffic.arrival(rank, needed, op, arrival)
            ready = max(ready, arrival)
        tier = tiers[rank]
        if tier is not None:
            ready = tier.ready(op, ready)
        # A message's time is the wait for it.
        rows[rank].starts.append(free[rank] if op.kind in COMMUNICATION else ready)
        duration = costs.duration(op)
        if op.kind in SLICED:
            duration /= schedule.num_slices
        end[op] = free[rank] = ready + duration
        rows[rank].ends.append(end[op])
        traffic.follow(rank, op, ready, end[op])
    frames = range(schedule.num_microbatches)
    stored = [transfer for tier in tiers if tier is not None for transfer in tier.transfers]
    return Timeline(
        tuple(rows),
        schedule.name,
        activations=schedule.activations,
        arrivals=tuple(arrivals.period * frame for frame in frames) if arrivals else (),
        transfers=tuple(sorted([*traffic.transfers, *stored])),
    )
