"""The length of a step without its timeline, as quickly as can be: what a search asks thousands of
times, and what a cluster of thousands of devices needs.

``passed`` lets ranks go through their ops where nothing but links stands in their way. Where every
rank has one stage, sums and updates come behind all else, so that they follow from when the last
gradients are made (``step_of``); and where all stages have equally many copies, these are pipelines
side by side that do the same: one of those with most to do stands for all.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.core.schedule.columns import Columns
from penstock.core.schedule.lower import add_update
from penstock.core.schedule.needs import needs_of
from penstock.core.schedule.op import COMPUTE, RELEASING, Kind, Op
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.costs import Costs, flow_shop
from penstock.core.timing.simulator.network import CrossingResults
from penstock.core.timing.simulator.passage import (
    Delays,
    LinkUse,
    Times,
    durations_of,
    go_through,
    in_waves,
)


class StepTimes(NamedTuple):
    """A minibatch with its updates.

    Attributes:
        seconds: from its first op to the end of its last update.
        handed_in: of each stage, when the last copy has made its last gradient.
        updated: of each stage, when its copies begin to update.
    """

    seconds: float
    handed_in: tuple[float, ...]
    updated: tuple[float, ...]


def passed(schedule: Schedule, costs: Costs) -> Times:
    """When each op starts and ends where ranks wait for each other and for links alone.

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    columns = schedule.columns
    needs, delays = needs_of(columns), Delays(columns, costs)
    delay, duration = delays.of(needs.single, slice(None)), durations_of(columns, costs)
    link_use = None
    if costs.has_busy_links:
        messages = CrossingResults.of(columns)
        busy = messages.occupied(columns, costs)
        link_use = LinkUse(messages.links, busy, messages.num_links)
    times = None
    if needs.suit_waves(columns.num_ranks):
        times = in_waves(columns, needs, duration, delay, link_use)
    if times is None:
        sources = delays.of_several(needs.several)
        times = go_through(schedule, needs, duration, delay, sources, link_use=link_use)
    return times


def step_of(schedule: Schedule, costs: Costs) -> StepTimes | None:
    """The step of a minibatch after which all stages update; ``None`` where that takes a whole
    simulation: where ranks share cards, or have several stages with copies whose sums take parts.

    Args:
        schedule: compute only, perhaps with recomputes; of one minibatch.
        costs: of its stages.
    """
    columns = schedule.columns
    if costs.cards or columns.kinds - COMPUTE - {Kind.RECOMPUTE}:
        return None
    if any(len(stages) > 1 for stages in schedule.stages_of):
        return _step_of_several(add_update(schedule), costs)
    folded = _folded(schedule)
    times, made = passed(folded, costs), _last_gradients(folded.columns)
    copies, handed_in, updated = columns.copies, [], []
    finished = float(times.end.max(initial=0.0))
    for stage, numbers in enumerate(made):
        there = float(times.end[numbers].max())
        handed_in.append(there)
        if copies[stage] > 1:
            there = _summed_at(costs, stage, times, numbers)
        updated.append(there)
        # Ranks that have made their last gradient do nothing else.
        finished = max(finished, there + costs.duration(Op(stage, Kind.UPDATE, 0)))
    return StepTimes(finished, tuple(handed_in), tuple(updated))


def _step_of_several(schedule: Schedule, costs: Costs) -> StepTimes | None:
    """The step of ranks with several stages, whose updates stand among their ops."""
    columns = schedule.columns
    if costs.has_exchanges and Kind.REDUCE in columns.kinds:
        return None
    times = passed(schedule, costs)
    handed_in, updated = np.zeros((2, columns.num_stages))
    gradients, updates = (columns.are_of(kinds) for kinds in (RELEASING, {Kind.UPDATE}))
    np.maximum.at(handed_in, columns.stage[gradients], times.end[gradients])
    np.maximum.at(updated, columns.stage[updates], times.start[updates])
    seconds = float(times.end.max(initial=0.0))
    return StepTimes(seconds, tuple(handed_in.tolist()), tuple(updated.tolist()))


def _folded(schedule: Schedule) -> Schedule:
    """One of several pipelines that do the same side by side: the first, which has no fewer
    microbatches than the others; the schedule itself where there are no such pipelines."""
    columns = schedule.columns
    counts = set(columns.copies.values())
    if counts == {1} or len(counts) > 1:
        return schedule
    kept = vars(columns)  # as ``needs_of`` keeps what it finds
    if "folded" not in kept:
        kept["folded"] = _first_pipeline(schedule) or schedule
    folded: Schedule = kept["folded"]
    return folded


def _first_pipeline(schedule: Schedule) -> Schedule | None:
    columns = schedule.columns
    first_rank: dict[int, int] = {}
    for rank, (stage,) in enumerate(schedule.stages_of):
        first_rank.setdefault(stage, rank)
    spans = columns.spans()
    chosen = [spans[first_rank[stage]] for stage in range(columns.num_stages)]
    worked_on = {frozenset(columns.microbatch[span].tolist()) for span in chosen}
    if len(worked_on) > 1:
        return None  # microbatches do not stay within a pipeline
    ops = np.concatenate([np.arange(span.start, span.stop) for span in chosen])
    first = np.cumsum([0, *(span.stop - span.start for span in chosen)], dtype=np.int64)
    fields = (columns.stage, columns.kind, columns.microbatch, columns.slice)
    return schedule.with_columns(Columns(first, *(field[ops] for field in fields)))


def _last_gradients(columns: Columns) -> list[list[int]]:
    """For each stage, the numbers of the ops with which its ranks make their last gradients."""
    made: list[list[int]] = [[] for _ in range(columns.num_stages)]
    for begin, end in pairwise(columns.first.tolist()):
        done = np.flatnonzero(columns.are_of(RELEASING, slice(begin, end)))
        number = begin + int(done[-1])
        made[int(columns.stage[number])].append(number)
    return made


def _summed_at(costs: Costs, stage: int, times: Times, made: list[int]) -> float:
    """When the sum of a stage's copies is there, which make their last gradients in some ops."""
    exchange, ends = costs.exchange(stage), times.end[made]
    if exchange is None:
        update = Op(stage, Kind.UPDATE, 0)
        return float(ends.max()) + costs.delay(update, update)
    parts = [float(of_copies.max()) for of_copies in exchange.made(times.start[made], ends)]
    passes = flow_shop([*parts, float(ends.max())], exchange.seconds)
    return passes[-1][-1][1] + exchange.once
