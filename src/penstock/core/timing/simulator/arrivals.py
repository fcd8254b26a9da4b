"""A source that gives a frame now and then, and how many of its frames are let in."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from penstock.base.errors import InputError
from penstock.base.values import is_number, shown
from penstock.core.schedule.durations import Durations
from penstock.core.schedule.op import Kind, Op
from penstock.core.schedule.schedule import Schedule

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Arrivals:
    """When the frames of a stream may enter the first stage.

    Attributes:
        period: from one frame to the next; the first comes at 0.
        waits_for: for the first forward of a frame, the last one of an earlier frame, which must
            have left before.
    """

    period: float
    waits_for: dict[Op, Op]

    @classmethod
    def of(cls, schedule: Schedule, costs: Durations, rate: float) -> Arrivals:
        """What a source of so many frames per unit of time does to a schedule.

        A live stream (one whose backwards go through the newest activations) has at most as many
        frames inside as it has stages: more would queue between stages, where each makes all later
        ones late, and none comes out sooner. Only where hops are so long that this would cost
        frames there are as many more as the rate takes. By Little's law, a frame is then inside for
        as many ticks as there are stages, at most. Of other schedules, all may be inside.

        Raises:
            InputError: the rate is no number > 0.
        """
        if not is_number(rate) or not 0 < rate < inf or not 1 / rate < inf:
            raise InputError(
                f"arrivals is {shown(rate)}; give how many frames arrive per second, a number > 0"
            )
        waits_for: dict[Op, Op] = {}
        if schedule.activations == "newest":
            last, part = schedule.num_stages - 1, schedule.num_slices - 1
            inside = _inside(schedule, costs, float(rate))
            for frame in range(inside, schedule.num_microbatches):
                waits_for[Op(0, Kind.FORWARD, frame)] = Op(last, Kind.FORWARD, frame - inside, part)
        return cls(1 / rate, waits_for)

    def time_of(self, op: Op) -> float:
        """Before which an op cannot start, because its frame is not there."""
        return self.period * op.microbatch if op.kind is Kind.FORWARD and op.stage == 0 else 0.0


def _inside(schedule: Schedule, costs: Durations, rate: float) -> int:
    """How many frames may be between their first and their last forward."""
    stages = range(schedule.num_stages)
    forwards = [Op(stage, Kind.FORWARD, 0) for stage in stages]
    hops = sum(map(costs.delay, forwards, forwards[1:]))
    through = sum(map(costs.duration, forwards)) + hops
    # A rank that is busy for a tick with each frame lets no more through, whatever arrives.
    busiest = max(sum(map(costs.duration, ops)) for ops in schedule.ranks)
    most = min(rate, schedule.num_microbatches / busiest) if busiest else rate
    return max(schedule.num_stages, ceil(through * most * (1 - _ROUNDING)))
