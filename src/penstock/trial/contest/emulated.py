"""The pace of a plan on devices that are not here: every rank a process, compute a wait."""

from __future__ import annotations

from typing import NamedTuple

from penstock.core.timing.timeline import Timeline
from penstock.planning.plans import Plan
from penstock.training.rehearsal import rehearse

_STEPS = 4
_KIB = 1024


class Pace(NamedTuple):
    """What a step takes on emulated devices.

    Attributes:
        seconds: of a minibatch; without a flush, in the steady state.
        timeline: as it was measured.
    """

    seconds: float
    timeline: Timeline


def pace_of(plan: Plan) -> Pace:
    """Rehearse a plan with its own times.

    Raises:
        InputError: it has something that emulated devices do not have.
        RunError: a process failed.
    """
    largest = max((stage.transfer_bytes for stage in plan.stages), default=0)
    performed = rehearse(plan, steps=_STEPS, message_bytes=max(_KIB, largest))
    if performed.steady_seconds is not None:
        return Pace(performed.steady_seconds.measured * plan.num_microbatches, performed.measured)
    return Pace(performed.measured.makespan, performed.measured)
