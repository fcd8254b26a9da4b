"""What is to be seen of a plan when it is drawn: its picture, and a timeline below."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from penstock.core.timing.timeline import Timeline
from penstock.drawing.plan_picture import PlanPicture
from penstock.drawing.timeline.excerpt import steady_part
from penstock.planning.plans.picture import picture_of
from penstock.planning.plans.plan import Plan


class DrawnPlan(NamedTuple):
    """A plan's picture, the timeline below it, and whether that shows versions of weights."""

    picture: PlanPicture
    timeline: Timeline
    versions: bool


def drawn(plan: Plan) -> DrawnPlan:
    """Of a schedule that flushes, one step. What never flushes is seen in its steady state, with
    the versions that its ops read, since its beginning looks like any other schedule's."""
    if plan.prediction.flushes:
        return DrawnPlan(picture_of(plan), plan.simulate(), versions=False)
    return DrawnPlan(picture_of(plan), steady(plan), versions=True)


def steady(plan: Plan) -> Timeline:
    """The steady state of a plan that never flushes: as long as a minibatch, or as a few ticks."""
    per_minibatch = plan.num_microbatches
    shown = plan.prediction.num_shown or per_minibatch
    stream = plan.simulate(ceil((shown + 4 * plan.num_ranks) / per_minibatch))
    return steady_part(stream, shown)
