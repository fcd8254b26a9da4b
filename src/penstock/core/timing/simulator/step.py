"""The length of a step without its timeline, as quickly as can be: what a search asks thousands of
times, and what a cluster of thousands of devices needs.

``passed`` lets ranks go through their ops where nothing but links stands in their way. Where every
rank has one stage, sums and updates come behind all else, so that they follow from when the last
gradients are made (``step_of``); and where all stages have equally many copies, these are pipelines
side by side that do the same: one of those with most to do stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.core.schedule.columns import Columns
from penstock.core.schedule.lower import add_update
from penstock.core.schedule.needs import needs_of
from penstock.core.schedule.op import COMPUTE, RELEASING, Kind, Op
from penstock.core.schedule.repetition import repetitions_of, shortened
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator.leaps import Passage, times_with
from penstock.core.timing.simulator.network import CrossingResults
from penstock.core.timing.simulator.passage import (
    Delays,
    Floats,
    LinkUse,
    Times,
    durations_of,
    in_waves,
)
from penstock.core.timing.spans import Row


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

    def later(self, seconds: float) -> StepTimes:
        """A step that ends so much later."""
        handed_in, updated = (tuple(time + seconds for time in times) for times in self[1:])
        return StepTimes(self.seconds + seconds, handed_in, updated)


def passed(schedule: Schedule, costs: Costs, left_out: int = 0) -> Times:
    """When each op starts and ends where ranks wait for each other and for links alone.

    Args:
        schedule, costs: of the ranks.
        left_out: microbatches that the schedule leaves out of its middle (``repetition.abridged``).
            The times are then those behind the middle.

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
    times, sources = None, delays.of_several(needs.several)
    passage = Passage(schedule, needs, duration, delay, sources, link_use)
    if needs.suit_waves(columns.num_ranks):
        times = in_waves(columns, needs, duration, delay, link_use)
    times = passage.times() if times is None else times
    repetitions = repetitions_of(columns) if left_out else ()
    assert repetitions or not left_out, "what is left out is more of the same"
    for repetition in repetitions:
        more, rest = divmod(left_out, repetition.microbatches)
        assert not rest, "whole turns are left out"
        times = times_with(passage, times, repetition, more)
    return times


def step_of(schedule: Schedule, costs: Costs, left_out: int = 0) -> StepTimes | None:
    """The step of a minibatch after which all stages update; ``None`` where that takes a whole
    simulation: where ranks have cards, or several stages with copies whose sums take parts.

    Args:
        schedule: compute only, perhaps with recomputes; of one minibatch.
        costs: of its stages.
        left_out: as for ``passed``.
    """
    if costs.cards or schedule.kinds - COMPUTE - {Kind.RECOMPUTE}:
        return None
    if not left_out:
        schedule, left_out = shortened(schedule)
    if any(len(stages) > 1 for stages in schedule.stages_of):
        alone = two_pipelines(schedule, costs)
        if alone is None:
            return _step_of_several(add_update(schedule), costs, left_out)
        return _step_of(*alone, _left_out_of(alone[0], schedule, left_out))
    folded = _folded(schedule)
    left_out = _left_out_of(folded, schedule, left_out)
    times, made = passed(folded, costs, left_out), _last_gradients(folded.columns)
    handed_in = [float(times.end[numbers].max()) for numbers in made]
    several = [stage for stage, copies in schedule.copies.items() if copies > 1]
    there = _sums_there(folded, costs, times, made, several)
    updated = [there.get(stage, moment) for stage, moment in enumerate(handed_in)]
    # Ranks that have made their last gradient do nothing else.
    ends = (
        begin + costs.duration(Op(stage, Kind.UPDATE, 0)) for stage, begin in enumerate(updated)
    )
    return StepTimes(
        max(float(times.end.max(initial=0.0)), *ends), tuple(handed_in), tuple(updated)
    )


