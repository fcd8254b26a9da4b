"""What of a recipe goes with others than a stage's own ranks making its updates."""

from __future__ import annotations

from penstock.base.errors import InputError
from penstock.engine.run.layout import Layout
from penstock.engine.run.recipe import Recipe
from penstock.planning.plans import Plan


def check_updates(plan: Plan, recipe: Recipe, *, one_process: bool) -> None:
    """Raise ``InputError`` for updates that who makes them in a plan cannot make so.

    Args:
        one_process: whether all ranks are threads, of which each makes all updates of its stages,
            unless there are parameter servers.
    """
    reducer = plan.summing.reducer
    shares = reducer == "parameter-server" or (reducer == "sharded" and not one_process)
    if recipe.post_validate and shares:
        raise InputError(
            f"post_validate undoes updates, and with the reducer {reducer!r} others have made a "
            "part of them; leave it out, or take another reducer"
        )
    if not plan.summing.stale:
        return
    if recipe.loss is not None and recipe.optimizer is None:
        raise InputError(
            "without an optimizer there is nothing to be late; give optimizer=…, or take stale=0"
        )
    limits = (recipe.clip_norm, recipe.clip_stage_norm, recipe.loss_scale)
    if any(limit is not None for limit in limits):
        raise InputError(
            "clip_norm, clip_stage_norm and a grad_scaler need all gradients of one minibatch at "
            "one update, and with stale updates they come in several; leave them out, or take "
            "stale=0"
        )


def check_stage_norms(layout: Layout, recipe: Recipe) -> None:
    """Raise ``InputError`` where a parameter server would clip a stage by the norm of a part of its
    gradients."""
    withheld = layout.weights.withheld
    if recipe.clip_stage_norm is not None and withheld:
        names = ", ".join(map(repr, withheld[:3])) + ", …" * (len(withheld) > 3)
        raise InputError(
            f"clip_stage_norm needs all gradients of a stage, and a parameter server does not have "
            f"those of {names}, which stages share or tensor ranks have terms of; take clip_norm, "
            "or another reducer"
        )
