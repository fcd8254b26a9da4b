"""The schedule of a plan with all that running it takes."""

from __future__ import annotations

from penstock.planner import Plan
from penstock.run.layout import Layout
from penstock.run.recipe import Recipe
from penstock.schedule import Schedule
from penstock.schedule.lower import (
    add_agreement,
    add_communication,
    add_reduce,
    add_update,
    forward_only,
)


def lowered(
    plan: Plan, layout: Layout, recipe: Recipe, num_microbatches: int, training: bool, update: bool
) -> Schedule:
    """What the ranks perform for one minibatch.

    Args:
        plan: whose schedule it is.
        layout: of the model.
        recipe: how to train.
        num_microbatches: that there are.
        training: otherwise only the forwards.
        update: whether weights are updated at the end.
    """
    schedule = plan.build_schedule(num_microbatches)
    if not training:
        return add_communication(forward_only(schedule))
    if update:
        agrees, late = recipe.needs_agreement, recipe.post_validate
        schedule = add_reduce(schedule, layout.shared_stages)
        schedule = add_update(schedule, together=layout.needs_order or (agrees and not late))
        if agrees:
            schedule = add_agreement(schedule, late=late)
    return add_communication(schedule)
