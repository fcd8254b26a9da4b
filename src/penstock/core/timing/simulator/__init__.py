"""Predict: a schedule and its costs become a timeline.

Two ways to the same times: ``events`` follows one op at a time and can be read in a minute;
``waves`` works on whole columns, for schedules of millions of ops. The tests hold them against each
other.
"""

from __future__ import annotations

from penstock.base.values import expect
from penstock.core.schedule.durations import Durations
from penstock.core.schedule.op import RESIDENCE, STASHES, Kind
from penstock.core.schedule.schedule import MANY_OPS, Schedule
from penstock.core.timing.costs import Costs
from penstock.core.timing.foretold import Foretold, is_foretold
from penstock.core.timing.simulator.arrivals import Arrivals
from penstock.core.timing.simulator.events import by_events
from penstock.core.timing.timeline import Timeline

__all__ = ["simulate"]


def simulate(
    schedule: Schedule | Foretold,
    costs: Costs | None = None,
    *,
    arrivals: float | None = None,
) -> Timeline:
    """When each op would run if every rank performs its ops in order, as early as possible.

    An op starts when its rank is free and every result it needs is there; a result from another
    rank takes ``costs.hop`` longer. Sending and receiving overlap with compute on the other ranks
    and cost the own rank nothing but the wait; where a message keeps its link busy
    (``costs.link``), the next one from the same rank to the same rank waits for it. Gradients of
    copies are summed when all have handed in, in ``costs.reduce``, or part by part while the last
    backwards run (``costs.exchanges``); either overlaps with compute. Where
    microbatches are worked on in slices, each slice takes its share of a microbatch's time; a hop
    is paid per message.

    Args:
        schedule: compute only, or lowered; both give the same times. Or a ``Plan``, which brings
            costs of its own, and all that its step takes: with other ``costs``, or ``arrivals``,
            its schedule is simulated under these.
        costs: durations; by default those of the plan, or F = I = W = 1 and no hop.
        arrivals: how many microbatches (frames) a live source gives per second, or per whatever
            unit the costs are in; the first one comes at 0. ``Timeline.latencies`` then tells how
            long after its arrival each has its output, ``Timeline.rate`` how many come out. Frames
            that come too fast wait. A live stream lets in as many as it has stages (``partime``).
            By default all are there at the beginning.

    Returns:
        A predicted timeline that starts at 0.

    Raises:
        ScheduleError: the schedule deadlocks.
        InputError: per-stage costs do not fit the number of stages.
    """
    if is_foretold(schedule):
        if costs is None and arrivals is None:
            return schedule.simulate()
        costs = schedule.costs if costs is None else costs
        schedule = schedule.build_schedule()
    expect(schedule, Schedule, "the schedule", "build one with penstock.schedules.build")
    assert isinstance(schedule, Schedule)  # nothing else is expected
    schedule.check_types()
    costs = Costs() if costs is None else costs
    expect(costs, Durations, "costs", "give a penstock.Costs")
    costs.check_stages(schedule.num_stages)
    if arrivals is not None:
        return by_events(schedule, costs, Arrivals.of(schedule, costs, arrivals))
    summed = costs.has_exchanges and Kind.REDUCE in schedule.kinds
    moves = bool((RESIDENCE | STASHES) & schedule.kinds)
    followed = costs.has_busy_links or summed or moves
    if schedule.num_ops >= MANY_OPS and not followed:
        # Only here, so that everything else starts without numpy.
        from penstock.core.timing.simulator.waves import by_waves

        timeline = by_waves(schedule, costs)
        if timeline is not None:
            return timeline
    return by_events(schedule, costs)
