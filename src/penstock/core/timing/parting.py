"""Where a measured timeline parts from its prediction, and why.

The first op that departs is named, as all later ones may only have inherited it. If it started at
another time than predicted, the walk goes back over whatever it followed directly, the op before it
on its rank or the one on another rank whose result it needed last. Along that way, what ops and the
pauses between them took longer adds up to the delay, and the largest part of it is the cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import median
from typing import Literal, NamedTuple

from penstock.base.errors import InputError
from penstock.core.schedule.op import COMPUTE, Op
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.idle import usual_lengths
from penstock.core.timing.spans import BUSY, Span
from penstock.core.timing.timeline import Timeline

TOLERANCE = 0.02
"""Less than this share of the predicted step is no difference."""

_NOISES = 4.0


class Cause(NamedTuple):
    """Something that took another time than predicted.

    Attributes:
        what: ``"op"``: the op itself; ``"pause"``: from the end of ``after`` until the op started;
            ``"begin"``: from the start of the step until the op started, the first of its rank.
        op: the op that took, or began at, another time.
        rank: where it ran.
        after: the op that it followed, where ``what`` is ``"pause"``.
        after_rank: where that ran; another rank than ``rank`` if its result had to travel.
        predicted: how long it was to take.
        measured: how long it took.
    """

    what: Literal["op", "pause", "begin"]
    op: Op
    rank: int
    after: Op | None
    after_rank: int
    predicted: float
    measured: float

    @property
    def excess(self) -> float:
        """How much longer the cause took than predicted; negative if it was quicker."""
        return self.measured - self.predicted


class Parting(NamedTuple):
    """The first op that did not run as predicted.

    Attributes:
        predicted: when it was to run.
        measured: when it ran.
        cause: the largest part of the difference.
    """

    predicted: Span
    measured: Span
    cause: Cause

    @property
    def start_excess(self) -> float:
        """How much later the op started than predicted; negative if it was early."""
        return self.measured.start - self.predicted.start


def find_parting(
    predicted: Timeline, measured: Timeline, tolerance: float = TOLERANCE
) -> Parting | None:
    """The first op, in measured time, that started or took otherwise than predicted.

    Args:
        predicted: the step as simulated, with or without messages.
        measured: the same step as recorded.
        tolerance: what does not count as a difference, as a share of the predicted makespan. What
            is within four times the usual scatter of op lengths does not count either.

    Returns:
        ``None`` if no op departs.

    Raises:
        InputError: the timelines do not show the same compute ops on the same ranks.
    """
    pair = _BothTimelines(predicted, measured)
    allowed = max(tolerance * predicted.makespan, _NOISES * _scatter(measured))
    for span in sorted(pair.measured.values(), key=lambda span: (span.start, span.rank)):
        before = pair.predicted[span.op]
        if abs(span.start - before.start) > allowed:
            return Parting(before, span, pair.cause_of_start(span.op))
        length = Cause("op", span.op, span.rank, None, span.rank, *pair.lengths(span.op))
        if abs(length.excess) > allowed:
            return Parting(before, span, length)
    return None


def _scatter(timeline: Timeline) -> float:
    usual = usual_lengths(timeline)
    busy = [span for span in timeline.spans if span.op.kind in BUSY]
    return median([abs(span.end - span.start - usual[span.op]) for span in busy] or [0.0])


class _BothTimelines:
    """The work that both timelines show."""

    def __init__(self, predicted: Timeline, measured: Timeline) -> None:
        ours, theirs = _work(predicted), _work(measured)
        for shown, other, where in ((ours, theirs, "measured"), (theirs, ours, "predicted")):
            for op, span in shown.items():
                there = other.get(op)
                if op.kind in COMPUTE and (there is None or there.rank != span.rank):
                    raise InputError(
                        f"{op} of rank {span.rank} is not in the {where} timeline; compare "
                        "timelines of one schedule"
                    )
        self.predicted = {op: span for op, span in ours.items() if op in theirs}
        self.measured = {op: span for op, span in theirs.items() if op in ours}
        rows = [[s.op for s in row if s.op in self.measured] for row in measured.by_rank]
        self._schedule = Schedule.of(rows)
        self._previous = {op: before for row in rows for before, op in pairwise(row)}

    def lengths(self, op: Op) -> tuple[float, float]:
        """How long an op was to take, and took."""
        shown = self.predicted[op], self.measured[op]
        return shown[0].end - shown[0].start, shown[1].end - shown[1].start

    def cause_of_start(self, op: Op) -> Cause:
        """The largest part of an op's delay, or of what it was early."""
        late = self.measured[op].start > self.predicted[op].start
        # Who is late was held up in the measured timeline; who is early would have been in the
        # predicted one.
        parts = list(self._way_back(op, self.measured if late else self.predicted))
        sign = 1 if late else -1
        # Of equal parts the earliest one, which stands last.
        return max(reversed(parts), key=lambda part: sign * part.excess)

    def _way_back(self, op: Op, shown: Mapping[Op, Span]) -> Iterator[Cause]:
        """The parts of the time until ``op`` started, from the last to the first."""
        while True:
            start = self.predicted[op].start, self.measured[op].start
            rank = shown[op].rank
            before = self._followed(op, shown)
            if before is None:
                yield Cause("begin", op, rank, None, rank, *start)
                return
            ends = self.predicted[before].end, self.measured[before].end
            there = shown[before].rank
            yield Cause("pause", op, rank, before, there, start[0] - ends[0], start[1] - ends[1])
            yield Cause("op", before, there, None, there, *self.lengths(before))
            op = before

    def _followed(self, op: Op, shown: Mapping[Op, Span]) -> Op | None:
        """The op that ``op`` directly followed."""
        span, local = shown[op], self._previous.get(op)
        needed = [need for need in self._schedule.dependencies(op) if need in shown]
        remote = [need for need in needed if shown[need].rank != span.rank]
        last = max(remote, key=lambda need: shown[need].end, default=None)
        if last is None or local is None:
            return last or local
        # An idle rank waited for the result, if that could have been under way for so long.
        idle, spare = span.start - shown[local].end, shown[local].end - shown[last].end
        return last if idle > spare else local


def _work(timeline: Timeline) -> dict[Op, Span]:
    return {span.op: span for span in timeline.spans if span.op.kind in BUSY}
