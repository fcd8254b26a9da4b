"""The result of a rehearsal: the step as it went, beside the step as it was predicted.

Streams: how a schedule that never flushes is rehearsed, and what its steady state takes.

A stream has no steps: what a microbatch takes shows in its middle, between the warm-up and the
draining at its end.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, lcm
from typing import NamedTuple

from penstock.base.errors import InputError
from penstock.base.values import is_whole
from penstock.core.schedule import Kind, Schedule
from penstock.core.schedule.op import COMPUTE, RELEASING
from penstock.core.schedule.rounds import Rounds
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator import simulate
from penstock.core.timing.spans import BUSY, Span
from penstock.core.timing.timeline import Timeline
from penstock.core.versions import USUAL, Policy, rounds_of
from penstock.planning.plans import Plan

StepTimes = list[list[float]]
"""For each rank, when its ops start and end: start, end, start, end, …"""

_HELD_UP_SECONDS = 1e-3


class FigureComparison(NamedTuple):
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
        steady_seconds: of a schedule that never flushes, what a microbatch takes in the middle of
            its stream: the time between two backwards at stage 0 that are about half a stream
            apart, divided by the microbatches between them; of the steps, the median. ``None`` if
            it flushes, or the stream is too short.
        steady_efficiency: one device's compute per microbatch, divided by the number of ranks and
            by ``steady_seconds``: 1.0 is as many devices, each as fast as one alone. Updates are
            no compute.
    """

    predicted: Timeline
    measured: Timeline
    step_seconds: tuple[float, ...]
    pace_seconds: float
    hop_seconds: float
    steady_seconds: FigureComparison | None = None
    steady_efficiency: FigureComparison | None = None

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
    def comparisons(self) -> tuple[FigureComparison, ...]:
        """Makespan and both bubbles; of a stream, its steady state too."""
        steady = (self.steady_seconds, self.steady_efficiency)
        whole = (
            FigureComparison(name, getattr(self.predicted, field), getattr(self.measured, field))
            for name, field in (
                ("makespan", "makespan"),
                ("bubble", "bubble"),
                ("stage bubble", "stage_bubble"),
            )
        )
        return (*whole, *(comparison for comparison in steady if comparison is not None))


def rehearsal_of(
    schedule: Schedule, costs: Costs, steps: Sequence[StepTimes], period: int | None = None
) -> Rehearsal:
    """Compare what was measured with what the simulator says.

    Args:
        schedule: lowered, as it was performed.
        costs: seconds, as they were performed.
        steps: all of them; the first is warm-up unless it is the only one.
        period: after how many microbatches a stream repeats itself; ``None`` if it is none.
    """
    timelines = [_timeline(schedule, costs, times) for times in steps[1:] or steps]
    lengths = tuple(timeline.makespan for timeline in timelines)
    middle = statistics.median_low(lengths)
    hop_seconds = _measured_hop(schedule, costs, timelines)
    predicted = simulate(schedule, costs.with_longer_hops(hop_seconds))
    steady = None if period is None else Steady.of(schedule, costs, period)
    return Rehearsal(
        predicted,
        timelines[lengths.index(middle)],
        lengths,
        _pace(steps),
        hop_seconds,
        *(_steady(steady, predicted, timelines) if steady is not None else ()),
    )


def _steady(
    steady: Steady, predicted: Timeline, timelines: Sequence[Timeline]
) -> tuple[FigureComparison, FigureComparison]:
    foreseen = steady.seconds(predicted)
    measured = statistics.median(map(steady.seconds, timelines))
    return (
        FigureComparison("steady seconds", foreseen, measured),
        FigureComparison(
            "steady efficiency", steady.efficiency(foreseen), steady.efficiency(measured)
        ),
    )


def _pace(steps: Sequence[StepTimes]) -> float:
    """The slowest rank's, which in the long run is everybody's."""
    ends = [[own[-1] for own in times] for times in steps]
    paces = [
        [after - before for before, after in zip(*pair, strict=True)]
        for pair in itertools.pairwise(ends)
    ]
    return max(map(statistics.median, zip(*paces, strict=True)), default=0.0)


def _timeline(schedule: Schedule, costs: Costs, times: StepTimes) -> Timeline:
    spans = [
        Span(op, rank, start, end)
        for rank, (ops, own) in enumerate(zip(schedule.ranks, times, strict=True))
        for op, start, end in zip(ops, own[::2], own[1::2], strict=True)
    ]
    ends = {span.op: span.end for span in spans}

    def working(span: Span) -> Span:
        """Without an update's wait for the gradients of other copies, which is no work."""
        if span.op.kind is not Kind.UPDATE:
            return span
        there = [
            ends[needed] + costs.delay(needed, span.op)
            for needed in schedule.dependencies(span.op)
            if schedule.where[needed] != span.rank
        ]
        # They leave within the op that hands them in, so they may be there before it has ended.
        waited = min(max(there, default=span.start), span.end - costs.duration(span.op))
        return span._replace(start=max(span.start, waited))

    spans = [working(span) for span in spans]
    return Timeline.of(spans, schedule.num_ranks, schedule.name, "measured", schedule.activations)