def _step_of(schedule: Schedule, costs: Costs, left_out: int) -> StepTimes:
    """The step of ranks that may have several stages, all of which have copies: their updates come
    behind all else on each rank, and sums pass one after another what the copies share."""
    times, made = passed(schedule, costs, left_out), _last_gradients(schedule.columns)
    updating = add_update(schedule).columns
    updates = np.flatnonzero(updating.are_of({Kind.UPDATE}))
    pairs = list(
        zip(updating.rank[updates].tolist(), updating.stage[updates].tolist(), strict=True)
    )
    handed_in = [float(times.end[numbers].max()) for numbers in made]
    stages = list(dict.fromkeys(stage for _, stage in pairs))
    there = _sums_there(schedule, costs, times, made, stages)
    last_ops = (schedule.columns.first[1:] - 1).tolist()
    free = [float(times.end[number]) for number in last_ops]
    updated = [0.0] * schedule.num_stages
    for rank, stage in pairs:
        begins = max(free[rank], there[stage])
        updated[stage] = max(updated[stage], begins)
        free[rank] = begins + costs.duration(Op(stage, Kind.UPDATE, 0))
    return StepTimes(max(free), tuple(handed_in), tuple(updated))


def _sums_there(
    schedule: Schedule,
    costs: Costs,
    times: Times,
    made: Sequence[Sequence[int]],
    stages: Sequence[int],
) -> dict[int, float]:
    """When the sum of each stage's copies is there.

    Args:
        made: as ``_last_gradients`` has them.
        stages: in the order in which parts go that are ready at the same moment.
    """
    there = dict[int, float]()
    waiting: list[tuple[float, int, int]] = []
    for number, stage in enumerate(stages):
        exchange, makers = costs.exchange(stage), made[stage]
        ends, update = times.end[makers], Op(stage, Kind.UPDATE, 0)
        there[stage] = float(ends.max()) + costs.delay(update, update)
        if exchange is not None:
            parts = [*exchange.made(times.start[makers], ends), ends]
            waiting += [(float(own.max()), number, part) for part, own in enumerate(parts)]
    free: dict[tuple[int, int], float] = {}
    for time, number, _ in sorted(waiting):
        stage, now = stages[number], time
        exchange, first = costs.exchange(stage), schedule.ranks_of(stage)[0]
        assert exchange is not None, "nothing else waits"
        for place, seconds in enumerate(exchange.seconds):
            now = max(now, free.get((place, first), 0.0)) + seconds
            free[place, first] = now
        there[stage] = now + exchange.once
    return there


def _step_of_several(schedule: Schedule, costs: Costs, left_out: int) -> StepTimes | None:
    """The step of ranks with several stages, whose updates stand among their ops."""
    if costs.has_exchanges and Kind.REDUCE in schedule.kinds:
        return None
    times = passed(schedule, costs, left_out)
    return step_in(schedule, times.start, times.end)


def step_in(schedule: Schedule, start: Floats, end: Floats) -> StepTimes:
    """The step of a schedule with updates whose ops start and end at some times."""
    columns = schedule.columns
    handed_in, updated = np.zeros((2, columns.num_stages))
    gradients, updates = (columns.are_of(kinds) for kinds in (RELEASING, {Kind.UPDATE}))
    np.maximum.at(handed_in, columns.stage[gradients], end[gradients])
    np.maximum.at(updated, columns.stage[updates], start[updates])
    seconds = float(end.max(initial=0.0))
    return StepTimes(seconds, tuple(handed_in.tolist()), tuple(updated.tolist()))


def step_in_rows(schedule: Schedule, rows: Sequence[Row]) -> StepTimes:
    """The step of a schedule with updates from the rows of its timeline."""
    start, end = (
        np.concatenate([getattr(row, name) for row in rows]) for name in ("starts", "ends")
    )
    return step_in(schedule, start, end)


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


def two_pipelines(schedule: Schedule, costs: Costs) -> tuple[Schedule, Costs] | None:
    """Two of several pipelines that do the same side by side, the first and the last, which come as
    far as all of them; ``None`` where ranks have no copies, or not all equally many, or where
    pipelines wait for each other at cards (``are_apart``).

    Args:
        schedule: in which the copies of a rank follow one another.
        costs: of its stages.
    """
    counts = {*schedule.columns.copies.values()}
    width = max(counts)
    if len(counts) > 1 or width < 2 or schedule.num_ranks % width:
        return None
    if width == 2:
        return schedule, costs
    firsts, stages_of = range(0, schedule.num_ranks, width), schedule.stages_of
    if any(len({*stages_of[first : first + width]}) > 1 for first in firsts):
        return None
    if costs.cards and not are_apart(costs.cards, costs.hosts, width):
        return None
    kept = [rank for first in firsts for rank in (first, first + width - 1)]
    if any(_strays(schedule, kept[end::2]) for end in range(2)):
        return None
    cards, hosts = (tuple(own[rank] for rank in kept if own) for own in (costs.cards, costs.hosts))
    return _of_ranks(schedule, kept), replace(costs, cards=cards, hosts=hosts)


