"""``AbridgedTimeline``: a step of very many microbatches from its beginning and its end, which come
from a short one. What is drawn of it needs no more.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.core.schedule.columns import Columns, RankOps
from penstock.core.schedule.memory import peak_activations
from penstock.core.schedule.repetition import with_turns
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
        more_held: of each rank, by how much its peak of activations is higher for them: where all
            forwards come first, each turn adds to it.
        known: no op is left out that starts before the first time, or behind the second.
    """

    short: Timeline
    num_left_out: int
    worked: tuple[float, ...]
    more_held: tuple[float, ...]
    known: tuple[float, float]

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank works, also on what is left out."""
        return tuple(map(sum, zip(self.short.busy, self.worked, strict=True)))

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """The peaks of the whole."""
        return tuple(map(sum, zip(self.short.peak_activations, self.more_held, strict=True)))

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
        schedule,
        costs,
        left_out,
        fewest_ops=3 * ops_per_rank,  # on either side half, and some ranks are further than others
        updates=updates,
    )
    return None if in_rhythm is None else _abridged(in_rhythm)


def _abridged(in_rhythm: StepInRhythm) -> AbridgedTimeline:
    schedule, short, parts = in_rhythm.schedule, in_rhythm.timeline, in_rhythm.parts
    columns, num_turns = schedule.columns, in_rhythm.num_left_out
    later, seconds = num_turns * parts[0].microbatches, sum(in_rhythm.seconds_left_out)
    start, end = (
        np.concatenate([getattr(row, name) for row in short.rows]) for name in ("starts", "ends")
    )
    busy = np.where(columns.are_of(BUSY), end - start, 0.0)
    gaps = [part.begins + part.turns // 2 * part.lengths for part in parts]
    known = float(start[gaps[0]].min()), float(start[gaps[-1]].max()) + seconds
    shift, number = np.zeros(columns.count), columns.microbatch.astype(np.int64)
    worked = np.zeros(columns.num_ranks)
    for part, gap, part_seconds in zip(parts, gaps, in_rhythm.seconds_left_out, strict=True):
        for rank, span in enumerate(columns.spans()):
            behind = slice(int(gap[rank]), span.stop)
            shift[behind] += part_seconds
            number[behind.start : int(part.stops[rank])] += later
            worked[rank] += busy[behind][: int(part.lengths[rank])].sum()
    moved = Columns(
        columns.first, columns.stage, columns.kind, number.astype(np.int32), columns.slice
    )
    start, end = start + shift, end + shift
    rows = (
        Row(RankOps(moved, span), array("d", start[span]), array("d", end[span]))
        for span in columns.spans()
    )
    return AbridgedTimeline(
        tuple(rows),
        short.name,
        activations=short.activations,
        transfers=tuple(_moved(short, known, later, seconds)),
        short=short,
        num_left_out=num_turns * sum(int(part.lengths.sum()) for part in parts),
        worked=tuple((num_turns * worked).tolist()),
        more_held=_more_held(in_rhythm),
        known=known,
    )


def _more_held(in_rhythm: StepInRhythm) -> tuple[float, ...]:
    """By how much what is left out raises the peak of each rank."""
    more = with_turns(in_rhythm.schedule, in_rhythm.parts, 1)
    higher = peak_activations(more.rank_ops, more.num_slices, more.activations)
    return tuple(
        in_rhythm.num_left_out * (after - before)
        for after, before in zip(higher, in_rhythm.timeline.peak_activations, strict=True)
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
