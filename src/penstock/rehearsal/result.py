"""What a rehearsal gives: the step as it went, beside the step as it was predicted."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.cost import Costs
from penstock.rehearsal.costs import with_hop
from penstock.rehearsal.reports import StepTimes
from penstock.schedule import Kind, Schedule
from penstock.simulator import simulate
from penstock.timeline import BUSY, Span, Timeline

_HELD_UP_SECONDS = 1e-3


class Comparison(NamedTuple):
    """One figure, predicted and measured.

    Attributes:
        name: ``"makespan"`` or ``"steady seconds"`` (seconds), ``"bubble"``, ``"stage bubble"`` or
            ``"steady efficiency"`` (shares of 1).
        predicted, measured: its values.
    """

    name: str
    predicted: float
    measured: float

    @property
    def is_share(self) -> bool:
        """Whether it is a share of 1, not seconds."""
        return self.name not in ("makespan", "steady seconds")

    @property
    def difference(self) -> float:
        """By how much the measured one is larger: for seconds as a share of the predicted, for
        shares as it is (0.01 is one percentage point)."""
        apart = self.measured - self.predicted
        return apart if self.is_share or not self.predicted else apart / self.predicted


@dataclass(frozen=True)
class Rehearsal:
    """A plan rehearsed.

    Attributes:
        predicted: the simulator's timeline, with hops as long as they were measured in this run.
        measured: the timeline of the median step.
        step_seconds: makespan of every step after the warm-up.
        pace_seconds: from the end of one step to the end of the next, where steps follow each other
            without a pause; the median.
        hop_seconds: how long a message took from rank to rank beyond its planned hop; median.
    """

    predicted: Timeline
    measured: Timeline
    step_seconds: tuple[float, ...]
    pace_seconds: float
    hop_seconds: float
    steady_seconds: Comparison | None = None
    steady_efficiency: Comparison | None = None

    @property
    def num_held_up(self) -> int:
        """How many ops of the measured step took a millisecond longer than they should: this
        machine was doing something else."""
        planned = {span.op: span.end - span.start for span in self.predicted.spans}
        return sum(
            span.end - span.start > planned[span.op] + _HELD_UP_SECONDS
            for span in self.measured.spans
            if span.op.kind in BUSY
        )

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Makespan and both bubbles; of a stream, its steady state too."""
        steady = (self.steady_seconds, self.steady_efficiency)
        whole = (
            Comparison(name, getattr(self.predicted, field), getattr(self.measured, field))
            for name, field in (
                ("makespan", "makespan"),
                ("bubble", "bubble"),
                ("stage bubble", "stage_bubble"),
            )
        )
        return (*whole, *(one for one in steady if one is not None))


def rehearsal_of(schedule: Schedule, costs: Costs, steps: Sequence[StepTimes]) -> Rehearsal:
    """Compare what was measured with what the simulator says.

    Args:
        schedule: lowered, as it was performed.
        costs: seconds, as they were performed.
        steps: all of them; the first is warm-up unless it is the only one.
    """
    timelines = [_timeline(schedule, times) for times in steps[1:] or steps]
    lengths = tuple(timeline.makespan for timeline in timelines)
    middle = statistics.median_low(lengths)
    hop_seconds = _measured_hop(schedule, costs, timelines)
    return Rehearsal(
        simulate(schedule, with_hop(costs, hop_seconds)),
        timelines[lengths.index(middle)],
        lengths,
        _pace(steps),
        hop_seconds,
    )


def _pace(steps: Sequence[StepTimes]) -> float:
    """The slowest rank's, which in the long run is everybody's."""
    ends = [[own[-1] for own in times] for times in steps]
    paces = [
        [after - before for before, after in zip(*pair, strict=True)]
        for pair in itertools.pairwise(ends)
    ]
    return max(map(statistics.median, zip(*paces, strict=True)), default=0.0)


def _timeline(schedule: Schedule, times: StepTimes) -> Timeline:
    spans = (
        Span(op, rank, start, end)
        for rank, (ops, own) in enumerate(zip(schedule.ranks, times, strict=True))
        for op, start, end in zip(ops, own[::2], own[1::2], strict=True)
    )
    return Timeline.of(spans, schedule.num_ranks, schedule.name, "measured")


def _measured_hop(schedule: Schedule, costs: Costs, timelines: Sequence[Timeline]) -> float:
    """From the end of an op until its result was there, where somebody was waiting for it already;
    less what was planned."""
    found = []
    for timeline in timelines:
        spans = {span.op: span for span in timeline.spans}
        for span in timeline.spans:
            if span.op.kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD):
                (send,) = schedule.dependencies(span.op)
                made = spans[schedule.dependencies(send)[0]].end
                if span.start < made:
                    found.append(span.end - made - costs.delay(send, span.op))
    return max(0.0, statistics.median(found)) if found else 0.0
