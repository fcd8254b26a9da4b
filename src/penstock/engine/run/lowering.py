"""The schedule of a plan with all that running it takes."""

from __future__ import annotations

from penstock.core.schedule import Schedule
from penstock.core.schedule.lower import (
    add_agreement,
    add_communication,
    add_reduce,
    add_update,
    add_updates,
    first_microbatches,
    forward_only,
)
from penstock.core.schedule.residence import add_residence
from penstock.core.schedule.rounds import Rounds
from penstock.engine.run.layout import Layout
from penstock.engine.run.recipe import Recipe
from penstock.planning.plans import Plan
from penstock.planning.plans.spilling import with_residence


def synchronous(
    plan: Plan, layout: Layout, recipe: Recipe, num_microbatches: int, update: bool
) -> Schedule:
    """What the ranks perform for one flushed minibatch; with ``update``, weights change at its
    end."""
    schedule = plan.build_schedule(num_microbatches)
    if plan.spill is not None:
        agrees = recipe.needs_agreement
        return add_communication(
            with_residence(schedule, plan.spill, agrees=agrees, updates=update)
        )
    if update:
        agrees, late = recipe.needs_agreement, recipe.post_validate
        schedule = add_reduce(schedule, layout.weights.shared_stages)
        schedule = add_update(
            schedule, together=agrees and not late, last=layout.weights.updating_tied_weights
        )
        if agrees:
            schedule = add_agreement(schedule, late=late)
    return add_communication(schedule)


def asynchronous(plan: Plan, num_microbatches: int, rounds: Rounds) -> Schedule:
    """What the ranks perform for a stream of microbatches that ends there."""
    return add_communication(add_updates(plan.build_schedule(num_microbatches), rounds))


def forwards(plan: Plan, num_microbatches: int) -> Schedule:
    """What the ranks perform to evaluate; replicas without a microbatch have nothing to do."""
    schedule = plan.build_schedule(max(num_microbatches, *plan.replicas))
    schedule = forward_only(first_microbatches(schedule, num_microbatches))
    if plan.spill is not None:
        schedule = add_residence(schedule, ahead=plan.spill.ahead)
    return add_communication(schedule)
