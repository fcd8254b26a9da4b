"""Predict: a schedule and its costs become a timeline."""

from __future__ import annotations

from penstock.cost import Costs
from penstock.schedule.check import executable_order
from penstock.schedule.op import COMMUNICATION, Op
from penstock.schedule.schedule import Schedule
from penstock.timeline import Span, Timeline
from penstock.values import expect


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """When each op would run if every rank performs its ops in order, as early as possible.

    An op starts when its rank is free and every result it needs is there; a result from another
    rank takes ``costs.hop`` longer. Sending and receiving overlap with compute on the other ranks
    and cost the own rank nothing but the wait.

    Args:
        schedule: compute only, or lowered; both give the same times.
        costs: durations; by default F = I = W = 1 and no hop.

    Returns:
        A predicted timeline that starts at 0.

    Raises:
        ScheduleError: the schedule deadlocks.
        InputError: per-stage costs do not fit the number of stages.
    """
    expect(schedule, Schedule, "the schedule", "build one with penstock.schedules.build")
    costs = costs or Costs()
    costs.check_stages(schedule.num_stages)
    end: dict[Op, float] = {}
    free = [0.0] * schedule.num_ranks
    spans = []
    for rank, op in executable_order(schedule):
        ready = free[rank]
        for needed in schedule.dependencies(op):
            arrival = end[needed]
            if schedule.where[needed] != rank:
                arrival += costs.hop_between(needed.stage, op.stage)
            ready = max(ready, arrival)
        waits = op.kind in COMMUNICATION
        start = free[rank] if waits else ready
        end[op] = free[rank] = ready + costs.duration(op)
        spans.append(Span(op, rank, start, end[op]))
    return Timeline.of(spans, schedule.num_ranks, schedule.name)
