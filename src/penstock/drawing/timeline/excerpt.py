"""Excerpts of a timeline that is too long to be drawn: how it begins and how it ends.

No browser shows a million boxes, and nobody could read them. Between filling and draining, the
steady state repeats itself.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from penstock.core.schedule.memory import Curve
from penstock.core.schedule.op import COMPUTE
from penstock.core.schedule.repetition import shortened
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.abridged import AbridgedTimeline, abridged_timeline
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator import simulate
from penstock.core.timing.spans import Row, entries, outputs_by_stage
from penstock.core.timing.timeline import Timeline
from penstock.drawing.markup import Titled, unit_for

MOST_BOXES = 20_000
"""Ops and messages; more are not drawn: they weigh megabytes, and are narrower than a pixel."""

OPS_PER_RANK = 200
"""How many a figure has at either end of a timeline that is too long, on average."""

_HAIR = 1e-9
"""Relative: what starts at the same moment, but for rounding, is on one side of a cut."""

_MOST_STEADY = 1_000
_MOST_PER_STAGE = 5
"""Boxes of a microbatch: forward, backward, update and two messages."""


class Rhythm(NamedTuple):
    """How a stream goes on, which nothing but its beginning and its end disturbs.

    Attributes:
        first: the first microbatch that enters in the part that is shown.
        beat: from one microbatch to the next.
        idle: the share of it in which ranks do not work.
    """

    first: int
    beat: float
    idle: float


@dataclass(frozen=True, kw_only=True)
class Excerpt(Timeline):
    """Some consecutive ops of a timeline, whose numbers are those of the whole.

    Attributes:
        whole: the timeline.
        shift: how much later than in ``rows`` it was in the whole.
        rhythm: of the steady state of a stream, how often a microbatch goes through it; ``None`` of
            any other part.
    """

    whole: Timeline
    shift: float = 0.0
    rhythm: Rhythm | None = None

    @cached_property
    def num_slices(self) -> int:
        """The whole timeline's number of slices."""
        return self.whole.num_slices

    @cached_property
    def bubble(self) -> float:
        """The whole timeline's bubble."""
        return self.whole.bubble

    @cached_property
    def stage_bubble(self) -> float:
        """The whole timeline's stage bubble."""
        return self.whole.stage_bubble

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """The peaks of the whole timeline."""
        return self.whole.peak_activations

    @cached_property
    def in_flight(self) -> tuple[Curve, ...]:
        """Microbatches in flight in the whole timeline, from the first start to the last end that
        are shown."""
        first = _first(self.rows)
        last = first + self.makespan
        return tuple(_between(curve, first, last, self.shift) for curve in self.whole.in_flight)


def whole_of(timeline: Timeline) -> Timeline:
    """The timeline that an excerpt is taken from; any other timeline itself."""
    return timeline.whole if isinstance(timeline, Excerpt) else timeline


def simulated_to_draw(schedule: Schedule, costs: Costs) -> Timeline:
    """As ``simulate``, but of very many microbatches without most of the middle, if ranks come into
    a rhythm there."""
    return ends_to_draw(*shortened(schedule), costs) or simulate(schedule, costs)


def ends_to_draw(short: Schedule, left_out: int, costs: Costs) -> AbridgedTimeline | None:
    """The beginning and the end of a step of very many microbatches; ``None`` where it is drawn as
    a whole, or ranks do not come into a rhythm.

    Args:
        short: compute only, without some microbatches of its middle.
        left_out: how many.
    """
    num_ops = short.num_ops * (1 + left_out / short.num_microbatches)
    if not left_out or num_ops <= MOST_BOXES:
        return None
    return abridged_timeline(short, costs, left_out, OPS_PER_RANK, updates=False)


def excerpts(
    timelines: Iterable[Titled], ops_per_rank: int, *, from_zero: bool = False
) -> list[Titled]:
    """Timelines, and in the place of each that is too long, its beginning and its end.

    Args:
        ops_per_rank: how many ops either has, on average over the ranks.
        from_zero: let the time of each begin at 0.
    """
    return [
        part
        for title, timeline in timelines
        for part in _parts(title, timeline, ops_per_rank, from_zero)
    ]


