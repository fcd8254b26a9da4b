"""``AbridgedTimeline``: a step of very many microbatches from its beginning and its end, which come
from a short one. What is drawn of it needs no more.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from penstock.core.schedule.columns import Columns, RankOps
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator.rhythm import StepInRhythm, step_in_rhythm
from penstock.core.timing.spans import BUSY, Row, Transfer
from penstock.core.timing.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class AbridgedTimeline(Timeline):
    """The predicted timeline of a step, but for most turns of its middle, which are all alike. Its
    numbers are those of the whole.

    Attributes:
        short: the timeline of a step that never had those turns.
        num_left_out: ops of all ranks that are not in ``rows``.
        worked: of each rank, how long it works on those.
        known: no op is left out that starts before the first time, or behind the second.
    """

    short: Timeline
    num_left_out: int
    worked: tuple[float, ...]
    known: tuple[float, float]

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank works, also on what is left out."""
        return tuple(map(sum, zip(self.short.busy, self.worked, strict=True)))

    @cached_property
    def _ops(self) -> tuple[RankOps, ...]:
        # Without a gap in the numbers: what a microbatch takes on one side, it gives back there.
        return self.short._ops


def abridged_timeline(
    schedule: Schedule,
    costs: Costs,
    left_out: int,
    ops_per_rank: int,
    *,
    updates: bool = True,
) -> AbridgedTimeline | None:
    """The timeline of a step of very many microbatches; ``None`` where ranks do not come into a
    rhythm.

    Args:
        schedule: compute only, without some microbatches of its middle.
        costs: of its stages.
        left_out: how many it leaves out.
        ops_per_rank: so many, on average, are to be on either side of the gap.
        updates: whether stages update at the end.
    """
    in_rhythm = step_in_rhythm(
        schedule, costs, left_out, fewest_ops=2 * ops_per_rank, updates=updates
    )
    return None if in_rhythm is None else _abridged(in_rhythm)


def _abridged(in_rhythm: StepInRhythm) -> AbridgedTimeline:
    schedule, short, turns = in_rhythm.schedule, in_rhythm.timeline, in_rhythm.turns
    columns, seconds = schedule.columns, in_rhythm.seconds_left_out
    later = in_rhythm.num_left_out * turns.microbatches
    gaps = turns.begins + turns.turns // 2 * turns.lengths
    is_behind = np.arange(columns.count) >= np.repeat(gaps, np.diff(columns.first))
    numbered = columns.microbatch + later * is_behind
    moved = Columns(
        columns.first, columns.stage, columns.kind, numbered.astype(np.int32), columns.slice
    )
    start, end = (
        np.concatenate([getattr(row, name) for row in short.rows]) for name in ("starts", "ends")
    )
    known = float(start[gaps].min()), float(start[gaps].max()) + seconds
    busy = np.where(columns.are_of(BUSY), end - start, 0.0)
    in_a_turn = zip(gaps.tolist(), (gaps + turns.lengths).tolist(), strict=True)
    start, end = start + seconds * is_behind, end + seconds * is_behind
    rows = (
        Row(
            RankOps(moved, slice(*span)),
            array("d", start[slice(*span)]),
            array("d", end[slice(*span)]),
        )
        for span in pairwise(columns.first.tolist())
    )
    return AbridgedTimeline(
        tuple(rows),
        short.name,
        activations=short.activations,
        transfers=tuple(_moved(short, known, later, seconds)),
        short=short,
        num_left_out=in_rhythm.num_left_out * int(turns.lengths.sum()),
        worked=tuple(
            in_rhythm.num_left_out * float(busy[slice(*span)].sum()) for span in in_a_turn
        ),
        known=known,
    )


def _moved(
    short: Timeline, known: tuple[float, float], later: int, seconds: float
) -> Iterator[Transfer]:
    """What links carry on either side of the gap."""
    for transfer in short.transfers:
        if transfer.start < known[0]:
            yield transfer
        elif transfer.start + seconds >= known[1]:
            of_microbatch = transfer.kind in ("value", "gradient")
            yield transfer._replace(
                number=transfer.number + later * of_microbatch,
                start=transfer.start + seconds,
                end=transfer.end + seconds,
            )
