"""Steps of very many microbatches that have come into a rhythm: behind enough turns of what ranks
repeat, all that follow are alike, whatever ranks wait for. So their end is known, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, lcm
from typing import NamedTuple

import numpy as np

from penstock.core.schedule.lower import add_update
from penstock.core.schedule.repetition import Repetition, repetitions_of, with_turns
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator import simulate
from penstock.core.timing.simulator.leaps import SAME
from penstock.core.timing.simulator.step import StepTimes, step_in_rows, two_pipelines
from penstock.core.timing.spans import Transfer
from penstock.core.timing.timeline import Timeline

_MOST_TURNS = 10_000
"""Of a schedule that leaves some out, until a rhythm shows."""
_WITHOUT_SEAMS = 2
"""Parts, of which none begins with what came through the one before."""
_ALIKE = 1e-9
"""Relative: rounding, over all of a step."""


class TurnRhythm(NamedTuple):
    """The rhythm of turns that are alike on all ranks.

    Attributes:
        turns: after how many all is the same again.
        seconds: how long these take.
    """

    turns: int
    seconds: float


class StepInRhythm(NamedTuple):
    """A step with its updates that has come into its rhythm, and how the whole goes on.

    Attributes:
        schedule: with fewer turns than the whole has.
        timeline: of this schedule.
        parts: what its ranks repeat, as ``repetitions_of`` has it.
        num_left_out: turns that the whole has more in each part.
        seconds_left_out: how long these take, part by part.
    """

    schedule: Schedule
    timeline: Timeline
    parts: tuple[Repetition, ...]
    num_left_out: int
    seconds_left_out: tuple[float, ...]

    @property
    def step(self) -> StepTimes:
        """The times of the whole step."""
        return step_in_rows(self.schedule, self.timeline.rows).later(sum(self.seconds_left_out))


def step_in_rhythm(
    schedule: Schedule,
    costs: Costs,
    left_out: int,
    *,
    fewest_ops: int = 0,
    updates: bool = True,
    folds: bool = False,
) -> StepInRhythm | None:
    """Give a schedule so many turns that the last ones are alike; ``None`` if they still are not
    where there are many.

    Args:
        schedule: compute only, without some microbatches of its middle.
        costs: of its stages.
        left_out: how many it leaves out.
        fewest_ops: that the turns of a rank have in each part in any case, on average.
        updates: whether stages update at the end.
        folds: whether two of several equal pipelines are enough.
    """
    repetitions = repetitions_of(schedule.columns)
    if not repetitions:
        return None
    num_turns = left_out // repetitions[0].microbatches
    shown = min(part.turns for part in repetitions)
    fewest = ceil(fewest_ops * schedule.num_ranks / min(map(_num_ops, repetitions)))
    more = min(max(fewest - shown, 0), num_turns)
    while more <= min(num_turns, _MOST_TURNS):
        longer, own_costs = with_turns(schedule, repetitions, more), costs
        if folds:
            longer, own_costs = two_pipelines(longer, costs) or (longer, costs)
        longer = add_update(longer) if updates else longer
        timeline = simulate(longer, own_costs)
        parts, left = repetitions_of(longer.columns), num_turns - more
        rhythms = [*filter(None, (_rhythm_of(part, timeline) for part in parts))]
        is_known = len(rhythms) == len(repetitions)
        rest = left % lcm(*(rhythm.turns for rhythm in rhythms)) if is_known else 0
        if is_known and not rest and _goes_on(longer, own_costs, timeline, rhythms):
            seconds = (left // rhythm.turns * rhythm.seconds for rhythm in rhythms)
            return StepInRhythm(longer, timeline, parts, left, tuple(seconds))
        more = more + rest if rest else 2 * more + shown
    return None


def _goes_on(
    schedule: Schedule, costs: Costs, timeline: Timeline, rhythms: Sequence[TurnRhythm]
) -> bool:
    """Whether about twice as many turns take as much longer as their rhythm says. Where a stage of
    a rank follows on another, it may wait for messages that more microbatches would hide."""
    parts = repetitions_of(schedule.columns)
    if len(parts) <= _WITHOUT_SEAMS:
        return True
    beat = lcm(*(rhythm.turns for rhythm in rhythms))
    turns = -(-min(part.turns for part in parts) // beat) * beat
    longer = simulate(with_turns(schedule, parts, turns), costs).makespan
    more = sum(turns // rhythm.turns * rhythm.seconds for rhythm in rhythms)
    return abs(longer - timeline.makespan - more) <= _ALIKE * longer


def _num_ops(repetition: Repetition) -> int:
    """How many ops a turn of all ranks has."""
    return int(repetition.lengths.sum())


def _rhythm_of(repetition: Repetition, timeline: Timeline) -> TurnRhythm | None:
    """The rhythm of the last turns; ``None`` where these are not alike, messages included."""
    end = np.concatenate([row.ends for row in timeline.rows])
    ends, count = end[repetition.ops], repetition.turns
    hair, half = SAME * float(np.abs(ends).max()), count // 2
    for turns in range(1, count // 4 + 1):
        growth = ends[half + turns :] - ends[half:-turns]
        seconds = float(growth.mean())
        if np.abs(growth - seconds).max() <= hair:
            since, until = float(ends[half].max()), float(ends[-1].min())
            later = repetition.microbatches * turns
            if _are_regular(timeline.transfers, since, until, later, seconds, hair):
                return TurnRhythm(turns, seconds)
    return None


def _are_regular(
    transfers: Sequence[Transfer],
    since: float,
    until: float,
    later: int,
    seconds: float,
    hair: float,
) -> bool:
    """Whether each message between two times begins so much later than that of ``later``
    microbatches before."""
    begins = {
        (part.ranks, part.kind, part.stage, part.number): part.start
        for part in transfers
        if part.kind in ("value", "gradient") and part.start <= until
    }
    return all(
        abs(begins[ranks, kind, stage, number + later] - begin - seconds) <= hair
        for (ranks, kind, stage, number), begin in begins.items()
        if begin >= since and (ranks, kind, stage, number + later) in begins
    )
