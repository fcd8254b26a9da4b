"""The simulator that can be read: one op after the other, each as early as it can start."""

from __future__ import annotations

from array import array

from penstock.schedule.check import executable_order
from penstock.schedule.op import COMMUNICATION, COMPUTE, RESIDENCE, Kind, Op
from penstock.schedule.schedule import Schedule
from penstock.timing.costs import Costs
from penstock.timing.simulator.arrivals import Arrivals
from penstock.timing.simulator.tiers import Tiers
from penstock.timing.spans import Row
from penstock.timing.timeline import Timeline

SLICED = COMPUTE | {Kind.RECOMPUTE}


def by_events(schedule: Schedule, costs: Costs, arrivals: Arrivals | None = None) -> Timeline:
    """What ``simulate`` promises, for any schedule."""
    waits_for = {} if arrivals is None else arrivals.waits_for
    end: dict[Op, float] = {}
    free = [0.0] * schedule.num_ranks
    rows = [Row(ops, array("d"), array("d")) for ops in schedule.ranks]
    links = _Links(schedule, costs) if costs.has_busy_links else None
    tiers = [
        Tiers(ops, costs) if RESIDENCE & {op.kind for op in ops} else None for ops in schedule.ranks
    ]
    for rank, op in executable_order(schedule, waits_for):
        ready = free[rank]
        if arrivals is not None:
            ready = max(ready, arrivals.time_of(op))
        if op in waits_for:
            ready = max(ready, end[waits_for[op]])
        for needed in schedule.dependencies(op):
            arrival = end[needed]
            if schedule.where[needed] != rank:
                left = arrival if links is None else links.left.get(needed, arrival)
                arrival = left + costs.delay(needed, op)
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
        if links is not None:
            links.send(rank, op, end[op])
    frames = range(schedule.num_microbatches)
    return Timeline(
        tuple(rows),
        schedule.name,
        activations=schedule.activations,
        arrivals=tuple(arrivals.period * frame for frame in frames) if arrivals else (),
    )


class _Links:
    """When each message begins its way, where links carry one at a time.

    Attributes:
        left: when the result of an op began its way.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule = schedule
        self._costs = costs
        self._free: dict[tuple[int, int], float] = {}
        self._reader = {
            needed: op
            for op, rank in schedule.where.items()
            if op.kind is not Kind.UPDATE  # sums of gradients go another way
            for needed in schedule.dependencies(op)
            if schedule.where.get(needed, rank) != rank
        }
        self.left: dict[Op, float] = {}

    def send(self, rank: int, op: Op, end: float) -> None:
        """Put the result of an op of ``rank`` on its way, if another rank gets it."""
        if op in self._reader:
            reader = self._reader[op]
            target = self._schedule.where[reader]
            left = max(end, self._free.get((rank, target), 0.0))
            self.left[op] = left
            self._free[rank, target] = left + self._costs.occupies(min(op.stage, reader.stage))