def most_steady(num_ranks: int) -> int:
    """Microbatches of a steady state that are drawn at most: all others look like these."""
    return max(min(_MOST_STEADY, MOST_BOXES // (_MOST_PER_STAGE * num_ranks)), 1)


def steady_part(timeline: Timeline, num_microbatches: int) -> Timeline:
    """The middle of a stream that never flushes, so many microbatches long: how it looks while it
    goes on. A stream that is not long enough to be in its steady state is given back whole.

    Args:
        timeline: of a stream, from its beginning to its end.
        num_microbatches: how many enter it meanwhile.
    """
    begins = list(entries(timeline.rows).items())
    filling = 2 * len(outputs_by_stage(timeline.rows))
    first = len(begins) - num_microbatches - filling
    if num_microbatches < 1 or first < filling:
        return timeline
    (number, begin), (_, end) = begins[first], begins[first + num_microbatches]
    hair = _HAIR * timeline.makespan
    part = _cut(timeline, begin - hair, end - hair, from_zero=True)
    shown = range(number, number + num_microbatches)
    worked = sum(
        span.end - span.start
        for span in timeline.spans
        if span.op.kind in COMPUTE and span.op.microbatch in shown
    )
    idle = 1 - worked / (timeline.num_ranks * (end - begin)) if end > begin else 0.0
    return replace(part, rhythm=Rhythm(number, (end - begin) / num_microbatches, max(idle, 0.0)))


def beginning(part: Excerpt, num_microbatches: int) -> Excerpt:
    """Of a steady state, what begins while so many microbatches enter it; nothing less of any other
    part."""
    if part.rhythm is None:
        return part
    hair = _HAIR * part.makespan
    fewer = _cut(part, float("-inf"), num_microbatches * part.rhythm.beat - hair, from_zero=False)
    return replace(fewer, whole=part.whole, shift=part.shift, rhythm=part.rhythm)


def shortened_to(title: str, timeline: Timeline, length: float) -> Iterator[Titled]:
    """A timeline, or, if the two leave anything out, what begins in its first ``length`` and what
    begins in its last."""
    first = _first(timeline.rows)
    begins, ends = first + length, first + timeline.makespan - length
    if begins < ends:
        yield from _ends(title, timeline, begins, ends, from_zero=False)
    else:
        yield title, timeline


def _parts(title: str, timeline: Timeline, ops_per_rank: int, from_zero: bool) -> Iterator[Titled]:
    num_ops = _num_ops(timeline)
    is_short = num_ops + len(timeline.transfers) <= MOST_BOXES
    if is_short and not isinstance(timeline, AbridgedTimeline):
        yield title, timeline
        return
    most = min(ops_per_rank * timeline.num_ranks, MOST_BOXES // 4, num_ops // 4)
    begins = _nth((row.starts for row in timeline.rows), most)
    ends = -_nth((_backwards(row.starts) for row in timeline.rows), most)
    if isinstance(timeline, AbridgedTimeline):
        begins, ends = min(begins, timeline.known[0]), max(ends, timeline.known[1])
    hair = _HAIR * timeline.makespan
    yield from _ends(title, timeline, begins - hair, ends + hair, from_zero)


def _num_ops(timeline: Timeline) -> int:
    left_out = timeline.num_left_out if isinstance(timeline, AbridgedTimeline) else 0
    return left_out + sum(len(row.ops) for row in timeline.rows)


def _ends(
    title: str, timeline: Timeline, begins: float, ends: float, from_zero: bool
) -> Iterator[Titled]:
    """The ops that start before ``begins``, and those that start behind ``ends``."""
    first = _cut(timeline, float("-inf"), begins, from_zero)
    last = _cut(timeline, ends, float("inf"), from_zero)
    num_ops = _num_ops(timeline)
    left_out = num_ops - _num_ops(first) - _num_ops(last)
    since = unit_for([last]).show(last.shift + _first(last.rows))
    yield f"{title}: its beginning ({left_out:,} of {num_ops:,} ops left out)", first
    yield f"{title}: its end, from {since} on", last


def _nth(times: Iterable[Iterable[float]], place: int) -> float:
    """The time at a place among ascending times."""
    return next(islice(heapq.merge(*times), place, None))


def _backwards(times: Sequence[float]) -> Iterator[float]:
    return (-time for time in reversed(times))


def _cut(timeline: Timeline, after: float, before: float, from_zero: bool) -> Excerpt:
    """The ops that start between two times."""
    rows = [_part_of(row, after, before) for row in timeline.rows]
    begins = _first(rows)
    shift = begins if from_zero else 0.0
    if shift:
        rows = [
            row._replace(starts=_earlier(row.starts, shift), ends=_earlier(row.ends, shift))
            for row in rows
        ]
    moved = tuple(
        transfer._replace(start=transfer.start - shift, end=transfer.end - shift)
        for transfer in timeline.transfers
        if begins <= transfer.start < before
    )
    return Excerpt(
        tuple(rows),
        timeline.name,
        timeline.source,
        timeline.activations,
        transfers=moved,
        whole=timeline,
        shift=shift,
    )


def _part_of(row: Row, after: float, before: float) -> Row:
    start, stop = bisect_right(row.starts, after), bisect_left(row.starts, before)
    versions = None if row.versions is None else row.versions[start:stop] or None
    return Row(row.ops[start:stop], row.starts[start:stop], row.ends[start:stop], versions)


def _earlier(times: Iterable[float], shift: float) -> array[float]:
    return array("d", [time - shift for time in times])


def _first(rows: Iterable[Row]) -> float:
    return min((row.starts[0] for row in rows if row.ops), default=0.0)


def _between(curve: Curve, first: float, last: float, shift: float) -> Curve:
    """A curve from one time to another, which it begins with what is held there."""
    before, shown = 0.0, []
    for time, held in curve:
        if time - shift <= first:
            before = held
        elif time - shift <= last:
            shown.append((time - shift, held))
    return ((first, before), *shown)