def _measured_hop(schedule: Schedule, costs: Costs, timelines: Sequence[Timeline]) -> float:
    """From the end of an op until its result was there, where somebody was waiting for it already;
    less what was planned."""
    hops = []
    for timeline in timelines:
        spans = {span.op: span for span in timeline.spans}
        for span in timeline.spans:
            if span.op.kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD):
                (send,) = schedule.dependencies(span.op)
                made = spans[schedule.dependencies(send)[0]].end
                if span.start < made:
                    hops.append(span.end - made - costs.delay(send, span.op))
    return max(0.0, statistics.median(hops)) if hops else 0.0


_MICROBATCHES_PER_RANK = 8
_FEWEST_MINIBATCHES = 4


@dataclass(frozen=True)
class RehearsedStream:
    """A stream of microbatches as it is rehearsed.

    Attributes:
        policy: which weights passes read, and when stages update.
        rounds: when each stage updates.
        period: after how many microbatches the steady state repeats itself.
    """

    policy: Policy
    rounds: Rounds
    period: int

    @classmethod
    def of(cls, schedule: Schedule, policy: Policy, minibatch: int) -> RehearsedStream:
        """The stream that a schedule of compute ops is.

        Args:
            schedule: one of a family that never flushes.
            policy: for that family.
            minibatch: microbatches per update, if the policy updates once per minibatch.

        Raises:
            InputError: the policy does not go with the schedule.
        """
        rounds = rounds_of(policy, schedule, minibatch)
        size = minibatch if policy.updates == "minibatch" else 1
        return cls(policy, rounds, lcm(size, *rounds.replicas))


class Steady(NamedTuple):
    """The stretch of a stream that counts as its steady state, and the seconds of one device for
    it.

    Attributes:
        first, last: microbatches. The steady state goes from the end of the backward of one at
            stage 0 to that of the other: about a quarter and three quarters into the stream, whole
            periods apart.
        device_seconds: what a device would need per microbatch if it shared the compute of one
            device evenly with the others; updates are not in it.
    """

    first: int
    last: int
    device_seconds: float

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs, period: int) -> Steady | None:
        """The steady state of a stream; ``None`` if it is too short to have one."""
        first = schedule.num_microbatches // 4
        last = first + (schedule.num_microbatches // 2) // period * period
        if last == first:
            return None
        ops = (op for ops in schedule.ranks for op in ops if op.kind in COMPUTE)
        compute = sum(costs.duration(op) for op in ops)
        return cls(first, last, compute / schedule.num_microbatches / schedule.num_ranks)

    def seconds(self, timeline: Timeline) -> float:
        """Seconds per microbatch, as the backwards at stage 0 end."""
        ends = {}
        for row in timeline.rows:
            for op, end in zip(row.ops, row.ends, strict=True):
                if op.stage == 0 and op.kind in RELEASING:
                    ends[op.microbatch] = end
        return (ends[self.last] - ends[self.first]) / (self.last - self.first)

    def efficiency(self, seconds: float) -> float:
        """The share of the devices' time in which they compute: 1 is as many devices, each as fast
        as one alone."""
        return self.device_seconds / seconds


def compute_of(plan: Plan | Schedule) -> Schedule:
    """The ops to perform. Of a plan that never flushes, a stream that is long enough to show its
    steady state; a schedule is as long as it is."""
    if isinstance(plan, Schedule):
        return plan
    if not plan.versions.asynchronous:
        return plan.build_schedule()
    size = plan.num_microbatches
    least = _MICROBATCHES_PER_RANK * plan.num_ranks
    return plan.build_schedule(size * max(_FEWEST_MINIBATCHES, ceil(least / size)))


def stream_of(
    plan: Plan | Schedule, schedule: Schedule, minibatch: int | None
) -> RehearsedStream | None:
    """How what is performed streams; ``None`` if it flushes.

    Args:
        plan: a plan, which says so, or a schedule by the name of a family.
        schedule: what is performed.
        minibatch: microbatches per update, for a schedule that updates once per minibatch; by
            default as many as it has stages. A plan says it itself.

    Raises:
        InputError: ``minibatch`` where it has no meaning, or too small a one.
    """
    if isinstance(plan, Plan):
        _refuse(minibatch, "the plan has its own num_microbatches")
        policy: Policy | None = plan.versions
        size = plan.num_microbatches
    else:
        policy = USUAL.get(plan.name.partition(":")[0])  # the name may have options
        if policy is None or policy.updates == "microbatch":
            _refuse(minibatch, f"{plan.name or 'the schedule'} does not update once per so many")
        size = schedule.num_stages if minibatch is None else minibatch
    if policy is None or not policy.asynchronous:
        return None
    if not is_whole(size) or size < 1:
        raise InputError(f"minibatch is {size!r}, but must be a whole number ≥ 1")
    return RehearsedStream.of(schedule, policy, size)


def _refuse(minibatch: object, why: str) -> None:
    if minibatch is not None:
        raise InputError(f"minibatch is {minibatch!r}, but {why}; leave it out")