def microbatches_of_two(count: int, width: int) -> int:
    """Of so many microbatches, those of the first and the last of ``width`` pipelines side by side:
    the first ones may have one more."""
    return -(-count // width) + count // width


def are_apart(cards: Sequence[int], hosts: Sequence[int], width: int) -> bool:
    """Whether pipelines side by side have cards that no others share, and the first and the last of
    them tell what all do: copies of a rank, and the ranks of a pipeline, are on one host everywhere
    or nowhere.

    Args:
        cards, hosts: of each rank, as ``Costs`` has them; the copies of a rank follow one another.
        width: how many pipelines there are.
    """
    if min(cards) < 0 or len({*cards}) < len(cards):
        return False
    copies = [hosts[first : first + width] for first in range(0, len(hosts), width)]
    if any(own[0] == own[-1] and len({*own}) > 1 for own in copies):
        return False
    return len({*map(_pattern, zip(*copies, strict=True))}) == 1


def _pattern(hosts: Sequence[int]) -> tuple[int, ...]:
    """Which of some ranks are on one host."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(host, len(numbers)) for host in hosts)


def _first_pipeline(schedule: Schedule) -> Schedule | None:
    first_rank: dict[int, int] = {}
    for rank, (stage,) in enumerate(schedule.stages_of):
        first_rank.setdefault(stage, rank)
    ranks = [first_rank[stage] for stage in range(schedule.num_stages)]
    return None if _strays(schedule, ranks) else _of_ranks(schedule, ranks)


def _strays(schedule: Schedule, ranks: Sequence[int]) -> bool:
    """Whether microbatches leave a pipeline of some ranks, or go through a part of it alone, as
    where every rank has all stages and two of them each have a microbatch's."""
    columns, spans = schedule.columns, schedule.columns.spans()
    seen = [frozenset(columns.microbatch[spans[rank]].tolist()) for rank in ranks]
    if len({*seen}) > 1:
        return True
    ops = np.concatenate([np.arange(spans[rank].start, spans[rank].stop) for rank in ranks])
    where = columns.microbatch[ops].astype(np.int64) * columns.num_stages + columns.stage[ops]
    return int(np.count_nonzero(np.bincount(where))) < columns.num_stages * len(seen[0])


def _of_ranks(schedule: Schedule, ranks: Sequence[int]) -> Schedule:
    """What some ranks do, alone, with microbatches that are numbered without gaps."""
    columns, every = schedule.columns, schedule.columns.spans()
    chosen = [every[rank] for rank in ranks]
    ops = np.concatenate([np.arange(span.start, span.stop) for span in chosen])
    first = np.cumsum([0, *(span.stop - span.start for span in chosen)], dtype=np.int64)
    stage, kind, microbatch, part = columns.fields(ops)
    number = np.unique(microbatch, return_inverse=True)[1].astype(np.int32)
    return schedule.with_columns(Columns(first, stage, kind, number, part))


def _left_out_of(part: Schedule, whole: Schedule, left_out: int) -> int:
    """Of the microbatches that a schedule leaves out, those of some of its equal pipelines."""
    return left_out * part.num_ranks // whole.num_ranks


def _last_gradients(columns: Columns) -> list[list[int]]:
    """For each stage, the numbers of the ops with which its ranks make their last gradients."""
    made: list[list[int]] = [[] for _ in range(columns.num_stages)]
    for begin, end in pairwise(columns.first.tolist()):
        done = begin + np.flatnonzero(columns.are_of(RELEASING, slice(begin, end)))
        last = dict(zip(columns.stage[done].tolist(), done.tolist(), strict=True))
        for stage, number in last.items():
            made[stage].append(number)
    return made
