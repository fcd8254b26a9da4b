"""Streams: how a schedule that never flushes is rehearsed, and what its steady state takes.

A stream has no steps: what a microbatch takes shows in its middle, between the warm-up and the
draining at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, lcm
from typing import NamedTuple

from penstock.base.errors import InputError
from penstock.base.values import is_whole
from penstock.core.schedule import Schedule
from penstock.core.schedule.op import COMPUTE, RELEASING
from penstock.core.schedule.rounds import Rounds
from penstock.core.timing.costs import Costs
from penstock.core.timing.timeline import Timeline
from penstock.core.versions import USUAL, Policy, rounds_of
from penstock.planning.plans import Plan

_MICROBATCHES_PER_RANK = 8
_FEWEST_MINIBATCHES = 4


@dataclass(frozen=True)
class Stream:
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
    def of(cls, schedule: Schedule, policy: Policy, minibatch: int) -> Stream:
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
    """What counts as the steady state of a stream, and what one device would need for it.

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
    """What is performed. Of a plan that never flushes, a stream that is long enough to show its
    steady state; a schedule is as long as it is."""
    if isinstance(plan, Schedule):
        return plan
    if not plan.versions.asynchronous:
        return plan.build_schedule()
    size = plan.num_microbatches
    least = _MICROBATCHES_PER_RANK * plan.num_ranks
    return plan.build_schedule(size * max(_FEWEST_MINIBATCHES, ceil(least / size)))


def stream_of(plan: Plan | Schedule, schedule: Schedule, minibatch: int | None) -> Stream | None:
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
    return Stream.of(schedule, policy, size)


def _refuse(minibatch: object, why: str) -> None:
    if minibatch is not None:
        raise InputError(f"minibatch is {minibatch!r}, but {why}; leave it out")
