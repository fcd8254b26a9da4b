"""Predict: a schedule and its costs become a timeline.

``passage`` lets ranks go through their ops, on columns; ``step`` says how long that takes, and no
more, and ``leaps`` over most of what ranks repeat for very many microbatches; ``rhythm`` says how a
step goes on whose last turns are alike; ``beside`` is what may make them wait for more than each
other: links that are busy, sums of gradients part by part, a live source, and ``tiers`` where
stages leave memory.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Protocol, TypeGuard

import numpy as np

from penstock.base.arguments import public
from penstock.base.values import expect
from penstock.core.schedule.columns import Columns
from penstock.core.schedule.needs import needs_of
from penstock.core.schedule.op import COMMUNICATION, Kind
from penstock.core.schedule.schedule import Planned, Schedule
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator.beside import MOVES, Arrivals, Surroundings
from penstock.core.timing.simulator.network import CrossingResults, transfers_of
from penstock.core.timing.simulator.passage import Delays, Floats, InOrderOfTime, durations_of
from penstock.core.timing.simulator.step import passed
from penstock.core.timing.spans import Row, Transfer
from penstock.core.timing.timeline import Timeline

__all__ = ["simulate"]


class Foretold(Planned, Protocol):
    """A ``Plan``: a schedule with costs of its own, and what they come to."""

    @property
    def costs(self) -> Costs:
        """Durations of what its stages do."""

    def simulate(self) -> Timeline:
        """The predicted timeline of a step, or of a stream that shows its steady state."""


def is_foretold(value: object) -> TypeGuard[Foretold]:
    """Whether a value is a plan.

    >>> is_foretold("1f1b")
    False
    """
    return all(hasattr(type(value), name) for name in ("build_schedule", "costs", "simulate"))


@public()
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
    (``costs.link``), the next one from the same rank to the same rank waits for it, and so does
    whatever else passes the cards of its ends (``costs.cards``). Gradients of
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
    costs = Costs() if costs is None else costs
    expect(costs, Costs, "costs", "give a penstock.Costs")
    costs.check_stages(schedule.num_stages)
    costs.check_ranks(schedule.num_ranks)
    source = None if arrivals is None else Arrivals.of(schedule, costs, arrivals)
    return _simulated(schedule, costs, source)


def rows_of(schedule: Schedule, costs: Costs) -> tuple[Row, ...]:
    """As ``simulate``, what ranks do and nothing else: messages of long streams take longer to be
    listed than to be sent.

    Args:
        costs: as many as there are stages and ranks.
    """
    return _simulated(schedule, costs, None, shows_transfers=False).rows


def _simulated(
    schedule: Schedule,
    costs: Costs,
    arrivals: Arrivals | None,
    *,
    shows_transfers: bool = True,
) -> Timeline:
    columns = schedule.columns
    needs, beside = needs_of(columns), None
    summed = costs.has_exchanges and Kind.REDUCE in schedule.kinds
    shared = costs.has_busy_links and bool(costs.cards)
    transfers: tuple[Transfer, ...] = ()
    if arrivals is not None or summed or shared or MOVES & schedule.kinds:
        beside = Surroundings(schedule, costs, arrivals)
        needs = beside.with_admissions(needs)
        delays, duration = Delays(columns, costs), durations_of(columns, costs)
        delay = delays.of(needs.single, slice(None))
        sources = beside.undelayed(delays.of_several(needs.several))
        times = InOrderOfTime(schedule, needs, duration, delay, sources, beside).times()
        transfers = beside.transfers
    else:
        times = passed(schedule, costs)
        if costs.has_busy_links and shows_transfers:
            busy = CrossingResults.of(columns).occupied(columns, costs)
            transfers = transfers_of(columns, times.sent, busy)
    start, end, _ = times
    _begin_messages_early(columns, start, end)
    rows = (
        Row(ops, _column(start[a:b]), _column(end[a:b]))
        for ops, (a, b) in zip(schedule.rank_ops, pairwise(columns.first.tolist()), strict=True)
    )
    frames = range(schedule.num_microbatches)
    return Timeline(
        tuple(rows),
        schedule.name,
        activations=schedule.activations,
        arrivals=tuple(arrivals.period * frame for frame in frames) if arrivals else (),
        transfers=transfers,
    )


def _column(values: Floats) -> array[float]:
    column = array("d")
    column.frombytes(values.data.cast("B"))
    return column


def _begin_messages_early(columns: Columns, start: Floats, end: Floats) -> None:
    """A message's time is the wait for it: it begins when the rank is free."""
    messages = np.flatnonzero(columns.are_of(COMMUNICATION))
    start[messages] = end[messages - 1]
    begins = np.zeros(len(start) + 1, bool)  # one for the count of all ops, behind the last rank's
    begins[columns.first] = True
    start[messages[begins[messages]]] = 0.0
